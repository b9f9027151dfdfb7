"""Prometheus metrics and a Grafana dashboard.

metrics (counters and histograms, by observing the scheduler), serving_state (values read when asked
for), endpoint (`/metrics` and the count of HTTP answers), dashboards (Grafana and Prometheus
files).
"""
