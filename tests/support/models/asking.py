"""Requests to an engine, in few words."""

from __future__ import annotations

from typing import Any

from draftwell.serving.runtime.engine.engine import Engine, Job
from draftwell.serving.runtime.requests import Sampling
from draftwell.serving.runtime.strategies import Strategy, build_strategy


def submit(
    engine: Engine,
    prompt: list[int],
    max_tokens: int,
    strategy: Strategy | None = None,
    *,
    owner: str | None = None,
    **sampling: Any,
) -> Job:
    """A request, of plain decoding unless a strategy is given."""
    return engine.submit(
        prompt,
        Sampling(max_tokens=max_tokens, **sampling),
        strategy or build_strategy("autoregressive"),
        owner=owner,
    )


def answered(engine: Engine, *arguments: Any, **options: Any) -> Job:
    """As `submit`, and run."""
    engine.run([job := submit(engine, *arguments, **options)])
    return job


def begun(engine: Engine, strategy: Strategy | None = None, max_tokens: int = 400) -> Job:
    """A short request that is being answered."""
    job = submit(engine, [1, 2], max_tokens, strategy)
    while not job.output:
        engine.step()
    return job
