"""How far a collection is, how fast it is, and when it will end."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from draftwell.components.collect.continuations import turns_of
from draftwell.components.prompts.prompt import Prompt
from draftwell.serving.runtime.requests import Sampling

Progress = Callable[[int, int, str], None]
"""Called with (done, total, rate and time left as text)."""


class Meter:
    """Progress of a collection. A text counts half when it is written and half when both models
    have read it.

    Args:
        total: prompts in all.
        missing: those whose shards do not exist yet.
        kinds: texts of each turn.
    """

    def __init__(self, total: int, missing: int, kinds: int, progress: Progress | None):
        self.total, self.missing, self.kinds, self.progress = total, missing, kinds, progress
        self.done = 0.0
        self.rows = self.generated = 0
        self.generating = 0.0
        self.started = time.perf_counter()
        self.end = 0.0

    def shard(self, prompts: Sequence[tuple[Prompt, Sampling]], turns: int) -> None:
        """A shard of these prompts begins."""
        self.end = self.done + len(prompts)
        self.share = len(prompts) / (
            2 * self.kinds * sum(turns_of(prompt, turns) for prompt, _ in prompts)
        )

    def half_text(self) -> None:
        """Half a text is done."""
        self.done = min(self.end, self.done + self.share)
        self.report()

    def shard_done(self) -> None:
        """A shard is written, whichever texts it lacked."""
        self.done = self.end
        self.report()

    def recorded(self, rows: int) -> None:
        """A text's rows are made."""
        self.rows += rows
        self.half_text()

    def written(self, kind: str, tokens: int, seconds: float) -> None:
        """All texts of a kind are written."""
        if kind == "target":
            self.generated += tokens
            self.generating += seconds

    def report(self) -> None:
        """Call `progress` with how far the collection is."""
        if self.progress:
            seconds = time.perf_counter() - self.started
            left = seconds / self.done * (self.missing - self.done)
            rate = f"{self.rows / seconds:.0f} tokens/s, " if self.rows else ""
            self.progress(
                self.total - self.missing + int(self.done + 1e-6),
                self.total,
                f"{rate}{left / 60:.1f} min left",
            )

    def rates(self) -> dict[str, float]:
        """Tokens per second so far: of the whole collection, and of the target's own writing."""
        rate = self.rows / (time.perf_counter() - self.started)
        if not self.generated:
            return {"collect_tokens_per_second": rate}
        generate = self.generated / self.generating
        return {
            "collect_tokens_per_second": rate,
            "generate_tokens_per_second": generate,
            "collect_to_generate": rate / generate,
        }
