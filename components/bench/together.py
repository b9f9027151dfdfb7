"""Requests of our own engine that are sent at once."""

from __future__ import annotations

import time
from dataclasses import replace

from draftwell.components.bench.engines.measure import Group
from draftwell.components.engines.port import Answer, Decoded
from draftwell.serving.runtime.engine.engine import Engine
from draftwell.serving.runtime.requests import Sampling
from draftwell.serving.runtime.strategies import Strategy
from draftwell.serving.server.scheduling.draft_limits import limit_drafts


def decode_together(
    engine: Engine, strategy: Strategy, group: Group, sampling: Sampling
) -> Decoded:
    """Decode prompts that are sent at once, their drafts limited as a server limits them."""
    started = time.perf_counter()
    limit = strategy.draft_limit(len(group))
    jobs = [
        engine.submit(ids, replace(sampling, seed=sampling.seed + place), strategy, limit)
        for place, ids in enumerate(group)
    ]
    seconds = [0.0] * len(jobs)
    try:
        while running := [job for job in jobs if not job.finished]:
            limit_drafts(engine, [(job.session, strategy) for job in running])
            engine.step()
            for place, job in enumerate(jobs):
                if job.error:
                    raise job.error
                if job.finished and not seconds[place]:
                    seconds[place] = time.perf_counter() - started
    finally:
        for job in jobs:
            engine.cancel(job)
        engine.close()
    answers = [
        Answer(
            tokens=job.output,
            seconds=taken,
            first_token_seconds=job.session.stats.first_token_seconds,
        )
        for job, taken in zip(jobs, seconds, strict=True)
    ]
    return Decoded(seconds=time.perf_counter() - started, answers=answers)
