"""Tests of the package components."""
