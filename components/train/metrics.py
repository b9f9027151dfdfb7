"""Metrics of a learned score on test prompts: ranking, rates at its threshold, calibration, each
compared with the score C."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from draftwell.components.report.intervals import TAIL, percentile_ends, resample
from draftwell.components.train.reports import (
    Interval,
    Ranking,
    ReliabilityBin,
    RocCurve,
    VerifierMetrics,
)
from draftwell.serving.errors import missing_package

if TYPE_CHECKING:
    from draftwell.components.train.examples import Examples, VerifierLabel

CURVE_POINTS = 200
RESAMPLES = 1000


def verifier_metrics(
    test: Examples, score: np.ndarray, label: VerifierLabel, threshold: float
) -> VerifierMetrics:
    """Metrics of a verifier's scores of unseen prompts.

    Args:
        score: `[rows]`.
        label: what the verifier predicts.
        threshold: tau.
    """
    require_sklearn()
    target, bad = label.targets(test).astype(np.float64), label.rejected(test)
    bins, kept = reliability_bins(target, score), score >= threshold
    kinds = [] if test.kind is None else [kind for kind in np.unique(test.kind).tolist() if kind]
    return VerifierMetrics(
        **dict(ranking(test, score, label)),
        eta_tp=rate(kept, 1 - bad),
        eta_fp=rate(kept, bad),
        eta_tp_ratio=rate(kept, target),
        eta_fp_ratio=rate(kept, 1 - target),
        brier=float((target * (1 - score) ** 2 + (1 - target) * score**2).mean()),
        calibration_error=calibration_error(bins),
        reliability=bins,
        roc=roc_points(target, score),
        baseline_roc=roc_points(target, test.confidence),
        kinds={
            kind: ranking(test.take(test.kind == kind), score[test.kind == kind], label)
            for kind in kinds
        },
    )


def ranking(test: Examples, score: np.ndarray, label: VerifierLabel) -> Ranking:
    """How well a score ranks acceptable tokens before others, compared with C; a target between 0
    and 1 counts as both, by its share."""
    target = label.targets(test)
    names, prompt = np.unique(test.prompt, return_inverse=True)
    prevalence = float(target.mean(dtype=np.float64))
    if of_one_class(target):
        return Ranking(
            test_rows=len(test),
            test_prompts=len(names),
            prevalence=prevalence,
            auc=None,
            baseline_auc=None,
            gain=None,
            intervals=None,
        )
    auc, baseline = auc_of(target, score), auc_of(target, test.confidence)
    rows, good, weight = split_soft(target)
    ends = (
        intervals(good, score[rows], test.confidence[rows], prompt[rows], weight=weight)
        if len(names) > 1
        else None
    )
    return Ranking(
        test_rows=len(test),
        test_prompts=len(names),
        prevalence=prevalence,
        auc=auc,
        baseline_auc=baseline,
        gain=auc - baseline,
        intervals=ends,
    )


def of_one_class(target: np.ndarray) -> bool:
    """Whether targets in [0, 1] are all 0 or all 1."""
    return bool((target >= 1).all() or (target <= 0).all())


def split_soft(target: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
    """Targets in [0, 1] as labelled rows: one between 0 and 1 is a row of each class, weighted by
    its share of it.

    Returns:
        `[n]` each: index of the row, whether it counts as good, and its weight; None for targets
        that are all 0 or 1.
    """
    if ((target <= 0) | (target >= 1)).all():
        return np.arange(len(target)), target > 0, None
    good, bad = np.flatnonzero(target > 0), np.flatnonzero(target < 1)
    return (
        np.concatenate([good, bad]),
        np.arange(len(good) + len(bad)) < len(good),
        np.concatenate([target[good], 1 - target[bad]]).astype(np.float64),
    )


def intervals(
    label: np.ndarray,
    score: np.ndarray,
    confidence: np.ndarray,
    prompt: np.ndarray,
    *,
    weight: np.ndarray | None = None,
    resamples: int = RESAMPLES,
    seed: int = 0,
) -> dict[str, Interval]:
    """95 % intervals of prevalence, both AUCs and their difference; resamples of the prompts with a
    single class are left out.

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
    ends = percentile_ends(np.array(found), TAIL / 2).T.tolist()
    return dict(zip(("prevalence", "auc", "baseline_auc", "gain"), ends, strict=True))


def weighted_auc(label: np.ndarray, rank: np.ndarray, weight: np.ndarray) -> float:
    """Area under the ROC curve of weighted rows, ties counting half: scikit-learn's, without
    sorting again.

    Args:
        rank: `[rows]` rank of each score among the distinct scores, from 0.
    """
    good, bad = (
        np.bincount(rank, weight * side, minlength=int(rank.max()) + 1) for side in (label, ~label)
    )
    return float((good * (bad.cumsum() - bad / 2)).sum() / (good.sum() * bad.sum()))


def rate(hits: np.ndarray, weight: np.ndarray) -> float | None:
    """Share of True among weighted rows; None of nothing."""
    total = float(weight.sum())
    return float(weight[hits].sum() / total) if total else None


def auc_of(target: np.ndarray, score: np.ndarray) -> float:
    """Area under the ROC curve; both classes must be present.

    Args:
        target: `[rows]` in [0, 1] (`split_soft`).
    """
    require_sklearn()
    from sklearn.metrics import roc_auc_score

    rows, good, weight = split_soft(target)
    return float(roc_auc_score(good, score[rows], sample_weight=weight))


def roc_points(target: np.ndarray, score: np.ndarray) -> RocCurve:
    """The ROC curve of targets in [0, 1], at most `CURVE_POINTS` points."""
    from sklearn.metrics import roc_curve

    rows, good, weight = split_soft(target)
    fpr, tpr, _ = roc_curve(good, score[rows], sample_weight=weight)
    picked = np.unique(
        np.linspace(0, len(fpr) - 1, min(len(fpr), CURVE_POINTS)).round().astype(int)
    )
    return RocCurve(fpr=fpr[picked].tolist(), tpr=tpr[picked].tolist())


def reliability_bins(label: np.ndarray, score: np.ndarray) -> list[ReliabilityBin]:
    """Ten equal bins of the score; empty bins are left out.

    Args:
        label: `[rows]`, bool, or a share in [0, 1].
    """
    index = np.minimum((score * 10).astype(int), 9)
    return [
        ReliabilityBin(
            score=float(score[index == b].mean()),
            observed=float(label[index == b].mean()),
            count=int((index == b).sum()),
        )
        for b in range(10)
        if (index == b).any()
    ]


def calibration_error(bins: Sequence[ReliabilityBin]) -> float:
    """Mean distance of score and observed share over bins, weighted by their rows."""
    return sum(b.count * abs(b.score - b.observed) for b in bins) / sum(b.count for b in bins)


def require_sklearn() -> None:
    """Refuse to train without scikit-learn (`missing_package`)."""
    try:
        import sklearn.metrics  # noqa: F401
    except ImportError as error:
        raise missing_package("training needs", "scikit-learn", "pipeline") from error
