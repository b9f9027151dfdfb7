"""What a tuning tried, as nested runs: strategy, parameters, time and quality stand beside one
another in MLflow's compare view."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from draftwell.serving.temperature import TemperatureClass

if TYPE_CHECKING:
    from mlflow import MlflowClient

MOST = 60
"""Runs of one tuning; the fastest are kept."""
FIGURES = (
    "seconds_per_token",
    "speedup",
    "speedup_low",
    "speedup_high",
    "quality_loss",
    "rouge_l_lost",
    "target_calls_per_token",
    "cost_ratio",
    "divergence",
    "predicted_seconds_per_token",
)
"""Fields of the evidence that become metrics, where they are known."""


@dataclass(frozen=True)
class TrialRun:
    """One configuration.

    Args:
        requests: class of temperatures that it was tried for.
        source: confirmed, measured, replayed or estimated.
        figures: metrics; `seconds_per_token` of a replay is what it predicts.
    """

    strategy: str
    parameters: Mapping[str, Any]
    requests: TemperatureClass
    source: str
    figures: Mapping[str, float]

    @property
    def name(self) -> str:
        """Strategy, parameters, source and class of requests, for a list of runs."""
        values = ", ".join(f"{key}={value}" for key, value in sorted(self.parameters.items()))
        return f"{self.strategy}({values}) {self.source}, {self.requests}"


def trials_of(config: Mapping[str, Any]) -> list[TrialRun]:
    """The configurations that a decoding config's choices were found among, for greedy requests and
    for sampled ones."""
    sampled = config.get("sampled") or {"evidence": {}}
    return [
        *trial_runs(config["evidence"], "greedy"),
        *trial_runs(sampled["evidence"], "sampled"),
    ]


def trial_runs(evidence: Mapping[str, Any], requests: TemperatureClass) -> list[TrialRun]:
    """The configurations of a tuning's evidence: those confirmed, then those measured, then the
    fastest that were only replayed."""
    confirmation = evidence.get("confirmation") or {}
    replayed = [_trial_run(row, requests, "replayed") for row in evidence.get("trials", ())]
    runs = [
        *(_trial_run(row, requests, "confirmed") for row in confirmation.get("figures", ())),
        *(_trial_run(row, requests, "measured") for row in evidence.get("measured", ())),
        *sorted(replayed, key=lambda run: run.figures.get("seconds_per_token", math.inf)),
    ]
    found: dict[str, TrialRun] = {}
    for run in runs:
        found.setdefault(f"{run.strategy} {sorted(run.parameters.items())}", run)
    return list(found.values())[:MOST]


def _trial_run(row: Mapping[str, Any], requests: TemperatureClass, source: str) -> TrialRun:
    figures = {key: float(row[key]) for key in FIGURES if isinstance(row.get(key), int | float)}
    if "predicted_seconds_per_token" in figures:
        figures.setdefault("seconds_per_token", figures["predicted_seconds_per_token"])
    return TrialRun(
        row["strategy"], row["parameters"], requests, row.get("source", source), figures
    )


def log_trials(
    client: MlflowClient, experiment: str, parent: str, runs: Iterable[TrialRun]
) -> None:
    """Log each configuration as a run nested in `parent`, in three requests each."""
    from mlflow.entities import Metric, Param
    from mlflow.utils.mlflow_tags import MLFLOW_PARENT_RUN_ID

    now = int(time.time() * 1000)
    for trial in runs:
        tags = {
            MLFLOW_PARENT_RUN_ID: parent,
            "kind": "trial",
            "strategy": trial.strategy,
            "requests": trial.requests,
        }
        run = client.create_run(experiment, run_name=trial.name[:250], tags=tags, start_time=now)
        settings = {
            "strategy": trial.strategy,
            "source": trial.source,
            "requests": trial.requests,
            **{key: str(value) for key, value in trial.parameters.items()},
        }
        client.log_batch(
            run.info.run_id,
            [Metric(key, value, now, 0) for key, value in trial.figures.items()],
            [Param(key, value) for key, value in settings.items()],
        )
        client.set_terminated(run.info.run_id, end_time=now)
