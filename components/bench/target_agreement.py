"""How outputs compare with the target's own: first differences, near-ties, the share of its argmax,
and the divergence from it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from draftwell.components.bench.schema import Difference
from draftwell.serving.number_format import dtype_of
from draftwell.serving.runtime.commands import Forward
from draftwell.serving.runtime.pair import LoadedPair

NEAR_TIE = 1e-3
"""Top-2 logit gap below which float32 kernels of different widths may disagree
(docs/methods.md)."""
SIGNIFICANT_BITS = {"bfloat16": 8, "float16": 11}


def first_difference(tokens: Sequence[int], reference: Sequence[int]) -> int | None:
    """Index of the first token that differs or is missing; None for equal outputs.

    >>> (
    ...     first_difference([1, 2, 3], [1, 2, 4]),
    ...     first_difference([1], [1, 2]),
    ...     first_difference([1], [1]),
    ... )
    (2, 1, None)
    """
    if list(tokens) == list(reference):
        return None
    shorter = min(len(tokens), len(reference))
    return next((i for i in range(shorter) if tokens[i] != reference[i]), shorter)


def difference(
    pair: LoadedPair,
    prompt_id: str,
    prompt: Sequence[int],
    tokens: Sequence[int],
    reference: Sequence[int],
    *,
    exact: bool,
) -> Difference | None:
    """The first difference of greedy outputs, with the target's logit gap there; None for equal
    outputs.

    Where the passes that wrote both are exact, nothing is a near-tie. Elsewhere it is one if the
    logits of both tokens are that close to the largest: below 1e-3 in float32; in bfloat16 and
    float16 up to four times the distance between neighbouring numbers at the row's largest logit:
    roundings add up over the layers, and forward passes of one and of several tokens were seen to
    differ by three such steps.
    """
    at = first_difference(tokens, reference)
    if at is None:
        return None
    logits = target_logits(pair, prompt, reference[:at], keep=1)[0]
    two = logits.topk(2).values
    chosen = [output[at] for output in (tokens, reference) if at < len(output)]
    below = max([float(two[0] - logits[token]) for token in chosen] + [float(two[0] - two[1])])
    near_tie = not exact and below <= near_tie_gap(pair.dtype, logits)
    return Difference(prompt_id, at, float(two[0] - two[1]), near_tie)


def differences(
    pair: LoadedPair,
    prompt_ids: Sequence[str],
    prompts: Sequence[Sequence[int]],
    outputs: Sequence[Sequence[int]],
    references: Sequence[Sequence[int]],
    *,
    exact: bool,
) -> list[Difference]:
    """The `difference` of every output that has one."""
    rows = zip(prompt_ids, prompts, outputs, references, strict=True)
    found = [difference(pair, *row, exact=exact) for row in rows]
    return [one for one in found if one is not None]


def near_tie_gap(dtype: str, logits: Tensor) -> float:
    """Largest gap in a row of `logits` `[vocab]` that rounding in this dtype can turn round."""
    bits = SIGNIFICANT_BITS.get(dtype_of(dtype))
    if bits is None:
        return NEAR_TIE
    largest = float(logits[logits.isfinite()].abs().max())
    return 4 * 2.0 ** (math.floor(math.log2(max(largest, 1e-6))) + 1 - bits)


def target_logits(
    pair: LoadedPair, prompt: Sequence[int], output: Sequence[int], keep: int
) -> Tensor:
    """Target logits `[keep, vocab]` of one teacher-forced pass over prompt and output, the last
    `keep` positions."""
    target = pair.models["target"]
    slot = target.open()
    try:
        return target.forward(
            [Forward("target", slot, (*prompt, *output), keep=keep, prefill=True)]
        )[0].logits
    finally:
        target.close(slot)


def departure(
    pair: LoadedPair,
    prompt: Sequence[int],
    output: Sequence[int],
    max_tokens: int,
    *,
    exact: bool,
) -> str:
    """How a greedy output of at most `max_tokens` leaves the target's own, by one pass over it:
    "none", at a "near-tie" only, "wrong", or "cut" short of its end.

    By induction over positions, outputs whose every token is the target's argmax are those of plain
    decoding.

    Args:
        exact: the passes that wrote it are the target's own and exact: nothing is a near-tie.
    """
    if not output or (len(output) < max_tokens and output[-1] not in pair.stop_tokens):
        return "cut"
    rows = target_logits(pair, prompt, output[:-1], keep=len(output)).float()
    found = "none"
    for row, token in zip(rows, output, strict=True):
        gap = float(row.max() - row[token])
        if exact and token != int(row.argmax()):
            return "wrong"
        if gap > near_tie_gap(pair.dtype, row):
            return "wrong"
        if gap > 0:
            found = "near-tie"
    return found


@dataclass(frozen=True)
class TargetAgreement:
    """How an output compares with the target after the output's own prefixes; sums over its tokens,
    so that outputs add up.

    Args:
        tokens: tokens of the output.
        matches: those that are the target's argmax.
        divergence: nats, see `agreement`.
    """

    tokens: int
    matches: int
    divergence: float

    def __add__(self, other: TargetAgreement) -> TargetAgreement:
        return TargetAgreement(
            self.tokens + other.tokens,
            self.matches + other.matches,
            self.divergence + other.divergence,
        )

    @property
    def share(self) -> float | None:
        """Share of tokens that are the target's argmax; None of no tokens."""
        return self.matches / self.tokens if self.tokens else None

    @property
    def kl(self) -> float | None:
        """Divergence from the target in nats a token; None of no tokens."""
        return self.divergence / self.tokens if self.tokens else None


