"""What training reports: typed results, and their JSON as it is stored in the workspace and in
MLflow."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from pydantic import BaseModel, ConfigDict, Field

from draftwell.serving.recording.trace import TraceSet

if TYPE_CHECKING:
    import pyarrow as pa

    from draftwell.components.train.examples import OfPrompts

Interval = tuple[float, float]
"""Lower and upper end of a 95 % interval by a bootstrap over prompts."""


class Report(BaseModel):
    """A frozen part of a report."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class RocCurve(Report):
    """Points of a ROC curve."""

    fpr: list[float]
    tpr: list[float]


class ReliabilityBin(Report):
    """Mean score, observed mean label and number of rows of one bin of the score."""

    score: float
    observed: float
    count: int


class Ranking(Report):
    """How well a score ranks acceptable tokens before others, compared with the draft's confidence
    C.

    With a single class there is no AUC, and what needs one is None.
    """

    test_rows: int
    test_prompts: int
    prevalence: float = Field(description="share of label 1")
    auc: float | None
    baseline_auc: float | None = Field(description="of the score C")
    gain: float | None = Field(description="auc − baseline_auc")
    intervals: dict[str, Interval] | None = Field(
        description="of the last four; None for a single prompt"
    )

    def numbers(self) -> dict[str, float]:
        """The numbers that an artifact carries; undefined ones are left out."""
        values = self.model_dump()
        return {name: float(value) for name, value in values.items() if isinstance(value, float)}


class RankingWithRoc(Ranking):
    """A ranking with its ROC curve."""

    roc: RocCurve


class VerifierMetrics(Ranking):
    """A verifier on test prompts. A rate over no rows is None."""

    eta_tp: float | None = Field(
        description=(
            "share that it keeps of the tokens to be kept: q̄/p̄ <= 1 as in the paper, or by "
            "its label"
        )
    )
    eta_fp: float | None = Field(
        description="share that it keeps of the tokens to be rejected: q̄/p̄ > 1, or by its label"
    )
    eta_tp_ratio: float | None = Field(description="as eta_tp, at the label's lambda")
    eta_fp_ratio: float | None = Field(description="as eta_fp, at the label's lambda")
    brier: float
    calibration_error: float = Field(
        description="mean distance of score and share over the reliability bins, weighted by rows"
    )
    reliability: list[ReliabilityBin]
    roc: RocCurve
    baseline_roc: RocCurve
    kinds: dict[str, Ranking] = Field(description="prefix kind → ranking of its rows")


class TrainingReport(Report):
    """The parts that all training reports share."""

    rows: dict[str, int] = Field(description="rows of train and test")
    prompts: dict[str, list[str]] = Field(description="ids of train and test")
    left_out: list[str] = Field(description="test prompts that are in the training trace too")
    test_trace: str | None = Field(description="digest of the test trace, where there is one")

    def to_json(self) -> dict[str, Any]:
        """Plain JSON, with the metrics at the top level."""
        values = self.model_dump(mode="json")
        metrics = values.pop("metrics", {})
        return {**values, **metrics}


def describe_split(
    train: OfPrompts, tested: OfPrompts, left_out: list[str], test: TraceSet | pa.Table | None
) -> dict[str, Any]:
    """The fields of a `TrainingReport`."""
    sides = {"train": train, "test": tested}
    return {
        "rows": {name: len(side) for name, side in sides.items()},
        "prompts": {name: np.unique(side.prompt).tolist() for name, side in sides.items()},
        "left_out": left_out,
        "test_trace": test.digest() if isinstance(test, TraceSet) else None,
    }


class VerifierReport(TrainingReport):
    """Report of `train_verifier`."""

    features: list[str]
    label: str = Field("ratio", description="what is predicted (`LabelKind`)")
    ratio: float = Field(description="lambda of the label ratio")
    temperature: float | None = Field(
        None, description="of the training traces; None: not recorded"
    )
    strength: float = Field(description="inverse strength of the penalty")
    threshold: float = Field(description="tau")
    validation_auc: float
    candidates: dict[str, float] = Field(description="feature set → AUC by cross-validation")
    metrics: VerifierMetrics
    lambda_grid: dict[str, RankingWithRoc | None] = Field(
        description="lambda → ranking with the same features and penalty"
    )


class HeadMetrics(Ranking):
    """An acceptance head on test prompts; it ranks what the target accepts, at the trace's
    temperature."""

    loss: float = Field(description="weighted cross-entropy")
    constant_loss: float = Field(
        description="weighted cross-entropy of the best constant of the training prompts"
    )
    kl: float = Field(description="unweighted, in nats")
    correlation: float = Field(description="of prediction and label")
    mean_label: float
    mean_prediction: float
    reliability: list[ReliabilityBin] = Field(description="predictions against the soft label")
    calibration_error: float


class HeadReport(TrainingReport):
    """Report of `train_acceptance_head`."""

    blocks: int
    mixing: float
    mismatch_weight: float
    epochs: int
    metrics: HeadMetrics
