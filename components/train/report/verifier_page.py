"""A verifier's report as a Markdown page."""

from __future__ import annotations

from collections.abc import Mapping

from draftwell.components.report.tables import markdown, number
from draftwell.components.train.reports import Ranking, VerifierReport

RANKING = ("prompts", "tokens", "prevalence", "AUC", "AUC of score = C", "gain")


def verifier_markdown(report: VerifierReport) -> str:
    """A report of `train_verifier` as Markdown."""
    grid = {
        f"λ = {name}"
        + (
            " (this verifier)" if report.label == "ratio" and float(name) == report.ratio else ""
        ): found
        for name, found in report.lambda_grid.items()
        if found
    }
    parts = [
        f"# Verifier\n\n{summary(report)}\n",
        (
            "## By λ\n\nThe same features and penalty, fitted to each label; test prompts, 95 "
            "% intervals over prompts.\n\n"
        )
        + ranking_table("label", grid),
    ]
    if report.metrics.kinds:
        parts.append("## By prefix kind\n\n" + ranking_table("prefix", report.metrics.kinds))
    parts.append(
        "## Features tried\n\n"
        + markdown(
            ("features", "AUC by cross-validation"),
            [[name, f"{auc:.3f}"] for name, auc in report.candidates.items()],
        )
    )
    return "\n".join(parts)


def summary(report: VerifierReport) -> str:
    """The chosen verifier in a few sentences."""
    found = report.metrics
    label = f"λ = {report.ratio:g}" if report.label == "ratio" else f"label {report.label}"
    heat = "" if report.temperature is None else f", traces at temperature {report.temperature:g}"
    return (
        f"Reads {' + '.join(report.features)}; {label}{heat}. Trained on "
        f"{len(report.prompts['train'])} prompts "
        f"({report.rows['train']} draft tokens), tested on {found.test_prompts} others "
        f"({found.test_rows}). AUC "
        f"{with_interval(found, 'auc')}, score = C {with_interval(found, 'baseline_auc')}, "
        "prevalence "
        f"{with_interval(found, 'prevalence')}. η_FP {number(found.eta_fp, '.3f')} and "
        f"η_TP {number(found.eta_tp, '.3f')} at τ = "
        f"{report.threshold:.3f}; Brier {found.brier:.3f}, calibration error "
        f"{found.calibration_error:.3f}."
    )


def ranking_table(first: str, rankings: Mapping[str, Ranking]) -> str:
    """A row for each ranking."""
    return markdown(
        (first, *RANKING),
        [
            [
                name,
                str(found.test_prompts),
                str(found.test_rows),
                *(with_interval(found, column) for column in ("prevalence", "auc", "baseline_auc")),
                with_interval(found, "gain", "+.3f"),
            ]
            for name, found in rankings.items()
        ],
    )


def with_interval(found: Ranking, name: str, form: str = ".3f") -> str:
    """A metric with its interval, where there is one."""
    value = getattr(found, name)
    if value is None or found.intervals is None:
        return number(value, form)
    low, high = found.intervals[name]
    return f"{value:{form}} [{low:{form}}, {high:{form}}]"
