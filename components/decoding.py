"""Decoding many requests, several of them in flight."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

from serving.runtime.engine import Engine, Job
from serving.runtime.strategies import Strategy
from serving.runtime.types import Sampling

Request = tuple[Sequence[int], Sampling]


def decode_all(engine: Engine, requests: Sequence[Request], strategies: Sequence[Strategy], at_once: int,
               finished: Callable[[int], None] | None = None) -> list[list[int]]:
    """Outputs of all requests, in their order; one that ends makes room for the next, and the first error ends all.

    Args:
        strategies: one for each request, which may be the same.
        at_once: requests in flight while there are so many, at least 1 and at most the models' slots (`room`).
        finished: called with the number of requests that are done, whenever one more is.
    """
    if at_once < 1:
        raise ValueError(f"at_once must be at least 1, not {at_once}")
    waiting = deque(zip(requests, strategies, strict=True))
    jobs, running = list[Job](), list[Job]()
    try:
        while waiting or running:
            while waiting and len(running) < at_once:
                (ids, sampling), strategy = waiting.popleft()
                jobs.append(engine.submit(ids, sampling, strategy))
                running.append(jobs[-1])
            engine.step()
            for job in [job for job in running if job.finished]:
                running.remove(job)
                if job.error:
                    raise job.error
                if finished:
                    finished(len(jobs) - len(running))
    finally:
        for job in running:  # after an error the slots must come back
            engine.cancel(job)
    return [job.output for job in jobs]


def room(engine: Engine, wanted: int) -> int:
    """As many requests at once as wanted, or as the models have slots for."""
    return min([wanted, *(model.slots.count for model in engine.models.values() if hasattr(model, "slots"))])
