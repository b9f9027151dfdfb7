"""How far a target with rounded weights is from the full ones.

A lossless strategy gives what plain decoding with the rounded weights gives, so no other check would notice that these are too coarse.
Here the rounded target writes greedily, and the full one reads: how many of the tokens would it have chosen after the same text?
"""

from __future__ import annotations

from collections.abc import Sequence

from components.bench.runner import measure
from components.bench.settings import BenchSettings
from components.bench.target_agreement import TargetAgreement, agreements
from components.gate.bench_checks import over_sums
from components.gate.evidence import at_least
from components.gate.verdict import GateVerdict, Thresholds
from components.prompts.prompt import Prompt, ids_of
from serving.runtime.pair import LoadedPair
from serving.runtime.strategies import PLAIN, StrategyResources


def weights_agreement(pair: LoadedPair, full: LoadedPair, prompts: Sequence[Prompt], *, max_tokens: int) -> list[TargetAgreement]:
    """For each prompt, how the greedy text of `pair` compares with the choices of `full`, the same pair with full weights."""
    settings = BenchSettings(max_tokens=max_tokens, warmup=False)
    measured = measure(pair, StrategyResources({}, pair.special_tokens), [PLAIN], prompts, settings)
    texts = [run.tokens for run in next(iter(measured.values())).typical]
    return agreements(full, [ids_of(pair, prompt) for prompt in prompts], texts)


def judge_weights(read: Sequence[TargetAgreement], weights: str, thresholds: Thresholds) -> GateVerdict:
    """Judge rounded weights by what `weights_agreement` found; a threshold that is None is not checked.

    Args:
        weights: int8 or int4, for the text.
    """
    floor = thresholds.min_weights_agreement
    if floor is None:
        return GateVerdict(())
    found = over_sums([(one.matches, one.tokens) for one in read], lambda sums: sums[..., 0] / sums[..., 1])
    text = f"{found.value:.1%} of the tokens with {weights} weights are the full weights' choice {found} (lower end at least {floor:.0%})"
    return GateVerdict((at_least(f"{weights} weights", found, floor, text),))
