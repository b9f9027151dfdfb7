"""Spreading a step over workers: threads of this process or a Ray cluster."""
