"""Drift: is the served traffic still what the champion was calibrated on?"""
