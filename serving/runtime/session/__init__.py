"""One request in flight: its text, its counters, and its lane on each model."""
