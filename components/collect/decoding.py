"""Decoding many requests, several of them in flight."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence

from draftwell.components.prompts.prompt import Prompt, ids_of
from draftwell.serving.errors import ContextTooLong
from draftwell.serving.runtime.commands import Forward, Role
from draftwell.serving.runtime.engine.engine import Engine, Job
from draftwell.serving.runtime.logits import Span
from draftwell.serving.runtime.model import Model
from draftwell.serving.runtime.pair import LoadedPair
from draftwell.serving.runtime.requests import Sampling
from draftwell.serving.runtime.strategies import Strategy

Request = tuple[Sequence[int], Sampling]


def decode_all(
    engine: Engine,
    requests: Sequence[Request],
    strategies: Sequence[Strategy],
    at_once: int,
    finished: Callable[[int], None] | None = None,
) -> list[list[int]]:
    """Outputs of all requests, as `run_all` decodes them."""
    return [job.output for job in run_all(engine, requests, strategies, at_once, finished)]


def run_all(
    engine: Engine,
    requests: Sequence[Request],
    strategies: Sequence[Strategy],
    at_once: int,
    finished: Callable[[int], None] | None = None,
) -> list[Job]:
    """All requests, finished, in their order; one that ends makes room for the next, and the first
    error ends all.

    Args:
        strategies: one for each request, which may be the same.
        at_once: requests in flight while there are so many, at least 1 and at most the models'
            slots (`room`).
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
    return jobs


def encode_all(
    pair: LoadedPair, prompts: Sequence[Prompt], max_tokens: int, roles: Iterable[Role]
) -> list[list[int]]:
    """Token ids of all prompts, each checked to fit with `max_tokens` more, so that a prompt that
    is too long is refused before any is decoded.

    Args:
        roles: of the models that will read them; roles that the pair lacks are ignored.
    Raises:
        ContextTooLong: a prompt is too long for one of these models; it is named.
    """
    encoded = [ids_of(pair, prompt) for prompt in prompts]
    role = min(
        sorted(role for role in set(roles) if role in pair.models),
        key=lambda role: pair.models[role].max_context,
    )
    context = pair.models[role].max_context
    for prompt, ids in zip(prompts, encoded, strict=True):
        if len(ids) + max_tokens > context:
            raise ContextTooLong(
                f"prompt {prompt.id} has {len(ids)} tokens, which with {max_tokens} more "
                f"exceed the {role}'s context of "
                f"{context}: shorten it, leave it out, or ask for fewer tokens"
            )
    return encoded


def read_text(model: Model, role: Role, ids: Sequence[int], keep: int) -> Span:
    """What a model gives for the last `keep` tokens of a text, in one pass over all of it."""
    slot = model.open()
    try:
        return model.forward([Forward(role, slot, tuple(ids), keep=keep, prefill=True)])[0]
    finally:
        model.close(slot)


def room(engine: Engine, wanted: int) -> int:
    """As many requests at once as wanted, or as the models have slots for."""
    return min(
        [
            wanted,
            *(model.slots.count for model in engine.models.values() if hasattr(model, "slots")),
        ]
    )
