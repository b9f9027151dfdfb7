"""Tuning: which strategy with which parameters, by replay and then by measurement."""
