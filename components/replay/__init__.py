"""Replay: what a strategy would do on traced prompts, and how long that would take, without running a model."""
