"""Successive halving: many configs on few prompts, then fewer on more, and the last two once more on all (Jamieson & Talwalkar 2016).

Plain decoding and the champion are measured beside the others in every rung, interleaved. A rung takes prompts that no rung
before it had, and what was measured adds up. The one that looks best behind the last rung was chosen by luck too, so nothing is
decided there: a *confirmation* measures the last two, plain decoding and the champion afresh, and only its figures count.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from components.prompts.prompt import Prompt
from components.report.intervals import expanded_tail, paired_bootstrap_ratio
from components.tune.constraints import ConstraintViolation
from components.tune.evaluator import Config, Evaluate, Measured, label_of, measure_all

PLAIN: Config = ("autoregressive", {})
FINALISTS = 2
TAIL = 0.05
"""Probability, at most, that a lower bound lies above the truth; shared among the configs that a confirmation compares."""

Fit = Callable[[Config, Sequence[Prompt], Measured, Measured], ConstraintViolation | None]
"""Why a config breaks a constraint on these prompts, or None; the last argument is plain decoding's."""


@dataclass(frozen=True)
class Rung:
    """One round of measurement.

    Args:
        prompts: ids of the prompts that were new here.
        figures: of everyone who was measured, over all prompts so far; plain decoding's first.
        dropped: `strategy`, `parameters` and `why` of those that went.
    """

    prompts: list[str]
    figures: list[dict[str, Any]]
    dropped: list[dict[str, Any]] = field(default_factory=list)


@dataclass(frozen=True)
class HalvingResult:
    """The rungs, and the confirmation.

    Args:
        confirmation: figures over all prompts, plain decoding's first, then the champion's where there is one.
        confirmed: what they were made from, in the same order.
        tail: probability left out at each end of the confirmation's intervals.
    """

    rungs: list[Rung]
    confirmation: list[dict[str, Any]]
    confirmed: list[tuple[Config, Measured]]
    tail: float


def halve(evaluate: Evaluate, configs: Sequence[Config], prompts: Sequence[Prompt], *, champion: Config | None = None, first: int = 2,
          seed: int = 0, fit: Fit | None = None) -> HalvingResult:
    """Narrow configs down to two, and confirm these.

    Args:
        configs: the challengers, best first: where figures are equal the order stays.
        champion: what is served now; measured in every rung and in the confirmation, never dropped.
        first: prompts of the first rung; each further one takes as many new ones as all before it together.
        seed: of the bootstrap.
        fit: constraints, asked behind every rung; who surely breaks one leaves.
    """
    always = [PLAIN] if champion is None or champion == PLAIN else [PLAIN, champion]
    survivors = [config for config in configs if config not in always]
    so_far: dict[str, Measured] = {}
    rungs: list[Rung] = []
    start = 0
    while len(survivors) > FINALISTS and start < len(prompts):
        end = min(len(prompts), max(first, 2 * start))
        entrants = [*always, *survivors]
        for config, more in zip(entrants, measure_all(evaluate, entrants, prompts[start:end]), strict=True):
            label = label_of(config)
            so_far[label] = so_far[label] + more if label in so_far else more
        measured = [(config, so_far[label_of(config)]) for config in entrants]
        figures = compare_with_plain(measured, seed=seed)
        rung = Rung([prompt.id for prompt in prompts[start:end]], figures)
        survivors = drop(rung, survivors, measured, prompts[:end], fit, last=end == len(prompts))
        rungs.append(rung)
        start = end
    finalists = [*always, *survivors[:FINALISTS]]
    confirmed = list(zip(finalists, measure_all(evaluate, finalists, prompts, fresh=True), strict=True))
    tail = TAIL / max(1, len(finalists) - 1)
    return HalvingResult(rungs, compare_with_plain(confirmed, seed=seed, tail=tail), confirmed, tail)


def drop(rung: Rung, survivors: Sequence[Config], measured: Sequence[tuple[Config, Measured]], prompts: Sequence[Prompt],
         fit: Fit | None, *, last: bool) -> list[Config]:
    """Who stays, fastest first; who goes is noted in the rung: whoever surely breaks a constraint, and the slower half of the others.

    Where both leaders are in doubt, the second place goes to the fastest that is not: else a confirmation that proves the doubts right
    would have nothing left to choose.

    Behind the last rung all but two go, as only these are confirmed; of those whose interval overlaps the leader's it is noted that
    chance may have decided.
    """
    results, figures = dict_of(measured), {label_of((f["strategy"], f["parameters"])): f for f in rung.figures}
    objections = {label_of(config): fit(config, prompts, results[label_of(config)], measured[0][1]) if fit else None
                  for config in survivors}
    fitting = []
    for config in survivors:
        objection = objections[label_of(config)]
        if objection is None or not objection.sure:
            fitting.append(config)
        else:
            rung.dropped.append(named(config) | {"why": objection.why})
    ranked = sorted(fitting, key=lambda config: -figures[label_of(config)]["speedup"])
    clear = next((config for config in ranked if objections[label_of(config)] is None), None)
    if clear is not None and clear not in ranked[:FINALISTS]:
        ranked.remove(clear)
        ranked.insert(FINALISTS - 1, clear)
    kept = FINALISTS if last else max(FINALISTS, math.ceil(len(ranked) / 2))
    for place, config in enumerate(ranked[kept:], kept + 1):
        figure = figures[label_of(config)]
        why = f"{figure['speedup']:.2f} times as fast as {PLAIN[0]}, place {place} of {len(ranked)}"
        if (objection := objections[label_of(config)]) is not None:
            why += f", and perhaps {objection.why}"
        if last and figure["speedup_high"] >= figures[label_of(ranked[0])]["speedup_low"]:
            why += ", perhaps by chance: its interval overlaps the first one's"
        rung.dropped.append(named(config) | {"why": why})
    return ranked[:kept]


def compare_with_plain(measured: Sequence[tuple[Config, Measured]], *, seed: int = 0, tail: float = TAIL) -> list[dict[str, Any]]:
    """Figures of every config against the first, which is plain decoding, as plain JSON; `tail` is what really lies beyond a bound."""
    figures = []
    base = measured[0][1]
    tail = expanded_tail(tail, len(base.seconds))
    for config, result in measured:
        ratio, low, high = paired_bootstrap_ratio(base.seconds, base.tokens, result.seconds, result.tokens, tail=tail, seed=seed)
        paces = [seconds / tokens for seconds, tokens in zip(result.seconds, result.tokens, strict=True)]
        figures.append(named(config) | {
            "prompts": len(paces), "median_seconds_per_token": median(paces), "seconds_per_token": result.pace,
            "target_calls_per_token": result.calls_per_token, "speedup": ratio, "speedup_low": low, "speedup_high": high})
    return figures


def dict_of(measured: Sequence[tuple[Config, Measured]]) -> dict[str, Measured]:
    return {label_of(config): result for config, result in measured}


def named(config: Config) -> dict[str, Any]:
    return {"strategy": config[0], "parameters": config[1]}