def agreement(
    pair: LoadedPair, prompt: Sequence[int], output: Sequence[int], temperature: float = 0.0
) -> TargetAgreement:
    """Argmax matches of an output, and its divergence from the target, by one teacher-forced pass.

    The divergence is an estimate from one text of KL(π ‖ p) + H(π) − H(p) a token, where π is what
    the strategy draws from after its own prefix (which a lossy strategy does not report) and p the
    target's softmax at the sampling temperature: Σ −ln p(x) − H(p). It is 0 in expectation for a
    lossless strategy and grows with the divergence; it can be negative, for a strategy that prefers
    likely tokens.

    At temperature 0 both choices are certain, and it is the exact difference of two divergences
    from one-hot distributions, KL(δ_x ‖ p̄) − KL(δ_t* ‖ p̄) = ln p̄(t*) − ln p̄(x) with t* the
    target's argmax: 0 for a lossless strategy, else above.

    Args:
        temperature: that of the output; 0 compares with p̄, the softmax at 1 (docs/methods.md).
    """
    if not output:
        return TargetAgreement(0, 0, 0.0)
    logits = target_logits(pair, prompt, output[:-1], keep=len(output)).float()
    tokens = torch.tensor(list(output), device=logits.device)
    log_probs = (logits / (temperature or 1.0)).log_softmax(-1)
    emitted = log_probs.gather(-1, tokens[:, None])[:, 0]
    if temperature == 0:
        expected = log_probs.amax(-1)
    else:
        expected = -torch.special.entr(log_probs.exp()).sum(-1)
    return TargetAgreement(
        len(output),
        int((logits.argmax(-1) == tokens).sum()),
        float((expected - emitted).double().sum()),
    )


def agreements(
    pair: LoadedPair,
    prompts: Sequence[Sequence[int]],
    outputs: Sequence[Sequence[int]],
    temperature: float = 0.0,
) -> list[TargetAgreement]:
    """Of every output by itself; prompts are token ids. `sum(…, TargetAgreement(0, 0, 0.0))` is
    that of all together."""
    return [
        agreement(pair, ids, output, temperature)
        for ids, output in zip(prompts, outputs, strict=True)
    ]
