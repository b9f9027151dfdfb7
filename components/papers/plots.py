"""Pictures of the page: each table's values, the paper's next to ours, and acceptance against cost
of all pairs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import cycle
from pathlib import Path

import numpy as np

from draftwell.components.papers.asides import Curve
from draftwell.components.papers.comparison import Result
from draftwell.components.papers.confidence import ABOVE, FIGURE_4, FIGURE_4_PAIR, Counts
from draftwell.components.papers.estimates import Estimate, Loss
from draftwell.components.papers.points import Point
from draftwell.components.papers.rejections import RejectedPair
from draftwell.components.papers.roc import Roc
from draftwell.components.papers.rounds import RoundCost
from draftwell.components.papers.tables import PaperTable
from draftwell.components.papers.verdicts import Verdict
from draftwell.components.report.drawing import FAINT, INK, SECOND, drawing
from draftwell.serving.artifacts.acceptance_table import MIDPOINTS


def draw_table(table: PaperTable, results: Sequence[Result], path: Path) -> Path | None:
    """Bars of the paper's values and ours with intervals, of rows with a verdict (of all where none
    has one); None where nothing was measured."""
    judged = [result for result in results if result.verdict != Verdict.NOT_COMPARABLE]
    known = speeds_of(judged) or speeds_of(results)
    if not known:
        return None
    with drawing(path, table.title, "", "times as fast") as axes:
        places = range(len(known))
        axes.bar(
            [i - 0.2 for i in places],
            [paper for _, paper, _ in known],
            width=0.38,
            color=FAINT,
            label="paper",
        )
        axes.bar(
            [i + 0.2 for i in places],
            [ours.value for _, _, ours in known],
            width=0.38,
            color=INK,
            label="here",
            capsize=3,
            ecolor=SECOND,
            yerr=[
                [max(0.0, ours.value - ours.low) for _, _, ours in known],
                [max(0.0, ours.high - ours.value) for _, _, ours in known],
            ],
        )
        axes.axhline(1.0, color=FAINT, linestyle="--")
        axes.set_xticks(places, [what for what, _, _ in known], rotation=30, ha="right", fontsize=7)
        axes.legend(frameon=False)
    return path


def speeds_of(results: Sequence[Result]) -> list[tuple[str, float, Estimate]]:
    """(row, the paper's value, ours) of the rows that have both."""
    return [
        (result.what, result.paper, result.ours)
        for result in results
        if result.ours is not None and result.paper is not None and "speed" in result.what
    ]


def draw_curves(table: PaperTable, found: Mapping[str, Curve], path: Path) -> Path | None:
    """Speed and target calls over SD's by τ, as SPIDE's Figures 6 and 7; None where no thresholds
    were tried."""
    if not found:
        return None
    with drawing(path, f"{table.title}, by τ", "τ", "over SD's fastest") as axes:
        for (role, curve), line in zip(found.items(), cycle(("-", "--", ":", "-.")), strict=False):
            axes.plot(
                curve.taus,
                curve.speeds,
                color=INK,
                linestyle=line,
                marker="o",
                label=f"{role}: decoding speed",
            )
            axes.plot(
                curve.taus,
                curve.calls,
                color=SECOND,
                linestyle=line,
                marker="s",
                label=f"{role}: target calls",
            )
        axes.axhline(1.0, color=FAINT, linestyle="--")
        axes.set(ylim=(0, None))
        axes.legend(frameon=False, fontsize=7)
    return path


def draw_roc(table: PaperTable, found: Mapping[str, Roc], path: Path) -> Path | None:
    """ROC curves of one verifier by what counts as acceptable (SPRINTER's Figure 3), or of one for
    each λ (Figures 12 and 13), the draft confidence's of the table's λ beside them; None without
    any."""
    if not found:
        return None
    with drawing(
        path, f"{table.title}: ROC of the verifier", "false positive rate", "true positive rate"
    ) as axes:
        axes.plot([0, 1], [0, 1], color=FAINT, linestyle="--", linewidth=0.8)
        for (ratio, roc), line in zip(found.items(), cycle(("-", "--", ":")), strict=False):
            axes.plot(
                roc.fpr,
                roc.tpr,
                color=INK,
                linestyle=line,
                label=f"verifier, λ {ratio} (AUC {roc.auc[0]:.2f})",
            )
            if ratio in table.aucs:
                axes.plot(
                    roc.confidence_fpr,
                    roc.confidence_tpr,
                    color=SECOND,
                    linestyle=line,
                    label=f"draft's confidence, λ {ratio} (AUC {roc.confidence_auc[0]:.2f})",
                )
        axes.set(xlim=(0, 1), ylim=(0, 1.02))
        axes.legend(frameon=False, fontsize=7, loc="lower right")
    return path


def draw_ratios(table: PaperTable, found: Sequence[RejectedPair], path: Path) -> Path | None:
    """Every rejected pair's probability ratios as powers of ten, as CSD's Figure 2(b); None without
    any."""
    if not found:
        return None
    with drawing(
        path, table.title, "draft's token, target's token", "p(draft's) / p(target's), power of ten"
    ) as axes:
        for i, one in enumerate(found):
            axes.scatter([i] * len(one.exponents), one.exponents, color=INK, s=9, alpha=0.5)
        # no formula of Matplotlib's
        labels = [f"{one.draft!r}, {one.target!r}".replace("$", r"\$") for one in found]
        axes.set_xticks(range(len(found)), labels, rotation=30, ha="right", fontsize=7)
    return path


def draw_rounds(table: PaperTable, found: Mapping[str, RoundCost], path: Path) -> Path | None:
    """A bar for each contender: the milliseconds of a round, by which model was computing (CSD's
    and DuoDecoding's Figures 4)."""
    if not found:
        return None
    parts = {
        "draft": INK,
        "qualifier": "#7f9db9",
        "target": SECOND,
        "overlap": "#8e6c8a",
        "rest": FAINT,
    }
    with drawing(path, f"{table.title}: a round", "milliseconds", "") as axes:
        left = np.zeros(len(found))
        for part, colour in parts.items():
            widths = np.array([cost.seconds.get(part, 0.0) * 1e3 for cost in found.values()])
            if widths.any():
                axes.barh(
                    list(found),
                    widths,
                    left=left,
                    color=colour,
                    label="both at once" if part == "overlap" else part,
                )
            left += widths
        axes.invert_yaxis()
        axes.legend(frameon=False, fontsize=7)
    return path


def draw_losses(table: PaperTable, found: Mapping[str, Loss], path: Path) -> Path | None:
    """What each lossy contender gains against what it loses; None without any."""
    if not found:
        return None
    with drawing(
        path,
        f"{table.title}: gain and loss",
        "decoding speed over SD",
        "first choices of the target, less plain's",
    ) as axes:
        for role, (gained, lost) in found.items():
            axes.errorbar(
                gained.value,
                lost.value,
                xerr=ends(gained),
                yerr=ends(lost),
                fmt="o",
                color=INK,
                ecolor=FAINT,
                capsize=2,
            )
            axes.annotate(
                role,
                (gained.value, lost.value),
                xytext=(5, 4),
                textcoords="offset points",
                fontsize=7,
            )
        axes.axhline(0.0, color=FAINT, linestyle="--")
        axes.axvline(1.0, color=FAINT, linestyle="--")
    return path


def ends(estimate: Estimate) -> list[list[float]]:
    """An interval as Matplotlib takes it: what lies below the value and above it."""
    return [[max(0.0, estimate.value - estimate.low)], [max(0.0, estimate.high - estimate.value)]]


def draw_confidence(texts: Mapping[str, Sequence[Counts]], path: Path) -> Path | None:
    """Share of the draft's first choices that the target keeps, by their confidence, as SPIDE's
    Figures 3 and 5; None without any.

    Args:
        texts: pair → counts of each of its texts.
    """
    if not texts:
        return None
    with drawing(
        path,
        "Acceptance by confidence, HumanEval",
        "the draft's confidence",
        "share that the target keeps",
    ) as axes:
        for i, (pair, counts) in enumerate(texts.items()):
            total = np.array(counts).sum(0)  # [bins, (places, kept)]
            seen = total[:, 0] > 0
            axes.plot(
                np.array(MIDPOINTS)[seen],
                total[seen, 1] / total[seen, 0],
                color=(INK, SECOND, FAINT)[i % 3],
                linestyle=("-", "--", ":")[i // 3 % 3],
                marker=("o", "s", "^", "D", "v")[i % 5],
                markersize=4,
                label=(
                    f"{pair} ({total[ABOVE:, 0].sum() / total[:, 0].sum():.0%} of positions "
                    "above .9)"
                ),
            )
        axes.scatter(
            [MIDPOINTS[b] for b in FIGURE_4],
            list(FIGURE_4.values()),
            color=INK,
            marker="x",
            zorder=3,
            label=f"{FIGURE_4_PAIR} (Figure 4)",
        )
        axes.plot(
            [0, 1], [0, 1], color=FAINT, linestyle="--", linewidth=0.8, label="share = confidence"
        )
        axes.set(xlim=(0, 1), ylim=(0, 1.02))
        axes.legend(frameon=False, fontsize=7)
    return path


def draw_points(ours: Sequence[Point], theirs: Sequence[Point], path: Path) -> Path | None:
    """Acceptance against cost of every pair that was measured, and of SPIDE's; None where nothing
    was measured."""
    if not ours:
        return None
    with drawing(
        path, "Acceptance against cost", "c: draft pass / target pass", "acceptance of SD"
    ) as axes:
        axes.scatter(
            [point.c for point in theirs],
            [point.acceptance for point in theirs],
            color=FAINT,
            marker="x",
            label="SPIDE's pairs (c from s, acceptance from MAT)",
        )
        for i, data in enumerate(dict.fromkeys(point.data for point in ours)):
            points, colour = [point for point in ours if point.data == data], (INK, SECOND)[i % 2]
            axes.scatter(
                [point.c for point in points],
                [point.acceptance for point in points],
                color=colour,
                label=data,
                marker=("o", "s", "^", "D")[i % 4],
            )
        for shown, colour in ((ours, INK), (theirs, FAINT)):
            for pair in dict.fromkeys(point.pair for point in shown):
                best = max(
                    (point for point in shown if point.pair == pair),
                    key=lambda point: point.acceptance,
                )
                axes.annotate(
                    pair,
                    (best.c, best.acceptance),
                    xytext=(4, 4),
                    textcoords="offset points",
                    fontsize=6,
                    color=colour,
                )
        axes.set(xlim=(0, None), ylim=(0, 1.05))
        axes.legend(frameon=False, fontsize=7, loc="lower right")
    return path
