"""Tests of the package flows."""
