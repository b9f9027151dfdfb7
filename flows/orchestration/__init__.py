"""Prefect flows: the loop, monitoring, and what deploys them."""
