"""Deployed bundles: bundle (manifest, checks, opening)."""
