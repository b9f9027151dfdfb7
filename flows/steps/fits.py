"""Whether a pair's target fits this machine, and how many requests at once: said before anything
else is done."""

from __future__ import annotations

from draftwell.flows.workspace import Workspace
from draftwell.serving.errors import DraftwellError
from draftwell.serving.memory import LONGEST_CONTEXT, free_memory, needed

MOST_SHOWN = 512
"""Requests at once; more are not counted."""


def said_to_fit(space: Workspace, max_context: int | None = None, *, refuse: bool = True) -> str:
    """That the models fit, with how many requests at once, in words.

    Args:
        max_context: tokens of a request; None: as many as a server takes by default.
        refuse: what does not fit our own engine, which another one may split or keep elsewhere.
    Raises:
        DraftwellError: they do not (`pair_too_large`).
    """
    weights, slot = needed(space.files(), space.dtype, space.device, 1, max_context)
    free = free_memory(space.device)
    sizes = f"its models take {in_words(weights)} in {space.dtype} while they are loaded"
    if free is None:
        return f"{sizes}; how much memory is free on {space.device} is not known"
    if weights + slot > free and not refuse:
        return f"{sizes}, more than the {in_words(free)} that are free on {space.device}"
    if weights + slot > free:
        raise DraftwellError(
            f"{space.spec.name} does not fit: {sizes}, a request {in_words(slot)}, and "
            f"{in_words(free)} are free on {space.device}: end other programs, or name smaller "
            "models or another dtype (--set dtype=bfloat16-int8)",
            code="pair_too_large",
        )
    count = int((free - weights) / slot) if slot else MOST_SHOWN
    told = f"{count}" if count < MOST_SHOWN else f"{MOST_SHOWN} or more"
    context = max_context or LONGEST_CONTEXT
    return (
        f"{sizes}, {in_words(free)} are free on {space.device}; room for {told} requests at "
        f"once of up to {context} tokens"
    )


def in_words(size: float) -> str:
    """Bytes as people write them.

    >>> in_words(14_300_000_000), in_words(3_000_000)
    ('14.3 GB', '3 MB')
    """
    return f"{size / 1e9:.1f} GB" if size >= 1e8 else f"{max(1, round(size / 1e6))} MB"
