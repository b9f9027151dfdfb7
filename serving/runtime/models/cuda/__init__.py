"""Models with fixed shapes, so that their forward passes can be captured as CUDA graphs."""
