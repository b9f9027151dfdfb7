"""Shorter drafts under load, so that many requests at once should not be slower than with plain decoding.

Before each round every running request gets a limit on the length of its drafts (`Session.draft_limit`). It follows from the cost of
forward passes (costs.py), the number of running requests, the acceptance of recent drafts and the prompt tokens per generated token of
recent requests. Within the limit strategies decide as before.

A limit changes which random numbers an answer uses, and which tokens a lossy strategy keeps. So requests whose answer must not depend on
other traffic have none (`repeats`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache

from serving.runtime.engine.engine import Engine
from serving.runtime.requests import Sampling
from serving.runtime.session.session import UNLIMITED, Session
from serving.runtime.strategies import Strategy
from serving.runtime.strategies.lossless.autoregressive import Autoregressive
from serving.server.scheduling.costs import BatchCosts

PROBE_EVERY = 32
"""While no request may draft, one request drafts one token every this many rounds, to notice when acceptance improves. So does every
recorded request whose text this cannot change: its draft then reads the tokens that it has missed (serving/recording/recorder.py)."""


@dataclass
class Acceptance:
    """The acceptance rate α of recent draft tokens; a typical rate before there are any."""

    USUAL, WEIGHT, MEMORY = 0.7, 16, 2048

    judged: float = 0.0
    accepted: float = 0.0

    @property
    def rate(self) -> float:
        return (self.accepted + self.USUAL * self.WEIGHT) / (self.judged + self.WEIGHT)

    def learn(self, judged: int, accepted: int) -> None:
        """Count verified draft tokens; older ones lose weight."""
        self.judged, self.accepted = self.judged + judged, self.accepted + accepted
        if self.judged > self.MEMORY:
            self.judged, self.accepted = self.judged / 2, self.accepted / 2


@dataclass
class Prompts:
    """Prompt tokens per generated token of recent requests; 1 before there are any."""

    WEIGHT, MEMORY = 256, 8192

    read: float = 0.0
    written: float = 0.0

    @property
    def rate(self) -> float:
        return (self.read + self.WEIGHT) / (self.written + self.WEIGHT)

    def learn(self, read: int, written: int) -> None:
        """Count a complete answer; older ones lose weight."""
        self.read, self.written = self.read + read, self.written + written
        if self.read + self.written > self.MEMORY:
            self.read, self.written = self.read / 2, self.written / 2


@dataclass
class LoadControl:
    """Sets the draft limit of every running request before each round, on the scheduler's thread.

    A single request has no limit. With several, every draft is at most as long as is best for that number of requests: longer drafts may
    cost more than plain decoding.
    """

    costs: BatchCosts
    acceptance: dict[str, Acceptance] = field(default_factory=dict)
    predictions: Acceptance = field(default_factory=Acceptance)
    """Of clients' predictions, whatever the strategy: they have a limit of their own."""
    prompts: Prompts = field(default_factory=Prompts)
    """Of requests that use a draft model."""
    last: dict[str, int] = field(default_factory=dict)
    """Strategy → its last limit; for `describe`."""
    _rounds: int = 0
    _seen: dict[Session, tuple[int, int, int, int, bool]] = field(default_factory=dict)

    def limit(self, strategy: Strategy, running: int, sampling: Sampling | None = None) -> int:
        """Longest draft of a request while `running` requests run; UNLIMITED or less.

        Args:
            sampling: the request's; None: the answer may depend on the limit.
        """
        if strategy.name == Autoregressive.name or (sampling is not None and repeats(strategy, sampling)):
            return UNLIMITED
        limit = UNLIMITED
        if running > 1 and strategy.drafts_alone:
            limit = 0
        elif running > 1:
            alpha = round(self.acceptance.setdefault(strategy.name, Acceptance()).rate, 2)
            kind = "draft" in strategy.roles, bool(strategy.overlaps), strategy.draft_share
            limit = best_gamma(self.costs, running, alpha, *kind, round(self.prompts.rate, 1))
        self.last[strategy.name] = limit
        return limit

    def predicted_limit(self, strategy: Strategy, running: int, sampling: Sampling) -> int:
        """Longest draft of a request's prediction while `running` requests run: it costs its verification only."""
        if running == 1 or not sampling.prediction or repeats(strategy, sampling):
            return UNLIMITED
        return best_gamma(self.costs, running, round(self.predictions.rate, 2), False, False, 0.0, 0.0)

    def apply(self, engine: Engine, running: Sequence[tuple[Session, Strategy]]) -> None:
        """Update the acceptance rates from the last round, and limit the drafts of the next one."""
        self._learn(running)
        self._rounds += 1
        overlapping = False
        for session, strategy in running:
            session.draft_limit = self.limit(strategy, len(running), session.sampling)
            session.predicted_limit = self.predicted_limit(strategy, len(running), session.sampling)
            overlapping = overlapping or (strategy.overlaps and session.draft_limit > 0)
        # cores are divided only for models that run at the same time
        engine.split = None if overlapping else False
        if self._rounds % PROBE_EVERY == 0:
            unused = next((session for session, _ in running if session.predicted_limit == 0), None)
            if unused is not None:
                unused.predicted_limit = 1
            idle = [(session, strategy) for session, strategy in running if session.draft_limit == 0 and not strategy.drafts_alone]
            for number, (session, strategy) in enumerate(idle):
                unread = session.recorded and "draft" in session.lanes and indifferent(strategy, session.sampling)
                if number == 0 or unread:  # recording changes no answer
                    session.draft_limit = 1

    def describe(self) -> dict[str, object]:
        """For `/health`: the source of the costs, and the limits of the last round (null: none)."""
        limits = {name: None if limit == UNLIMITED else limit for name, limit in dict(self.last).items()}
        return {"costs": self.costs.source, "draft_limits": limits}

    def _learn(self, running: Sequence[tuple[Session, Strategy]]) -> None:
        seen = {}
        for session, strategy in running:
            stats = session.stats  # the acceptance of a prediction, or of what a grammar forces, says nothing of the strategy's
            predicted, fitted = stats.predicted_judged, stats.predicted_accepted
            judged = stats.judged - predicted - stats.forced_judged
            accepted = stats.accepted - fitted - stats.forced_accepted
            before, kept, predicted_before, fitted_before, _ = self._seen.get(session, (0, 0, 0, 0, False))
            if judged > before:
                self.acceptance.setdefault(strategy.name, Acceptance()).learn(judged - before, accepted - kept)
            if predicted > predicted_before:
                self.predictions.learn(predicted - predicted_before, fitted - fitted_before)
            seen[session] = judged, accepted, predicted, fitted, "draft" in strategy.roles
        for session, (*_, drafts) in self._seen.items():
            if drafts and session not in seen:  # at the end of a request, when all of its tokens are known
                self.prompts.learn(session.text.prompt_length, len(session.text.ids) - session.text.prompt_length)
        self._seen = seen


def indifferent(strategy: Strategy, sampling: Sampling) -> bool:
    """Whether a request's text is the same whatever the limit: greedy text of an exact strategy."""
    return sampling.greedy and strategy.lossless


def repeats(strategy: Strategy, sampling: Sampling) -> bool:
    """Whether a request must have no limit, because its answer must be the same whatever else runs and a limit could change it."""
    return (sampling.repeatable or strategy.resources.deterministic) and not indifferent(strategy, sampling)


@lru_cache(4096)
def best_gamma(costs: BatchCosts, running: int, alpha: float, drafts: bool, overlaps: bool, share: float, prompt: float) -> int:
    """`BatchCosts.best_gamma`, cached, because every round asks for it."""
    return costs.best_gamma(running, alpha, drafts=drafts, overlaps=overlaps, share=share, prompt=prompt)
