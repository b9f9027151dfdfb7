"""How far a collection is, how fast it is, and when it will end."""

from __future__ import annotations

import time
from collections.abc import Callable

Progress = Callable[[int, int, str], None]
"""Called with (done, total, rate and time left as text)."""


class Meter:
    """Progress of a collection.

    Args:
        total: prompts in all.
        missing: those whose shards do not exist yet.

    `rows` counts the recorded positions.
    """

    def __init__(self, total: int, missing: int, progress: Progress | None):
        self.total, self.missing, self.progress = total, missing, progress
        self.done = 0.0
        self.in_shards = self.rows = 0
        self.started = time.perf_counter()

    def advance(self, prompts: float) -> None:
        """A share of the prompts is done."""
        self.done += prompts
        if self.progress:
            seconds = time.perf_counter() - self.started
            left = seconds / self.done * (self.missing - self.done)
            rate = f"{self.rows / seconds:.0f} tokens/s, " if self.rows else ""
            self.progress(
                self.total - self.missing + int(self.done + 1e-6),
                self.total,
                f"{rate}{left / 60:.1f} min left",
            )

    def shard_done(self, prompts: int) -> None:
        """A shard of so many prompts is written, whichever texts it lacked."""
        self.in_shards += prompts
        self.advance(self.in_shards - self.done)
