"""A tuning as tables, plots and one HTML page."""
