"""Bundles: what `make deploy` writes and the server loads."""
