"""What a peer brings to a bench: its contenders, its version, and notes on how it was run."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from draftwell.components.bench.runner import Contender, Generation
from draftwell.components.engines.port import Engine
from draftwell.serving.runtime.requests import Sampling
from draftwell.serving.runtime.session.stats import Stats

PAUSE = 0.01
"""Seconds that our own OpenMP threads get to fall asleep before a peer computes; GNU's spin for a
few milliseconds."""


@dataclass
class PeerGroup:
    """The contenders of one peer, its version and notes for readers of their metrics."""

    contenders: list[Contender] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    version: str | None = None


class ProcessPeer:
    """A peer that decodes in a process of its own: an engine that was started."""

    def __init__(self, engine: Engine):
        self.engine, self.label = engine, engine.label

    def reset(self) -> None:
        """Nothing is remembered between requests: drivers turn prefix caches off."""

    def generate(self, ids: Sequence[int], sampling: Sampling) -> Generation:
        time.sleep(PAUSE)
        decoded = self.engine.decode([ids], sampling)
        answer = decoded.answers[0]
        return Generation(
            answer.tokens,
            Stats(
                emitted=len(answer.tokens),
                wall_seconds=decoded.seconds,
                first_token_seconds=answer.first_token_seconds,
            ),
        )
