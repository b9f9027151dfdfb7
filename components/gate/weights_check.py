"""How far a target with rounded weights is from the full ones, and how far the library that
computes its layers is from torch's own.

A lossless strategy gives what plain decoding with the rounded weights gives, so no other check
would notice that these are too coarse. Here the rounded target writes greedily, and both read what
it wrote: at how many positions do they choose the same token? Nor would any notice a library that
computes wrongly, since plain decoding uses it too.
"""

from __future__ import annotations

from collections.abc import Sequence

from draftwell.components.bench.runner import measure
from draftwell.components.bench.settings import BenchSettings
from draftwell.components.bench.target_agreement import target_logits
from draftwell.components.gate.bench_checks import over_sums
from draftwell.components.gate.evidence import Interval, at_least, surely
from draftwell.components.prompts.prompt import Prompt, ids_of
from draftwell.serving.bundle.verdict import GateVerdict, Thresholds
from draftwell.serving.runtime.pair import LoadedPair
from draftwell.serving.runtime.strategies import PLAIN, StrategyResources

Agreement = tuple[int, int]
"""Positions where both choose the same token, and all."""
LAYERS = "compiled layers"


def weights_agreement(
    pair: LoadedPair, full: LoadedPair, prompts: Sequence[Prompt], *, max_tokens: int
) -> list[Agreement]:
    """For each prompt, how `pair` and `full`, the same pair with full weights or torch's layers,
    agree along the greedy text of `pair`.

    Both read it in one forward pass of the same width, so that of the rounding in a dtype only what
    the weights change is left.
    """
    settings = BenchSettings(max_tokens=max_tokens, warmup=False)
    measured = measure(pair, StrategyResources({}, pair.special_tokens), [PLAIN], prompts, settings)
    texts = [run.tokens for run in next(iter(measured.values())).typical]
    return [
        (agreeing(pair, full, ids_of(pair, prompt), text), len(text))
        for prompt, text in zip(prompts, texts, strict=True)
    ]


def agreeing(pair: LoadedPair, full: LoadedPair, prompt: Sequence[int], text: Sequence[int]) -> int:
    """Positions of a text, of at least one token, where two targets choose the same token."""
    mine, theirs = (
        target_logits(each, prompt, text[:-1], keep=len(text)).argmax(-1) for each in (pair, full)
    )
    return int((mine == theirs).sum())


def judge_weights(read: Sequence[Agreement], weights: str, thresholds: Thresholds) -> GateVerdict:
    """Judge rounded weights by what `weights_agreement` found; a threshold that is None is not
    checked.

    Args:
        weights: int8 or int4, for the text.
    """
    floor = thresholds.min_weights_agreement
    if floor is None:
        return GateVerdict(())
    found = share_alike(read)
    text = (
        f"{weights} weights choose the full weights' token in {found.value:.1%} of positions "
        f"{found} (lower end at least {floor:.0%})"
    )
    return GateVerdict((at_least(f"{weights} weights", found, floor, text),))


def judge_layers(read: Sequence[Agreement], thresholds: Thresholds) -> GateVerdict:
    """Judge a library by what `weights_agreement` found beside torch's layers; it fails where it
    surely chooses other tokens, since formats round."""
    floor = thresholds.min_weights_agreement
    if floor is None:
        return GateVerdict(())
    found = share_alike(read)
    text = (
        f"the library chooses the token of torch's layers in {found.value:.1%} of positions "
        f"{found} (upper end at least {floor:.0%})"
    )
    return GateVerdict((surely(at_least(LAYERS, found, floor, text), text),))


def share_alike(read: Sequence[Agreement]) -> Interval:
    """Share of positions where both choose the same token."""
    return over_sums(read, lambda sums: sums[..., 0] / sums[..., 1])
