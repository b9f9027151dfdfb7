"""Our engine's rungs and confirmation (`halving`).

Plain decoding and the champion are measured with the others in every rung, interleaved. A rung
takes prompts that no earlier rung had, and what was measured adds up. Nothing is decided there: a
*confirmation* measures the last two, plain decoding, the champion and `default` again, and only its
figures count. It takes all prompts, those of the rungs among them, since there are too few to keep
some back: luck of the clock is left out of its bound, a liking for these prompts is not.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from draftwell.components.bench.engines.figures import TAIL, ratio_of
from draftwell.components.prompts.prompt import Prompt
from draftwell.components.tune.constraints import ConstraintViolation
from draftwell.components.tune.evaluator import Evaluate, Measured, measure_all
from draftwell.components.tune.evidence import Dropped, Metrics, Rung
from draftwell.components.tune.halving import halve
from draftwell.serving.runtime.strategies import PLAIN, StrategyChoice

FINALISTS = 2

Violates = Callable[
    [StrategyChoice, Sequence[Prompt], Measured, Measured], ConstraintViolation | None
]
"""Why a choice breaks a constraint on these prompts, or None; the last argument is plain decoding's
measurement."""
Pairs = Sequence[tuple[StrategyChoice, Measured]]


@dataclass(frozen=True)
class HalvingResult:
    """The rungs, and the confirmation.

    Args:
        confirmation: figures over all prompts, plain decoding's first, then the champion's where
            there is one.
        confirmed: what they were made from, in the same order.
        tail: probability left out at each end of the confirmation's intervals.
    """

    rungs: list[Rung]
    confirmation: list[Metrics]
    confirmed: list[tuple[StrategyChoice, Measured]]
    tail: float


def successive_halving(
    evaluate: Evaluate,
    choices: Sequence[StrategyChoice],
    prompts: Sequence[Prompt],
    *,
    champion: StrategyChoice | None = None,
    default: StrategyChoice | None = None,
    first: int = 2,
    seed: int = 0,
    violates: Violates | None = None,
) -> HalvingResult:
    """Narrow choices down to two, and confirm these.

    Args:
        choices: the challengers, best first: where speeds are equal the order stays.
        champion: what is served now; measured in every rung and in the confirmation, never dropped.
        default: what is measured in the confirmation even if two prompts of a rung spoke against
            it.
        first: prompts of the first rung; each further one takes as many new ones as all before it
            together.
        seed: of the bootstrap.
        violates: constraints, asked after every rung; a choice that surely breaks one leaves.
    """
    always = [PLAIN] if champion is None or champion == PLAIN else [PLAIN, champion]
    so_far: dict[StrategyChoice, Measured] = {}
    rungs: list[Rung] = []

    def rung(survivors: Sequence[StrategyChoice], start: int, end: int) -> list[StrategyChoice]:
        entrants = [*always, *survivors]
        for choice, more in zip(
            entrants, measure_all(evaluate, entrants, prompts[start:end]), strict=True
        ):
            so_far[choice] = so_far[choice] + more if choice in so_far else more
        figures = compare_with_plain([(choice, so_far[choice]) for choice in entrants], seed=seed)
        violations = {
            choice: violates(choice, prompts[:end], so_far[choice], so_far[PLAIN])
            for choice in survivors
            if violates
        }
        kept, dropped = drop(figures, survivors, violations, last=end == len(prompts))
        ids = [prompt.id for prompt in prompts[start:end]]
        rungs.append(Rung(prompts=ids, figures=figures, dropped=dropped))
        return kept

    challengers = [choice for choice in choices if choice not in always]
    left = halve(rung, challengers, len(prompts), first=first, finalists=FINALISTS)
    finalists = [*always, *left]
    if default is not None and default not in finalists:
        finalists.append(default)
    confirmed = list(
        zip(finalists, measure_all(evaluate, finalists, prompts, fresh=True), strict=True)
    )
    tail = TAIL / max(1, len(finalists) - 1)
    return HalvingResult(
        rungs, compare_with_plain(confirmed, seed=seed, tail=tail), confirmed, tail
    )


def drop(
    figures: Sequence[Metrics],
    survivors: Sequence[StrategyChoice],
    violations: Mapping[StrategyChoice, ConstraintViolation | None],
    *,
    last: bool,
) -> tuple[list[StrategyChoice], list[Dropped]]:
    """Who stays, fastest first, and who leaves: whoever surely breaks a constraint, and the slower
    half of the others.

    Where both leaders are in doubt, the second place goes to the fastest that is not: otherwise a
    confirmation that proves the doubts right would have nothing left to choose.

    After the last rung all but two leave, as only these are confirmed.
    """
    by_choice = {metrics.choice: metrics for metrics in figures}
    fitting, dropped = [], []
    for choice in survivors:
        violation = violations.get(choice)
        if violation is None or not violation.sure:
            fitting.append(choice)
        else:
            dropped.append(Dropped.of(choice, why=violation.why))
    ranked = sorted(fitting, key=lambda choice: -by_choice[choice].speedup)
    clear = next((choice for choice in ranked if violations.get(choice) is None), None)
    if clear is not None and clear not in ranked[:FINALISTS]:
        ranked.remove(clear)
        ranked.insert(FINALISTS - 1, clear)
    kept = FINALISTS if last else max(FINALISTS, math.ceil(len(ranked) / 2))
    for place, choice in enumerate(ranked[kept:], kept + 1):
        metrics = by_choice[choice]
        why = f"{metrics.speedup:.2f} times as fast as {PLAIN}, place {place} of {len(ranked)}"
        if (violation := violations.get(choice)) is not None:
            why += f", and perhaps {violation.why}"
        dropped.append(Dropped.of(choice, why=why))
    return ranked[:kept], dropped


def compare_with_plain(measured: Pairs, *, seed: int = 0, tail: float = TAIL) -> list[Metrics]:
    """Figures of every choice against the first, which is plain decoding; `tail` is what really
    lies beyond a bound."""
    figures = []
    for choice, result in measured:
        ratio, low, high = ratio_of(measured[0][1], result, tail, seed)
        figures.append(
            Metrics.of(
                choice,
                prompts=len(result.seconds),
                seconds_per_token=result.pace,
                target_calls_per_token=result.calls_per_token,
                speedup=ratio,
                speedup_low=low,
                speedup_high=high,
            )
        )
    return figures
