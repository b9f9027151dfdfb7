"""What a tuning found, as parts of its evidence: what was tried and measured, and how far
predictions were from measurements."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import Any

from draftwell.components.tune.evidence import (
    EVIDENCE_VERSION,
    Confirmation,
    Metrics,
    PredictionErrorRow,
    PredictionErrors,
    Rollouts,
    Trial,
)
from draftwell.components.tune.pareto import front
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
        references: trials that are not candidates: plain decoding, vanilla SD at its fastest gamma,
            estimates.
    """
    trials = [*tried, *references]
    latest: dict[StrategyChoice, Metrics] = {}
    for figure in [*(figure for rung in halved.rungs for figure in rung.figures), *confirmed]:
        latest[figure.choice] = figure
    plain = latest.pop(PLAIN)
    final = {figure.choice for figure in confirmed}
    figures = [
        figure.model_copy(
            update={
                "confirmed": figure.choice in final,
                "predicted_seconds_per_token": predicted(trials, figure),
            }
        )
        for figure in [plain, *latest.values()]
    ]
    return {
        "schema_version": EVIDENCE_VERSION,
        "trials": list(tried),
        "front": front([trial.values for trial in tried]),
        "rungs": halved.rungs,
        "confirmation": Confirmation(tail=halved.tail, figures=list(confirmed)),
        "measured": figures,
        "prediction_error": prediction_errors(trials, figures),
    }


def rollouts_of(search: Search, names: Sequence[str], replayed: Sequence[Trial]) -> Rollouts:
    """What the length of a trace's rollouts meant for a search."""
    beyond = {name: len(combinations(name)) - len(search.configs(name)) for name in names}
    return Rollouts(
        length=search.texts.rollout,
        beyond={name: count for name, count in beyond.items() if count},
        inexact=sum(not trial.exact for trial in replayed),
        replayed=len(replayed),
    )


def prediction_errors(trials: Sequence[Trial], figures: Sequence[Metrics]) -> PredictionErrors:
    """How far replay was from what was measured: predicted seconds per token over measured ones,
    minus 1."""
    replayed = [trial for trial in trials if trial.source == "replayed"]
    rows = []
    for figure in figures:
        seconds = predicted(replayed, figure)
        if seconds is not None:
            rows.append(
                PredictionErrorRow.of(
                    figure.choice,
                    predicted=seconds,
                    measured=figure.seconds_per_token,
                    error=seconds / figure.seconds_per_token - 1,
                )
            )
    return PredictionErrors(
        median=median(abs(row.error) for row in rows) if rows else None, configs=rows
    )


def predicted(trials: Sequence[Trial], figure: Metrics) -> float | None:
    """What was predicted for a measured choice."""
    return next(
        (trial.predicted_seconds_per_token for trial in trials if trial.choice == figure.choice),
        None,
    )


def artifacts_of(resources: StrategyResources) -> dict[str, str]:
    """kind → digest of every artifact."""
    return {
        kind: artifact_digest(artifact) for kind, artifact in sorted(resources.artifacts.items())
    }
