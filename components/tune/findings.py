"""What a tuning found, as parts of its evidence."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from draftwell.components.tune.evidence import (
    EVIDENCE_VERSION,
    Confirmation,
    Metrics,
    Rollouts,
    Trial,
)
from draftwell.components.tune.search.search import Search, artifact_digest
from draftwell.components.tune.search.space import combinations
from draftwell.components.tune.successive_halving import HalvingResult
from draftwell.serving.runtime.strategies import PLAIN, StrategyChoice, StrategyResources


def findings_of(
    tried: Sequence[Trial],
    halved: HalvingResult,
    confirmed: Sequence[Metrics],
    references: Sequence[Trial],
) -> dict[str, Any]:
    """The fields of `TuningEvidence` that report what was tried and measured.

    Args:
        references: trials that are not candidates: plain decoding, vanilla SD at its fastest gamma.
    """
    latest: dict[StrategyChoice, Metrics] = {}
    for figure in [*(figure for rung in halved.rungs for figure in rung.figures), *confirmed]:
        latest[figure.choice] = figure
    final = {figure.choice for figure in confirmed}
    trials = {trial.choice: trial for trial in [*references, *tried]}
    return {
        "schema_version": EVIDENCE_VERSION,
        "trials": list(tried),
        "rungs": halved.rungs,
        "confirmation": Confirmation(tail=halved.tail, figures=list(confirmed)),
        "measured": [
            with_trial(figure, trials.get(choice), choice in final)
            for choice, figure in [(PLAIN, latest.pop(PLAIN)), *latest.items()]
        ],
    }


def with_trial(figure: Metrics, trial: Trial | None, confirmed: bool) -> Metrics:
    """Metrics with what the trial of the same choice predicted; a short measurement predicts
    nothing, and the loss of more text than the trial's goes before the trial's."""
    seconds, divergence = None, figure.quality_loss
    if trial is not None and trial.source != "measured":
        seconds = trial.predicted_seconds_per_token
    if trial is not None and divergence is None:
        divergence = trial.divergence
    return figure.model_copy(
        update={
            "confirmed": confirmed,
            "predicted_seconds_per_token": seconds,
            "divergence": divergence,
        }
    )


def rollouts_of(search: Search, names: Sequence[str], replayed: Sequence[Trial]) -> Rollouts:
    """What the length of a trace's rollouts meant for a search."""
    beyond = {name: len(combinations(name)) - len(search.configs(name)) for name in names}
    return Rollouts(
        length=search.texts.rollout,
        beyond={name: count for name, count in beyond.items() if count},
        inexact=sum(not trial.exact for trial in replayed),
        replayed=len(replayed),
    )


def artifacts_of(resources: StrategyResources) -> dict[str, str]:
    """kind → digest of every artifact."""
    return {
        kind: artifact_digest(artifact) for kind, artifact in sorted(resources.artifacts.items())
    }
