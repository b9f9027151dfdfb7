"""A dashboard for Grafana and a scrape for Prometheus, made for `/metrics` (docs/metrics.md)."""

from pathlib import Path

GRAFANA = Path(__file__).parent / "grafana.json"
