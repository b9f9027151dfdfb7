"""The only place that knows MLflow: publish, resolve, promote; with the catalogue of pairs."""
