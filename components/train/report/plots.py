"""Plots of the trained artifacts, as PNG files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from draftwell.components.report.charts import scatter_on_diagonal
from draftwell.components.report.drawing import FAINT, INK, SECOND, drawing
from draftwell.components.train.reports import HeadReport, ReliabilityBin, RocCurve, VerifierReport


def roc(curves: Mapping[str, tuple[RocCurve, float | None]], path: Path) -> Path:
    """ROC curves: name → (curve, AUC)."""
    with drawing(
        path, "Verifier: ROC on untouched prompts", "false positive rate", "true positive rate"
    ) as axes:
        axes.plot([0, 1], [0, 1], color=FAINT, linestyle="--")
        for (name, (curve, auc)), colour in zip(
            curves.items(), (INK, SECOND, "#548235", "#7030a0"), strict=False
        ):
            axes.plot(curve.fpr, curve.tpr, color=colour, label=f"{name} (AUC {auc:.3f})")
        axes.legend(frameon=False, loc="lower right")
    return path


def reliability(
    bins: Sequence[ReliabilityBin],
    path: Path,
    title: str = "Verifier: reliability on untouched prompts",
    observed: str = "share of acceptable tokens",
) -> Path:
    """Reliability diagram: in each bin the mean score against the observed share."""
    with drawing(path, title, "score", observed) as axes:
        scatter_on_diagonal(axes, [(b.score, b.observed, b.count) for b in bins])
    return path


def verifier_plots(report: VerifierReport, folder: Path) -> list[Path]:
    """ROC, ROC by lambda and reliability of a report of `train_verifier`, as files in a folder."""
    found = report.metrics
    curves = {
        "verifier": (found.roc, found.auc),
        "score = C": (found.baseline_roc, found.baseline_auc),
    }
    by_lambda = {
        f"λ = {name}": (grid.roc, grid.auc) for name, grid in report.lambda_grid.items() if grid
    }
    pictures = [
        roc(curves, folder / "roc.png"),
        reliability(found.reliability, folder / "reliability.png"),
    ]
    return [*pictures, roc(by_lambda, folder / "roc_by_lambda.png")] if by_lambda else pictures


def acceptance_head_plot(report: HeadReport, path: Path) -> Path:
    """Reliability of a report of `train_acceptance_head`: its loss weights rejections, so
    predictions are below the diagonal."""
    return reliability(
        report.metrics.reliability,
        path,
        "Acceptance head: reliability on untouched prompts",
        "mean of min(1, p̄/q̄)",
    )
