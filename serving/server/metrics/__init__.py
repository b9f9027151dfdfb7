"""Prometheus metrics and a Grafana dashboard."""
