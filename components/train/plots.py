"""Plots of the trained artifacts, as PNG files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from components.report.drawing import FAINT, INK, SECOND, drawing


def roc(curves: Mapping[str, tuple[Sequence[float], Sequence[float], float]], path: Path) -> Path:
    """ROC curves: name → (false positive rates, true positive rates, AUC)."""
    with drawing(path, "Verifier: ROC on untouched prompts", "false positive rate", "true positive rate") as axes:
        axes.plot([0, 1], [0, 1], color=FAINT, linestyle="--")
        for (name, (fpr, tpr, auc)), colour in zip(curves.items(), (INK, SECOND, "#548235", "#7030a0"), strict=False):
            axes.plot(fpr, tpr, color=colour, label=f"{name} (AUC {auc:.3f})")
        axes.legend(frameon=False, loc="lower right")
    return path


def reliability(bins: Sequence[Mapping[str, float]], path: Path, title: str = "Verifier: reliability on untouched prompts",
                observed: str = "share of acceptable tokens") -> Path:
    """Reliability diagram: in each bin the mean score against the observed share."""
    with drawing(path, title, "score", observed) as axes:
        axes.plot([0, 1], [0, 1], color=FAINT, linestyle="--")
        largest = max((b["count"] for b in bins), default=1)
        axes.scatter([b["score"] for b in bins], [b["observed"] for b in bins], color=INK,
                     s=[20 + 180 * b["count"] / largest for b in bins])
        axes.set(xlim=(0, 1.02), ylim=(0, 1.02))
    return path


def verifier_plots(report: Mapping[str, Any], folder: Path) -> list[Path]:
    """ROC and reliability of a report of `train_verifier`, as files in a folder."""
    curves = {"verifier": (report["roc"]["fpr"], report["roc"]["tpr"], report["auc"]),
              "score = C": (report["baseline_roc"]["fpr"], report["baseline_roc"]["tpr"], report["baseline_auc"])}
    by_lambda = {f"λ = {name}": (figures["roc"]["fpr"], figures["roc"]["tpr"], figures["auc"])
                 for name, figures in report.get("lambda_grid", {}).items() if figures}
    pictures = [roc(curves, folder / "roc.png"), reliability(report["reliability"], folder / "reliability.png")]
    return [*pictures, roc(by_lambda, folder / "roc_by_lambda.png")] if by_lambda else pictures


def acceptance_head_plot(report: Mapping[str, Any], path: Path) -> Path:
    """Reliability of a report of `train_acceptance_head`. Rejections weigh six times in its loss, so predictions lie below the diagonal."""
    return reliability(report["reliability"], path, "Acceptance head: reliability on untouched prompts", "mean of min(1, p̄/q̄)")
