"""The bench: strategies and peers on the same prompts in one interleaved run."""
