"""Tuning for a target without a draft model: there are no traces that a replay could read, so what
needs no draft is measured."""

from __future__ import annotations

from collections.abc import Sequence

from draftwell.components.collect.decoding import encode_all
from draftwell.components.prompts.prompt import Prompt, prompts_digest
from draftwell.components.report.machine import describe_machine
from draftwell.components.tune.candidates import unfit
from draftwell.components.tune.constraints import ConstraintChecker
from draftwell.components.tune.evaluator import Evaluate
from draftwell.components.tune.evidence import EVIDENCE_VERSION, TuningEvidence
from draftwell.components.tune.findings import artifacts_of, latest_figures
from draftwell.components.tune.search.space import MEASURED, REPLAYED, combinations
from draftwell.components.tune.settings import TuneSettings
from draftwell.components.tune.successive_halving import successive_halving
from draftwell.components.tune.tune import SEED, decide
from draftwell.serving.device import device_class
from draftwell.serving.runtime.pair import LoadedPair
from draftwell.serving.runtime.strategies import (
    PLAIN,
    StrategyChoice,
    StrategyResources,
    find_strategy,
)

OF_EACH = 4
"""Settings of a strategy that are measured."""


def tune_without_draft(
    pair: LoadedPair,
    resources: StrategyResources,
    prompts: Sequence[Prompt],
    settings: TuneSettings,
    evaluate: Evaluate,
    champion: StrategyChoice | None = None,
) -> TuningEvidence:
    """Choose among lossless strategies that need no draft model, as `tune_strategy` chooses among
    its shortlist; the evidence names no traces.

    Args:
        settings: its tokens, temperature and constraints.
    """
    left_out = {
        name: why
        for name in (*REPLAYED, *MEASURED)
        if (why := unfit(pair, resources, name, settings.temperature, None)) is not None
    }
    names = [
        name
        for name in (*REPLAYED, *MEASURED)
        if name not in left_out and find_strategy(name).lossless
    ]
    if champion is not None and champion.name not in (*names, PLAIN.name):
        champion = None
    encode_all(pair, prompts, settings.max_tokens, {"target"})  # refuses one that is too long
    choices = [choice for name in names for choice in some_of(combinations(name))]
    checker = ConstraintChecker(settings.constraints, None)
    halved, confirmation = successive_halving(
        evaluate, choices, prompts, checker, champion=champion, seed=SEED
    )
    choice, reason = decide(confirmation, len(choices))
    return TuningEvidence(
        schema_version=EVIDENCE_VERSION,
        choice=choice,
        reason=reason,
        rungs=halved,
        confirmation=confirmation,
        measured=latest_figures(halved, confirmation, []),
        champion=champion,
        constraints=settings.constraints,
        left_out=left_out,
        artifacts=artifacts_of(resources),
        fingerprint=pair.fingerprint,
        padded_to=pair.padded_to,
        device_class=device_class(pair.device),
        machine=describe_machine(pair),
        prompts=len(prompts),
        prompts_digest=prompts_digest(prompts),
        max_tokens=settings.max_tokens,
        temperature=settings.temperature,
        seed=SEED,
    )


def some_of(choices: Sequence[StrategyChoice]) -> list[StrategyChoice]:
    """A few choices, evenly over all of them.

    >>> [one.parameters["a"] for one in some_of([StrategyChoice("x", {"a": i}) for i in range(9)])]
    [0, 3, 5, 8]
    """
    if len(choices) <= OF_EACH:
        return list(choices)
    last = len(choices) - 1
    return [choices[round(place * last / (OF_EACH - 1))] for place in range(OF_EACH)]
