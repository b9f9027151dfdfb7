"""What MLflow shows: cards with signatures and examples, traces as datasets, and what a tuning
tried as nested runs."""
