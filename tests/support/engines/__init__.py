"""Servers that play engines at addresses: their APIs and metrics, with texts and acceptance of a
simulated law."""
