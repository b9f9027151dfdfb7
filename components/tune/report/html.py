"""A tuning as one HTML file: the choice and why, figures, plots and limits, with nothing to fetch
and nothing that runs.

Pictures are inside the file as data URIs, the style is in its head, it follows the reader's light
or dark setting, and all text is escaped: names of prompts and of machines come from outside.
"""

from __future__ import annotations

import base64
from collections.abc import Iterable
from pathlib import Path

from draftwell.components.report.drawing import drawn_of
from draftwell.components.report.html import render_page
from draftwell.components.tune.evidence import TuningEvidence
from draftwell.components.tune.report.plots import tuning_plots
from draftwell.components.tune.report.tables import choice_figures, facts, tuning_tables
from draftwell.serving.files import write_atomically

TEMPLATES = Path(__file__).parent / "templates"
CAPTIONS = {
    "tuning_pareto": (
        "Pareto front: open marks are replayed, filled ones measured, larger ones need more "
        "target calls"
    ),
    "tuning_speed_over_tau": (
        "Speed over the threshold; bars: interval of the speedup, 5 % and 95 %"
    ),
    "tuning_speed_over_gamma": (
        "Speed over the draft length; bars: interval of the speedup, 5 % and 95 %"
    ),
    "acceptance_by_confidence": (
        "How often the target keeps a draft token, by the draft's confidence (SPIDE, Figure 3)"
    ),
    "rejections": "How often each rejection was seen, by rank (CSD, Figure 2)",
    "roc": "The verifier on untouched prompts: ROC",
    "reliability": "The verifier on untouched prompts: reliability",
}
"""Stem of a picture's file → its caption, in the report's order."""


def write_tuning_report(
    evidence: TuningEvidence, folder: Path, *, pair: str | None = None, plots: Path | None = None
) -> Path:
    """Draw the plots of a tuning into a folder and write `tuning.html` there; returns the file.

    Args:
        folder: of the reports.
        pair: its name, for the heading.
        plots: folder (default: the same) whose plots of the very verifier, table and memory that
            were tuned with are shown too.
    """
    others_in = plots or folder
    drawn = tuning_plots(evidence, folder)
    used = set(evidence.artifacts.values())
    others = [
        path
        for stem in CAPTIONS
        if not stem.startswith("tuning_") and drawn_of(path := others_in / f"{stem}.png") in used
    ]
    text = tuning_html(evidence, [*drawn, *others], pair=pair)
    write_atomically(folder / "tuning.html", text.encode())
    return folder / "tuning.html"


def tuning_html(
    evidence: TuningEvidence, pictures: Iterable[Path], *, pair: str | None = None
) -> str:
    """The report as one self-contained HTML text.

    Args:
        pictures: PNG files; their captions go by their names.
    """
    images = {
        CAPTIONS.get(path.stem, path.stem): base64.b64encode(path.read_bytes()).decode()
        for path in pictures
    }
    return render_page(
        TEMPLATES / "tuning.html.j2",
        title=f"Tuning of {pair}" if pair else "Tuning",
        evidence=evidence,
        figures=choice_figures(evidence),
        facts=facts(evidence),
        pictures=images,
        tables=tuning_tables(evidence),
    )
