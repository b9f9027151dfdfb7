"""How outputs compare with the target's own: first differences, near-ties, and the share of its argmax."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from serving.runtime.pair import LoadedPair
from serving.runtime.types import Forward

NEAR_TIE = 1e-3
"""Top-2 logit gap below which float32 kernels of different widths may disagree (METHODS, "Traps")."""
SIGNIFICANT_BITS = {"bfloat16": 8, "float16": 11}


@dataclass(frozen=True)
class Difference:
    """Where an output first leaves the autoregressive one.

    Args:
        position: index of the first token that differs, from the start of the output.
        gap: the target's largest logit minus its second largest there.
        near_tie: whether rounding alone may explain it.
    """

    prompt_id: str
    position: int
    gap: float
    near_tie: bool


def first_difference(tokens: Sequence[int], reference: Sequence[int]) -> int | None:
    """Index of the first token that differs or is missing; None for equal outputs.

    >>> first_difference([1, 2, 3], [1, 2, 4]), first_difference([1], [1, 2]), first_difference([1], [1])
    (2, 1, None)
    """
    if list(tokens) == list(reference):
        return None
    shorter = min(len(tokens), len(reference))
    return next((i for i in range(shorter) if tokens[i] != reference[i]), shorter)


def difference(pair: LoadedPair, prompt_id: str, prompt: Sequence[int], tokens: Sequence[int],
               reference: Sequence[int]) -> Difference | None:
    """The first difference of greedy outputs, with the target's logit gap there; None for equal outputs.

    It is a near-tie if the logits of both tokens lie that close to the largest: below 1e-3 in float32; in bfloat16 and
    float16 up to four times the distance between neighbouring numbers at the row's largest logit: roundings add up over
    the layers, and forwards of one and of several tokens were seen to differ by three such steps.
    """
    at = first_difference(tokens, reference)
    if at is None:
        return None
    logits = target_logits(pair, prompt, reference[:at], keep=1)[0]
    two = logits.topk(2).values
    chosen = [output[at] for output in (tokens, reference) if at < len(output)]
    below = max([float(two[0] - logits[token]) for token in chosen] + [float(two[0] - two[1])])
    return Difference(prompt_id, at, float(two[0] - two[1]), below <= near_tie_gap(pair.dtype, logits))


def near_tie_gap(dtype: str, logits: Tensor) -> float:
    """Largest gap in a row of `logits` `[vocab]` that rounding in this dtype can turn round."""
    bits = SIGNIFICANT_BITS.get(dtype)
    if bits is None:
        return NEAR_TIE
    largest = float(logits[logits.isfinite()].abs().max())
    return 4 * 2.0 ** (math.floor(math.log2(max(largest, 1e-6))) + 1 - bits)


def target_logits(pair: LoadedPair, prompt: Sequence[int], output: Sequence[int], keep: int) -> Tensor:
    """Target logits `[keep, vocab]` of one teacher-forced pass over prompt and output, the last `keep` positions."""
    target = pair.models["target"]
    slot = target.open()
    try:
        return target.forward([Forward("target", slot, (*prompt, *output), keep=keep, prefill=True)])[0].logits
    finally:
        target.close(slot)


def argmax_matches(pair: LoadedPair, prompt: Sequence[int], output: Sequence[int]) -> int:
    """How many tokens of an output are the target's argmax behind the same prefix."""
    logits = target_logits(pair, prompt, output[:-1], keep=len(output))
    return int((logits.argmax(-1).cpu() == logits.new_tensor(list(output)).cpu()).sum())
