"""The evidence of a tuning: what was tried, what was measured, and how far predictions were from measurements."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from components.tune.evaluator import label_of
from components.tune.pareto import front
from components.tune.search.search import Search, Trial, artifact_digest
from components.tune.search.space import combinations
from components.tune.successive_halving import PLAIN, HalvingResult
from serving.runtime.strategies import StrategyResources

EVIDENCE_VERSION = 2


def evidence_of(tried: Sequence[Trial], halved: HalvingResult, confirmed: Sequence[dict[str, Any]],
                others: Sequence[Trial]) -> dict[str, Any]:
    """What was tried and measured, as plain JSON.

    Returns:
        `schema_version`; `trials`: every config replayed or explored with its three values, `exact` and `source`; `front`: indices
        into them of the Pareto front (values of replayed and of measured trials come from different prompts: `source` tells them
        apart); `rungs`: `prompts`, `figures` and `dropped` of each; `confirmation`: `tail` and `figures` with quality, cost and
        `objection`; `measured`: the last figures of every config that was measured, plain decoding's first, with `confirmed` and
        `predicted_seconds_per_token`; `prediction_error`: `median` and, for each replayed config, `predicted / measured − 1`.
    """
    trials = [*tried, *others]
    measured: dict[str, dict[str, Any]] = {}
    for rung in halved.rungs:
        measured |= {label_of((f["strategy"], f["parameters"])): f | {"confirmed": False} for f in rung.figures}
    measured |= {label_of((f["strategy"], f["parameters"])): f | {"confirmed": True} for f in confirmed}
    plain = measured.pop(label_of(PLAIN))
    figures = [figure | {"predicted_seconds_per_token": predicted(trials, figure)} for figure in [plain, *measured.values()]]
    return {"schema_version": EVIDENCE_VERSION, "trials": [vars(trial) for trial in tried],
            "front": front([trial.values for trial in tried]),
            "rungs": [vars(rung) for rung in halved.rungs],
            "confirmation": {"tail": halved.tail, "figures": list(confirmed)},
            "measured": figures, "prediction_error": prediction_error(trials, figures)}


def rollouts_of(search: Search, names: Sequence[str], replayed: Sequence[Trial]) -> dict[str, Any]:
    """What the length of a trace's rollouts meant for a search, as plain JSON.

    Returns:
        `length`; `beyond`: strategy → how many of its configs were not tried, because their drafts of fixed length are longer;
        `inexact`: replays whose drafts, ended by confidence, ran on behind a rollout, so that they are estimates; `replayed`: all.
    """
    beyond = {name: len(combinations(name)) - len(search.configs(name)) for name in names}
    return {"length": search.texts.rollout, "beyond": {name: count for name, count in beyond.items() if count},
            "inexact": sum(not trial.exact for trial in replayed), "replayed": len(replayed)}


def prediction_error(trials: Sequence[Trial], figures: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """How far replay was from what was measured: predicted seconds per token over measured ones, minus 1."""
    replayed = [trial for trial in trials if trial.source == "replayed"]
    rows = []
    for figure in figures:
        said = predicted(replayed, figure)
        if said is not None:
            rows.append({"strategy": figure["strategy"], "parameters": figure["parameters"], "predicted": said,
                         "measured": figure["seconds_per_token"], "error": said / figure["seconds_per_token"] - 1})
    return {"median": median(abs(row["error"]) for row in rows) if rows else None, "configs": rows}


def predicted(trials: Sequence[Trial], figure: Mapping[str, Any]) -> float | None:
    """What was said about a measured config before."""
    match = [t for t in trials if (t.strategy, t.parameters) == (figure["strategy"], figure["parameters"])]
    return match[0].predicted_seconds_per_token if match else None


def artifacts_of(resources: StrategyResources) -> dict[str, str]:
    """kind → digest of every artifact of the resources."""
    return {kind: artifact_digest(artifact) for kind, artifact in sorted(resources.artifacts.items())}
