"""Prefect flows, tasks and deployments around the steps."""
