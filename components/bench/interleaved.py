"""Measuring contenders in turn: the one protocol of every comparison.

Every contender does the same item before the next item comes, so that a slow minute of the machine
hits all alike; the order rotates from item to item and from round to round, so that none always
runs after the same neighbour. An item is a prompt, or a group of prompts that are sent at once.
Noise is answered by rounds and by one interval over the items (`report.intervals`), and by nothing
else.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TypeVar

from draftwell.serving.errors import DraftwellError

log = logging.getLogger(__name__)

R = TypeVar("R")
T = TypeVar("T")
Progress = Callable[[int, int, str], None]
"""Called with (done, total, label)."""
REFERENCE = "autoregressive"
"""Label of plain decoding: all are compared with it, so its failure ends a run."""
WARMUP_TOKENS = 8
"""That a contender decodes, unmeasured, before its first turn."""


def take_turns(
    contenders: Mapping[str, Callable[[int], R]],
    items: int,
    rounds: int = 1,
    *,
    before_round: Callable[[str], object] | None = None,
    left_out: dict[str, str] | None = None,
    progress: Progress | None = None,
) -> dict[str, list[list[R]]]:
    """Label → for each item the result of every round.

    Args:
        contenders: label → what it does with an item, by its number.
        before_round: called with each label before a round.
        left_out: takes label → reason of those that fail, which have no results; None lets their
            errors through.
    """
    done, total = 0, rounds * items * len(contenders)
    results: dict[str, list[list[R]]] = {label: [[] for _ in range(items)] for label in contenders}
    for turn in range(rounds * items):
        item = turn % items
        for label in rotated(list(contenders), item + turn // items):
            if label in results:
                with leaving_out(label, left_out):
                    if item == 0 and before_round:
                        before_round(label)
                    results[label][item].append(contenders[label](item))
                if left_out and label in left_out:
                    del results[label]
            done += 1
            if progress:
                progress(done, total, label)
    return results


@contextmanager
def leaving_out(label: str, left_out: dict[str, str] | None) -> Iterator[None]:
    """Note why a contender fails in this block, instead of failing with it; plain decoding, and a
    `left_out` of None, let the error through."""
    try:
        yield
    except Exception as error:
        if left_out is None or label == REFERENCE:
            raise
        left_out[label] = reason_of(error)
        unexpected = not isinstance(error, DraftwellError)
        log.info("%s is left out: %s", label, left_out[label], exc_info=unexpected)


def reason_of(error: Exception) -> str:
    """An error in one line, with its kind where that is not one of ours.

    >>> reason_of(MemoryError()), reason_of(RuntimeError("no kernel\\nat line 3"))
    ('MemoryError', 'RuntimeError: no kernel')
    """
    if isinstance(error, DraftwellError):
        return str(error)
    first = next(iter(str(error).splitlines()), "")
    return ": ".join(part for part in (type(error).__name__, first) if part)


def rotated(contenders: Sequence[T], turn: int) -> list[T]:
    """The contenders (or servers) in the order of a turn."""
    start = turn % len(contenders)
    return [*contenders[start:], *contenders[:start]]
