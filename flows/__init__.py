"""Prefect flows: thin wrappers that connect components, registry and serving."""
