"""Our engine's rungs and confirmation (`halving`).

Plain decoding and the champion are measured with the others in every rung, interleaved. A rung
takes prompts that no earlier rung had, and what was measured adds up. Nothing is decided there: a
*confirmation* measures the last two, plain decoding, the champion and `default` again, and only its
figures count. It takes all prompts, those of the rungs among them, since there are too few to keep
some back: luck of the clock is left out of its bound, a liking for these prompts is not.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from draftwell.components.prompts.prompt import Prompt
from draftwell.components.report.intervals import TAIL, ratio_of
from draftwell.components.tune.constraints import ConstraintChecker
from draftwell.components.tune.evaluator import Evaluate, Measured
from draftwell.components.tune.evidence import Confirmation, Dropped, Metrics, Rung
from draftwell.components.tune.halving import halve
from draftwell.serving.runtime.strategies import PLAIN, StrategyChoice

FINALISTS = 2


def successive_halving(
    evaluate: Evaluate,
    choices: Sequence[StrategyChoice],
    prompts: Sequence[Prompt],
    checker: ConstraintChecker,
    *,
    champion: StrategyChoice | None = None,
    default: StrategyChoice | None = None,
    first: int = 2,
    seed: int = 0,
) -> tuple[list[Rung], Confirmation]:
    """Narrow choices down to two, and confirm these.

    Args:
        choices: the challengers, best first: where speeds are equal the order stays.
        checker: of the constraints, on what was measured so far.
        champion: what is served now; measured in every rung and in the confirmation, never dropped.
        default: what is measured in the confirmation even if two prompts of a rung spoke against
            it.
        first: prompts of the first rung; each further one takes as many new ones as all before it
            together.
        seed: of the bootstrap.
    """
    always = [PLAIN] if champion is None or champion == PLAIN else [PLAIN, champion]
    so_far: dict[StrategyChoice, Measured] = {}
    rungs: list[Rung] = []

    def rung(survivors: Sequence[StrategyChoice], start: int, end: int) -> list[StrategyChoice]:
        entrants = [*always, *survivors]
        for choice, more in zip(entrants, evaluate(entrants, prompts[start:end]), strict=True):
            so_far[choice] = so_far[choice] + more if choice in so_far else more
        figures = compare_with_plain({choice: so_far[choice] for choice in entrants}, seed=seed)
        objections = {
            choice: checker.metrics(choice, prompts[:end], so_far[choice], so_far[PLAIN])[
                "objection"
            ]
            for choice in survivors
        }
        kept, dropped = drop(figures, survivors, objections, last=end == len(prompts))
        ids = [prompt.id for prompt in prompts[start:end]]
        rungs.append(Rung(prompts=ids, figures=figures, dropped=dropped))
        return kept

    challengers = [choice for choice in choices if choice not in always]
    left = halve(rung, challengers, len(prompts), first=first, finalists=FINALISTS)
    finalists = list(dict.fromkeys([*always, *left, *([default] if default else [])]))
    measured = dict(zip(finalists, evaluate(finalists, prompts, fresh=True), strict=True))
    tail = TAIL / max(1, len(finalists) - 1)
    figures = [
        figure.model_copy(
            update=checker.metrics(choice, prompts, measured[choice], measured[PLAIN])
        )
        for choice, figure in zip(
            finalists, compare_with_plain(measured, seed=seed, tail=tail), strict=True
        )
    ]
    return rungs, Confirmation(tail=tail, figures=figures)


def drop(
    figures: Sequence[Metrics],
    survivors: Sequence[StrategyChoice],
    objections: Mapping[StrategyChoice, str | None],
    *,
    last: bool,
) -> tuple[list[StrategyChoice], list[Dropped]]:
    """Who stays, fastest first, and who leaves: the slower half, after the last rung all but the
    two that are confirmed.

    A constraint that few prompts speak of drops nobody. The second place goes to the fastest that
    keeps to all of them so far: otherwise a confirmation might have nothing left to choose.
    """
    speedups = {figure.choice: figure.speedup for figure in figures}
    ranked = sorted(survivors, key=lambda choice: -speedups[choice])
    fitting = next((choice for choice in ranked if objections[choice] is None), None)
    if fitting is not None and fitting not in ranked[:FINALISTS]:
        ranked.remove(fitting)
        ranked.insert(FINALISTS - 1, fitting)
    kept = FINALISTS if last else max(FINALISTS, math.ceil(len(ranked) / 2))
    dropped = []
    for place, choice in enumerate(ranked[kept:], kept + 1):
        why = f"{speedups[choice]:.2f} times as fast as {PLAIN}, place {place} of {len(ranked)}"
        if objection := objections[choice]:
            why += f", and {objection}"
        dropped.append(Dropped.of(choice, why=why))
    return ranked[:kept], dropped


def compare_with_plain(
    measured: Mapping[StrategyChoice, Measured], *, seed: int = 0, tail: float = TAIL
) -> list[Metrics]:
    """Figures of every choice against plain decoding; `tail` is what really lies beyond a bound."""
    figures = []
    for choice, result in measured.items():
        ratio, low, high = ratio_of(measured[PLAIN], result, tail, seed)
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
