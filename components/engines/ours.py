"""Our engine behind the port, in this process."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace

from draftwell.components.collect.decoding import room, run_all
from draftwell.components.engines.port import (
    CAPABILITIES,
    About,
    Acceptance,
    Answer,
    Decoded,
    EngineSettings,
    TokenProb,
)
from draftwell.serving.errors import DraftwellError
from draftwell.serving.runtime.engine.engine import Job
from draftwell.serving.runtime.pair import LoadedPair
from draftwell.serving.runtime.requests import Sampling
from draftwell.serving.runtime.session.stats import Stats
from draftwell.serving.runtime.strategies import PLAIN, Strategy, StrategyResources, build_strategy


class OurEngine:
    """A loaded pair (an `Engine`). `EngineSettings.speculation` is `{"strategy": name,
    "parameters": {…}}`.

    Args:
        label: names it in errors.
        pair: loaded with as many slots as it will be started with.
        resources: artifacts that strategies read.
    Raises:
        DraftwellError: (of `start`) an unknown strategy or parameter, a missing artifact, fewer
            slots (`too_few_slots`); (of `decode`) a prompt that is too long; it was not started
            (`engine_not_started`).
    """

    capabilities = CAPABILITIES["draftwell"]

    def __init__(self, label: str, pair: LoadedPair, resources: StrategyResources | None = None):
        self.label, self.pair, self.resources = label, pair, resources or StrategyResources()
        self._strategy: Strategy | None = None
        self._slots = 1

    def start(self, settings: EngineSettings) -> About:
        chosen = settings.speculation or {}
        if unknown := sorted(set(chosen) - {"strategy", "parameters"}):
            raise DraftwellError(
                f"{self.label}: unknown key {unknown[0]!r}: write strategy and parameters",
                code="bad_engine_setting",
            )
        if room(self.pair.engine(), settings.slots) < settings.slots:
            raise DraftwellError(
                f"{self.label} has fewer than {settings.slots} slots: load the pair with more",
                code="too_few_slots",
            )
        self._strategy = build_strategy(
            chosen.get("strategy", PLAIN.name),
            dict(chosen.get("parameters", {})),
            self.resources.private(),
        )
        self._slots = settings.slots
        return About(version=f"draftwell, {self.pair.dtype} on {self.pair.device}")

    def decode(self, prompts: Sequence[Sequence[int]], sampling: Sampling) -> Decoded:
        if self._strategy is None:
            raise DraftwellError(
                f"{self.label} was not started: start it first", code="engine_not_started"
            )
        engine = self.pair.engine()
        requests = [
            (ids, replace(sampling, seed=sampling.seed + i)) for i, ids in enumerate(prompts)
        ]
        started = time.perf_counter()
        try:
            jobs = run_all(engine, requests, [self._strategy] * len(requests), self._slots)
            seconds = time.perf_counter() - started
        finally:
            engine.close()
        return Decoded(seconds=seconds, answers=[answer_of(job, sampling) for job in jobs])

    def stop(self) -> None:
        self._strategy = None


def answer_of(job: Job, sampling: Sampling) -> Answer:
    """What a finished request gave."""
    stats = job.session.stats
    top = None if sampling.logprobs is None else top_of(job)
    return Answer(
        tokens=list(job.output),
        seconds=stats.wall_seconds,
        first_token_seconds=stats.first_token_seconds,
        acceptance=acceptance_of(stats),
        top_logprobs=top,
    )


def acceptance_of(stats: Stats) -> Acceptance:
    """Counters of a request as the port has them."""
    longest = max(stats.judged_at, default=-1) + 1
    return Acceptance(
        rounds=stats.rounds,
        drafted=stats.judged,
        accepted=stats.accepted,
        accepted_at=tuple(stats.accepted_at[i] for i in range(longest)),
    )


def top_of(job: Job) -> list[list[TokenProb]]:
    """For each token the likeliest ones; empty where a token was not rated."""
    return [
        [] if token.rating is None else [(int(one), float(prob)) for one, prob in token.rating.top]
        for token in job.session.emitted(0)
    ]
