"""Speculating less under load, so that many requests at once are never slower than plain decoding would be.

Before each round everything that runs is told how long its drafts may be (`Session.draft_limit`), from what forwards cost
(costs.py), how many run, how much of recent drafts was accepted, and how much prompt came with recent answers. It is only a limit:
strategies go on deciding within it.

A limit changes which random numbers an answer takes, and what a lossy strategy keeps. So requests whose answer must not depend on other
traffic have none (`repeats`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache

from serving.runtime.engine.engine import Engine
from serving.runtime.requests import Sampling
from serving.runtime.session import UNLIMITED, Session
from serving.runtime.strategies import Strategy
from serving.runtime.strategies.lossless.autoregressive import Autoregressive
from serving.server.scheduling.costs import BatchCosts

PROBE_EVERY = 32
"""While nobody may draft, one request drafts one token every so many rounds: else nobody would notice when drafts get better.
So does every request that is recorded and stays the same text by it: its draft then reads what it has missed (recording.py)."""


@dataclass
class Acceptance:
    """The acceptance rate α of recent draft tokens; before there are any, a usual one."""

    USUAL, WEIGHT, MEMORY = 0.7, 16, 2048

    judged: float = 0.0
    accepted: float = 0.0

    @property
    def rate(self) -> float:
        return (self.accepted + self.USUAL * self.WEIGHT) / (self.judged + self.WEIGHT)

    def learn(self, judged: int, accepted: int) -> None:
        """Take in judged draft tokens; older ones fade."""
        self.judged, self.accepted = self.judged + judged, self.accepted + accepted
        if self.judged > self.MEMORY:
            self.judged, self.accepted = self.judged / 2, self.accepted / 2


@dataclass
class Prompts:
    """How many prompt tokens recent answers took for every token that was written; before there are any, as many."""

    WEIGHT, MEMORY = 256, 8192

    read: float = 0.0
    written: float = 0.0

    @property
    def rate(self) -> float:
        return (self.read + self.WEIGHT) / (self.written + self.WEIGHT)

    def learn(self, read: int, written: int) -> None:
        """Take in an answer that is complete; older ones fade."""
        self.read, self.written = self.read + read, self.written + written
        if self.read + self.written > self.MEMORY:
            self.read, self.written = self.read / 2, self.written / 2


@dataclass
class LoadControl:
    """Sets the draft limit of everything that runs, before each round. Lives on the scheduler's thread.

    A request alone is left as its strategy was tuned. Among several every draft is at most as long as is best for so many, also where
    that is as long as for one: what a strategy drafts beyond it may cost more than plain decoding.
    """

    costs: BatchCosts
    acceptance: dict[str, Acceptance] = field(default_factory=dict)
    prompts: Prompts = field(default_factory=Prompts)
    """Of requests that a draft model reads for."""
    last: dict[str, int] = field(default_factory=dict)
    """Strategy → its limit when it was last set; for people."""
    _rounds: int = 0
    _seen: dict[Session, tuple[int, int, bool]] = field(default_factory=dict)

    def limit(self, strategy: Strategy, running: int, sampling: Sampling | None = None) -> int:
        """Draft tokens that a request may make at a time while `running` requests run; UNLIMITED or less.

        Args:
            sampling: the request's; None: one whose answer may depend on the limit.
        """
        if strategy.name == Autoregressive.name or (sampling is not None and repeats(strategy, sampling)):
            return UNLIMITED
        limit = UNLIMITED
        if running > 1:
            alpha = round(self.acceptance.setdefault(strategy.name, Acceptance()).rate, 2)
            kind = "draft" in strategy.roles, bool(strategy.overlaps)
            limit = best_gamma(self.costs, running, alpha, *kind, round(self.prompts.rate, 1))
        self.last[strategy.name] = limit
        return limit

    def apply(self, engine: Engine, running: Sequence[tuple[Session, Strategy]]) -> None:
        """Learn from what was judged since the last round, and limit the drafts of the next one."""
        self._learn(running)
        self._rounds += 1
        overlapping = False
        for session, strategy in running:
            session.draft_limit = self.limit(strategy, len(running), session.sampling)
            overlapping = overlapping or (strategy.overlaps and session.draft_limit > 0)
        # cores are not divided for models that take turns
        engine.split = None if overlapping else False
        if self._rounds % PROBE_EVERY == 0:
            idle = [(session, strategy) for session, strategy in running if session.draft_limit == 0]
            for number, (session, strategy) in enumerate(idle):
                unread = session.recorded and "draft" in session.lanes and indifferent(strategy, session.sampling)
                if number == 0 or unread:  # recording changes no answer
                    session.draft_limit = 1

    def describe(self) -> dict[str, object]:
        """For people: where the figures come from, and the limits of the last round (null: none)."""
        limits = {name: None if limit == UNLIMITED else limit for name, limit in dict(self.last).items()}
        return {"costs": self.costs.source, "draft_limits": limits}

    def _learn(self, running: Sequence[tuple[Session, Strategy]]) -> None:
        seen = {}
        for session, strategy in running:
            judged, accepted = session.stats.judged, session.stats.accepted
            before, kept, _ = self._seen.get(session, (0, 0, False))
            if judged > before:
                self.acceptance.setdefault(strategy.name, Acceptance()).learn(judged - before, accepted - kept)
            seen[session] = judged, accepted, "draft" in strategy.roles
        for session, (*_, drafts) in self._seen.items():
            if drafts and session not in seen:  # only now: a prompt is read at once, and written for round by round
                self.prompts.learn(session.text.prompt_length, len(session.text.ids) - session.text.prompt_length)
        self._seen = seen


def indifferent(strategy: Strategy, sampling: Sampling) -> bool:
    """Whether a request's text is the same whatever the limit: greedy text of an exact strategy."""
    return sampling.greedy and strategy.lossless


def repeats(strategy: Strategy, sampling: Sampling) -> bool:
    """Whether a request must be left alone, because a limit could change an answer that is to be the same whatever else runs."""
    return (sampling.repeatable or strategy.resources.deterministic) and not indifferent(strategy, sampling)


@lru_cache(4096)
def best_gamma(costs: BatchCosts, running: int, alpha: float, drafts: bool, overlaps: bool, prompt: float) -> int:
    """`Costs.best_gamma`, asked once: it is wanted every round."""
    return costs.best_gamma(running, alpha, drafts=drafts, overlaps=overlaps, prompt=prompt)
