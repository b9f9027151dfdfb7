"""How well a release's artifacts predict, on prompts that they have not learnt from."""
