"""Figures of a verifier on test prompts: ranking, rates at its threshold, calibration, each beside the baseline "score = C"."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from components.report.intervals import percentile_ends, resample
from components.report.tables import markdown, number
from serving.errors import DraftwellError

if TYPE_CHECKING:
    from components.train.examples import Examples

CURVE_POINTS = 200
RESAMPLES = 1000
TAIL = 0.025
"""Probability left out at each end of an interval."""


def figures_of(test: Examples, score: np.ndarray, wanted: float, threshold: float) -> dict[str, Any]:
    """Plain JSON about scores of unseen prompts.

    Args:
        score: `[rows]`, the verifier's.
        wanted: lambda of the label.
        threshold: tau.
    Returns:
        what `ranking` returns; `eta_tp`, `eta_fp` at q̄/p̄ > 1, as the paper defines them, and `eta_tp_ratio`, `eta_fp_ratio` at
        lambda; `brier`; `calibration_error` (mean distance of score and share over `reliability`'s ten bins, weighted by rows);
        curves; `kinds`, the ranking by prefix kind. A rate over no rows is None.
    """
    require_sklearn()
    from sklearn.metrics import brier_score_loss

    label, ratio = test.ratio <= wanted, test.ratio
    bins = reliability_bins(label, score)
    kinds = [] if test.kind is None else [kind for kind in np.unique(test.kind).tolist() if kind]
    return {
        **ranking(test, score, wanted),
        "eta_tp": rate(score[ratio <= 1] >= threshold), "eta_fp": rate(score[ratio > 1] >= threshold),
        "eta_tp_ratio": rate(score[label] >= threshold), "eta_fp_ratio": rate(score[~label] >= threshold),
        "brier": float(brier_score_loss(label, score)), "calibration_error": calibration_error(bins),
        "reliability": bins, "roc": roc_points(label, score), "baseline_roc": roc_points(label, test.confidence),
        "kinds": {kind: ranking(test.take(test.kind == kind), score[test.kind == kind], wanted) for kind in kinds}}


def ranking(test: Examples, score: np.ndarray, wanted: float) -> dict[str, Any]:
    """How well a score ranks acceptable tokens before others, beside C.

    Returns:
        `test_rows`, `test_prompts`, `prevalence` of label 1, `auc`, `baseline_auc` of the score C, `gain` (their difference), and
        `intervals`: name → the 95 % interval of each of the last four, by a bootstrap over prompts (None of a single prompt). Where
        there is one class only, there is no AUC, and what needs one is None.
    """
    label = test.ratio <= wanted
    names, prompt = np.unique(test.prompt, return_inverse=True)
    known: dict[str, Any] = {"test_rows": len(test), "test_prompts": len(names), "prevalence": float(label.mean())}
    if label.all() or not label.any():
        return {**known, "auc": None, "baseline_auc": None, "gain": None, "intervals": None}
    auc, baseline = auc_of(label, score), auc_of(label, test.confidence)
    return {**known, "auc": auc, "baseline_auc": baseline, "gain": auc - baseline,
            "intervals": intervals(label, score, test.confidence, prompt) if len(names) > 1 else None}


def intervals(label: np.ndarray, score: np.ndarray, confidence: np.ndarray, prompt: np.ndarray, *, weight: np.ndarray | None = None,
              resamples: int = RESAMPLES, seed: int = 0) -> dict[str, list[float]]:
    """95 % intervals of prevalence, both AUCs and their difference; resamples of the prompts that hold one class are left out.

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
    """Area under the ROC curve of rows that count `weight` times each, ties by half; as scikit-learn's, without sorting again.

    Args:
        rank: `[rows]` place of each score among the different scores, from 0.
    """
    good, bad = (np.bincount(rank, weight * side, minlength=int(rank.max()) + 1) for side in (label, ~label))
    return float((good * (bad.cumsum() - bad / 2)).sum() / (good.sum() * bad.sum()))


def rate(hits: np.ndarray) -> float | None:
    """Share of True; None of nothing."""
    return float(hits.mean()) if len(hits) else None


def auc_of(label: np.ndarray, score: np.ndarray, weight: np.ndarray | None = None) -> float:
    """Area under the ROC curve; both classes must be there."""
    require_sklearn()
    from sklearn.metrics import roc_auc_score

    return float(roc_auc_score(label, score, sample_weight=weight))


def roc_points(label: np.ndarray, score: np.ndarray) -> dict[str, list[float]]:
    """`fpr` and `tpr` of the ROC curve, at most `CURVE_POINTS` of each."""
    from sklearn.metrics import roc_curve

    fpr, tpr, _ = roc_curve(label, score)
    picked = np.unique(np.linspace(0, len(fpr) - 1, min(len(fpr), CURVE_POINTS)).round().astype(int))
    return {"fpr": fpr[picked].tolist(), "tpr": tpr[picked].tolist()}


def reliability_bins(label: np.ndarray, score: np.ndarray) -> list[dict[str, float]]:
    """Mean score, observed mean label and rows of each of ten equal bins of the score; empty bins are left out.

    Args:
        label: `[rows]`, bool, or a share in [0, 1].
    """
    index = np.minimum((score * 10).astype(int), 9)
    return [{"score": float(score[index == b].mean()), "observed": float(label[index == b].mean()), "count": int((index == b).sum())}
            for b in range(10) if (index == b).any()]


def calibration_error(bins: Sequence[Mapping[str, float]]) -> float:
    """Mean distance of score and observed share over bins, weighted by their rows."""
    return sum(b["count"] * abs(b["score"] - b["observed"]) for b in bins) / sum(b["count"] for b in bins)


def require_sklearn() -> None:
    """Say what is missing in words."""
    try:
        import sklearn.metrics  # noqa: F401
    except ImportError as error:
        raise DraftwellError("training a verifier needs the package scikit-learn: pip install 'draftwell[pipeline]'") from error


RANKING = ("prompts", "tokens", "prevalence", "AUC", "AUC of score = C", "gain")


def verifier_markdown(report: Mapping[str, Any]) -> str:
    """A report of `train_verifier`, and its `cost` where there is one, as Markdown."""
    grid = {f"λ = {name}" + (" (this verifier)" if float(name) == report["ratio"] else ""): figures
            for name, figures in report["lambda_grid"].items() if figures}
    parts = [f"# Verifier\n\n{summary(report)}\n",
             "## By λ\n\nThe same features and penalty, fitted to each label; test prompts, 95 % intervals over prompts.\n\n"
             + markdown(("label", *RANKING), [[name, *ranking_cells(figures)] for name, figures in grid.items()])]
    if report["kinds"]:
        parts.append("## By prefix kind\n\n" + markdown(
            ("prefix", *RANKING), [[name, *ranking_cells(figures)] for name, figures in report["kinds"].items()]))
    parts.append("## Features tried\n\n" + markdown(
        ("features", "AUC by cross-validation"), [[name, f"{auc:.3f}"] for name, auc in report["candidates"].items()]))
    if report["transfer"]:
        parts.append(transfer_markdown(report["transfer"]))
    return "\n".join(parts)


def summary(report: Mapping[str, Any]) -> str:
    """The chosen verifier in some sentences."""
    rates = f"η_FP {number(report['eta_fp'], '.3f')} and η_TP {number(report['eta_tp'], '.3f')} at τ = {report['threshold']:.3f}"
    words = (f"Reads {' + '.join(report['features'])}; λ = {report['ratio']:g}. Learnt from {len(report['prompts']['train'])} prompts "
             f"({report['rows']['train']} draft tokens), tested on {report['test_prompts']} others ({report['test_rows']}). AUC "
             f"{with_interval(report, 'auc')}, score = C {with_interval(report, 'baseline_auc')}, prevalence "
             f"{with_interval(report, 'prevalence')}. {rates}; Brier {report['brier']:.3f}, calibration error "
             f"{report['calibration_error']:.3f}.")
    cost = report.get("cost")
    return words if cost is None else words + (f" A score takes {cost['score_us']:.0f} µs, {100 * cost['share']:.1f} % of a draft forward "
                                               f"({cost['draft_us']:.0f} µs).")


def with_interval(figures: Mapping[str, Any], name: str, form: str = ".3f") -> str:
    """A figure with its interval, where there is one."""
    if figures[name] is None or figures["intervals"] is None:
        return number(figures[name], form)
    low, high = figures["intervals"][name]
    return f"{figures[name]:{form}} [{low:{form}}, {high:{form}}]"


def ranking_cells(figures: Mapping[str, Any]) -> list[str]:
    """The cells of `RANKING`."""
    return [str(figures["test_prompts"]), str(figures["test_rows"]),
            *(with_interval(figures, name) for name in ("prevalence", "auc", "baseline_auc")), with_interval(figures, "gain", "+.3f")]


def transfer_markdown(transfer: Mapping[str, Any]) -> str:
    """The table of `verifier_transfer.transfer_table`: a row for what a verifier learnt from, a column for what it is tested on."""
    tasks = transfer["tasks"]

    def cells(aucs: Mapping[str, float], own: str | None = None) -> list[str]:
        return [f"**{aucs[task]:.3f}**" if task == own else f"{aucs[task]:.3f}" for task in tasks]

    rows = [*([f"{task} ({row['prompts']})", *cells(row["auc"], task)] for task, row in transfer["trained"].items()),
            ["all of them", *cells(transfer["all"])], ["score = C", *cells(transfer["baseline"])]]
    left = "".join(f"; left out: {task}, {why}" for task, why in transfer["left_out"].items())
    own, other, baseline = (number(transfer["means"][name], ".3f") for name in ("own", "other", "baseline"))
    return ("## Transfer between tasks\n\nAUC on test prompts (prompts in brackets; a task's own in bold), as SPRINTER's Table 4 crosses "
            f"data sets, where it tells latency and win rates instead. Means: own task {own}, other tasks {other}, score = C {baseline}"
            f"{left}.\n\n" + markdown(("learnt from", *(f"{task} ({transfer['test_prompts'][task]})" for task in tasks)), rows))
