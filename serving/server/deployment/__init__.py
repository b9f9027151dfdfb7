"""Switching from one bundle to the next with no request lost."""
