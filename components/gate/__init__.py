"""The gate: may a release be promoted?"""
