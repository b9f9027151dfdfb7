"""Figures of a verifier on test prompts: ranking, rates at its threshold, calibration, each beside the baseline "score = C"."""

from __future__ import annotations

from typing import Any

import numpy as np

from serving.runtime.types import DraftwellError

CURVE_POINTS = 200


def test_report(ratio: np.ndarray, score: np.ndarray, confidence: np.ndarray, wanted: float, threshold: float) -> dict[str, Any]:
    """Plain JSON about scores of unseen prompts.

    Args:
        ratio: `[rows]`, q̄/p̄ of the draft tokens.
        score: `[rows]`, the verifier's.
        confidence: `[rows]`, the baseline's.
        wanted: lambda of the label.
        threshold: tau.
    Returns:
        `prevalence` of label 1; `auc` and `baseline_auc` of the label; `eta_tp`, `eta_fp` at q̄/p̄ > 1, as the paper defines
        them, and `eta_tp_ratio`, `eta_fp_ratio` at lambda; `brier`; `calibration_error` (mean distance of score and share
        over `reliability`'s ten bins, weighted by rows); curves. A rate over no rows is None.
    """
    require_sklearn()
    from sklearn.metrics import brier_score_loss

    label = ratio <= wanted
    bins = reliability_bins(label, score)
    return {
        "prevalence": float(label.mean()), "auc": auc_of(label, score), "baseline_auc": auc_of(label, confidence),
        "eta_tp": rate(score[ratio <= 1] >= threshold), "eta_fp": rate(score[ratio > 1] >= threshold),
        "eta_tp_ratio": rate(score[label] >= threshold), "eta_fp_ratio": rate(score[~label] >= threshold),
        "brier": float(brier_score_loss(label, score)),
        "calibration_error": sum(b["count"] * abs(b["score"] - b["observed"]) for b in bins) / len(label),
        "reliability": bins, "roc": roc_points(label, score), "baseline_roc": roc_points(label, confidence)}


def rate(hits: np.ndarray) -> float | None:
    """Share of True; None of nothing."""
    return float(hits.mean()) if len(hits) else None


def auc_of(label: np.ndarray, score: np.ndarray) -> float:
    """Area under the ROC curve; both classes must be there."""
    require_sklearn()
    from sklearn.metrics import roc_auc_score

    return float(roc_auc_score(label, score))


def roc_points(label: np.ndarray, score: np.ndarray) -> dict[str, list[float]]:
    """`fpr` and `tpr` of the ROC curve, at most `CURVE_POINTS` of each."""
    from sklearn.metrics import roc_curve

    fpr, tpr, _ = roc_curve(label, score)
    picked = np.unique(np.linspace(0, len(fpr) - 1, min(len(fpr), CURVE_POINTS)).round().astype(int))
    return {"fpr": fpr[picked].tolist(), "tpr": tpr[picked].tolist()}


def reliability_bins(label: np.ndarray, score: np.ndarray) -> list[dict[str, float]]:
    """Mean score, observed share of label 1 and rows of each of ten equal bins of the score; empty bins are left out."""
    index = np.minimum((score * 10).astype(int), 9)
    return [{"score": float(score[index == b].mean()), "observed": float(label[index == b].mean()), "count": int((index == b).sum())}
            for b in range(10) if (index == b).any()]


def require_sklearn() -> None:
    """Say what is missing in words."""
    try:
        import sklearn.metrics  # noqa: F401
    except ImportError as error:
        raise DraftwellError("training a verifier needs the package scikit-learn: pip install 'draftwell[pipeline]'") from error
