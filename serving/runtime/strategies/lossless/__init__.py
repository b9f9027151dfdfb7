"""Strategies whose output follows the target's distribution exactly."""
