"""What the gate measures and records, a file for each part; `draftwell.flows.steps.gate` puts them
together."""
