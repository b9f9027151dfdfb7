"""The steps with `--engine URL`: what is asked of an engine at an address, and each step over the
engine port."""
