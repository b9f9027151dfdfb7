"""What the gate measures and records, a file for each part; `flows.steps.gate` puts them
together."""
