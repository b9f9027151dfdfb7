"""What is served: a loaded pair, its strategies, and the state that they learn."""
