"""Metrics of a learned score on test prompts: ranking, rates at its threshold, calibration, each compared with the score C."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from components.report.intervals import percentile_ends, resample
from components.train.reports import Interval, Ranking, ReliabilityBin, RocCurve, VerifierMetrics
from serving.errors import DraftwellError

if TYPE_CHECKING:
    from components.train.examples import Examples

CURVE_POINTS = 200
RESAMPLES = 1000
TAIL = 0.025
"""Probability left out at each end of an interval."""


def verifier_metrics(test: Examples, score: np.ndarray, ratio: float, threshold: float) -> VerifierMetrics:
    """Metrics of a verifier's scores of unseen prompts.

    Args:
        score: `[rows]`.
        ratio: lambda of the label.
        threshold: tau.
    """
    require_sklearn()
    from sklearn.metrics import brier_score_loss

    label = test.ratio <= ratio
    bins = reliability_bins(label, score)
    kinds = [] if test.kind is None else [kind for kind in np.unique(test.kind).tolist() if kind]
    return VerifierMetrics(
        **dict(ranking(test, score, ratio)),
        eta_tp=rate(score[test.ratio <= 1] >= threshold), eta_fp=rate(score[test.ratio > 1] >= threshold),
        eta_tp_ratio=rate(score[label] >= threshold), eta_fp_ratio=rate(score[~label] >= threshold),
        brier=float(brier_score_loss(label, score)), calibration_error=calibration_error(bins),
        reliability=bins, roc=roc_points(label, score), baseline_roc=roc_points(label, test.confidence),
        kinds={kind: ranking(test.take(test.kind == kind), score[test.kind == kind], ratio) for kind in kinds})


def ranking(test: Examples, score: np.ndarray, ratio: float) -> Ranking:
    """How well a score ranks acceptable tokens (q̄/p̄ <= `ratio`) before others, compared with C."""
    label = test.ratio <= ratio
    names, prompt = np.unique(test.prompt, return_inverse=True)
    prevalence = float(label.mean())
    if label.all() or not label.any():
        return Ranking(test_rows=len(test), test_prompts=len(names), prevalence=prevalence, auc=None, baseline_auc=None, gain=None,
                       intervals=None)
    auc, baseline = auc_of(label, score), auc_of(label, test.confidence)
    return Ranking(test_rows=len(test), test_prompts=len(names), prevalence=prevalence, auc=auc, baseline_auc=baseline,
                   gain=auc - baseline, intervals=intervals(label, score, test.confidence, prompt) if len(names) > 1 else None)


def intervals(label: np.ndarray, score: np.ndarray, confidence: np.ndarray, prompt: np.ndarray, *, weight: np.ndarray | None = None,
              resamples: int = RESAMPLES, seed: int = 0) -> dict[str, Interval]:
    """95 % intervals of prevalence, both AUCs and their difference; resamples of the prompts with a single class are left out.

    Args:
        label: `[rows]` bool.
        prompt: `[rows]` numbers of the prompts from 0.
        weight: `[rows]` how much each row counts; None: all alike.
    """
    ranks = [np.unique(values, return_inverse=True)[1] for values in (score, confidence)]
    count, found = int(prompt.max()) + 1, []
    for picked in resample(count, resamples, seed):
        drawn = np.bincount(picked, minlength=count)[prompt] * (1.0 if weight is None else weight)
        share = float(drawn[label].sum() / drawn.sum())
        if 0 < share < 1:
            auc, baseline = (weighted_auc(label, rank, drawn) for rank in ranks)
            found.append((share, auc, baseline, auc - baseline))
    ends = percentile_ends(np.array(found), TAIL).T.tolist()
    return dict(zip(("prevalence", "auc", "baseline_auc", "gain"), ends, strict=True))


def weighted_auc(label: np.ndarray, rank: np.ndarray, weight: np.ndarray) -> float:
    """Area under the ROC curve of weighted rows, ties counting half: scikit-learn's, without sorting again.

    Args:
        rank: `[rows]` rank of each score among the distinct scores, from 0.
    """
    good, bad = (np.bincount(rank, weight * side, minlength=int(rank.max()) + 1) for side in (label, ~label))
    return float((good * (bad.cumsum() - bad / 2)).sum() / (good.sum() * bad.sum()))


def rate(hits: np.ndarray) -> float | None:
    """Share of True; None of nothing."""
    return float(hits.mean()) if len(hits) else None


def auc_of(label: np.ndarray, score: np.ndarray, weight: np.ndarray | None = None) -> float:
    """Area under the ROC curve; both classes must be present."""
    require_sklearn()
    from sklearn.metrics import roc_auc_score

    return float(roc_auc_score(label, score, sample_weight=weight))


def roc_points(label: np.ndarray, score: np.ndarray) -> RocCurve:
    """The ROC curve, at most `CURVE_POINTS` points."""
    from sklearn.metrics import roc_curve

    fpr, tpr, _ = roc_curve(label, score)
    picked = np.unique(np.linspace(0, len(fpr) - 1, min(len(fpr), CURVE_POINTS)).round().astype(int))
    return RocCurve(fpr=fpr[picked].tolist(), tpr=tpr[picked].tolist())


def reliability_bins(label: np.ndarray, score: np.ndarray) -> list[ReliabilityBin]:
    """Ten equal bins of the score; empty bins are left out.

    Args:
        label: `[rows]`, bool, or a share in [0, 1].
    """
    index = np.minimum((score * 10).astype(int), 9)
    return [ReliabilityBin(score=float(score[index == b].mean()), observed=float(label[index == b].mean()), count=int((index == b).sum()))
            for b in range(10) if (index == b).any()]


def calibration_error(bins: Sequence[ReliabilityBin]) -> float:
    """Mean distance of score and observed share over bins, weighted by their rows."""
    return sum(b.count * abs(b.score - b.observed) for b in bins) / sum(b.count for b in bins)


def require_sklearn() -> None:
    """Refuse to train without scikit-learn (`missing_package`)."""
    try:
        import sklearn.metrics  # noqa: F401
    except ImportError as error:
        raise DraftwellError("training needs the package scikit-learn: pip install 'draftwell[pipeline]'",
                             code="missing_package") from error
