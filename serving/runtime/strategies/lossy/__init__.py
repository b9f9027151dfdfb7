"""Strategies that trade the target's exact distribution for speed."""
