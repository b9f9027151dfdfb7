"""Drift over time: what each check found, kept beside the newest report, and a plot of it."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from itertools import pairwise
from pathlib import Path
from typing import Literal

from pydantic import ValidationError

from draftwell.components.drift.report import NAMES
from draftwell.components.drift.schema import DriftReport, Record
from draftwell.components.report.charts import COLOURS, legend_beside
from draftwell.components.report.drawing import FAINT, SECOND, drawing
from draftwell.serving.files import write_text

MOST_LOOKS = 500
"""That are kept, the newest."""


class Look(Record):
    """One check of the traffic."""

    at: datetime
    digest: str
    """Of its report."""
    baseline: str
    verdict: Literal["steady", "drift", "not enough yet"]
    shares: dict[str, float]
    """Check → its figure as a share of its limit: drift needs 1, and more than chance."""


class History(Record):
    """The contents of `drift_history.json`, the newest last."""

    format: Literal[1] = 1
    looks: tuple[Look, ...] = ()


def read_history(file: Path) -> History:
    """What was found before; nothing where there is no file, or one that is not ours."""
    try:
        return History.model_validate_json(file.read_bytes())
    except (FileNotFoundError, ValidationError):
        return History()


def remember(report: DriftReport, file: Path, at: datetime) -> History:
    """Add a report to the history in a file, unless the newest there is of the same figures;
    returns all of it."""
    known = read_history(file)
    if known.looks and known.looks[-1].digest == report.digest:
        return known
    shares = {one.name: one.value / one.limit for one in report.checks if one.limit > 0}
    look = Look(
        at=at,
        digest=report.digest,
        baseline=report.baseline,
        verdict=report.verdict,
        shares=shares,
    )
    history = History(looks=(*known.looks, look)[-MOST_LOOKS:])
    write_text(file, history.model_dump_json(indent=1) + "\n")
    return history


def drift_over_time(looks: Sequence[Look], pair: str, path: Path) -> Path | None:
    """Each check's figure as a share of its limit, over time; drift is ringed, and a line is where
    another release was calibrated. None where there are no two checks with figures."""
    told = [look for look in looks if look.shares]
    if len(told) < 2:
        return None
    from matplotlib.dates import AutoDateLocator, ConciseDateFormatter

    with drawing(path, f"Drift over time, {pair}", "", "figure / its limit") as axes:
        names = list(dict.fromkeys(name for look in told for name in look.shares))
        for name, colour in zip(names, COLOURS, strict=False):
            own = [(look.at, look.shares[name]) for look in told if name in look.shares]
            moments, shares = zip(*own, strict=True)
            axes.plot(moments, shares, marker=".", color=colour, label=NAMES.get(name, name))
        axes.axhline(1.0, color=FAINT, linestyle="--", label="limit")
        drifted = [(look.at, max(look.shares.values())) for look in told if look.verdict == "drift"]
        if drifted:
            style = {"facecolors": "none", "edgecolors": SECOND, "linewidths": 1.8}
            axes.scatter(*zip(*drifted, strict=True), s=120, label="drift", zorder=5, **style)
        for before, after in pairwise(told):
            if before.baseline != after.baseline:
                axes.axvline(after.at, color=FAINT, linestyle=":")
        locator = AutoDateLocator(minticks=3, maxticks=8)
        axes.xaxis.set_major_locator(locator)
        axes.xaxis.set_major_formatter(ConciseDateFormatter(locator))
        axes.set_ylim(bottom=0)
        legend_beside(axes)
    return path
