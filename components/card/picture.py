"""A card as a picture, for MLflow and a README, and the speeds by kind of prompt as one of their
own; drawn as all other plots are."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from draftwell.components.card.card import Card, Speed
from draftwell.components.card.words import INTERVAL, evidence, facts, headline, title
from draftwell.components.report.charts import ratio_bars
from draftwell.components.report.drawing import FAINT, INK, SECOND, canvas, drawing, png_of

MUTED = "#5b6875"
AXIS = "times as fast as plain decoding"
FACTS = ("settings", "exact", "memory", "machine", "models", "next")
"""That the picture has; the page has them all."""
MOST_BARS = 8
"""Of a chart."""
LETTERS = 100
"""Of a line at the foot, which is as wide as the picture."""


def card_png(card: Card) -> bytes:
    """A card as a PNG file: how much faster, by kind of prompt and by number of requests, and what
    it holds for."""
    charts = [
        (heading, rows[:MOST_BARS])
        for heading, rows in (
            ("by kind of prompt", card.by_kind),
            ("by requests at once", card.by_requests),
            ("tried, on other prompts", [one.speed for one in card.tried]),
        )
        if rows
    ]
    bars = max((len(rows) for _, rows in charts), default=0)
    foot = "\n".join(
        textwrap.shorten(f"{name}: {value}", LETTERS, placeholder=" …")
        for name, value in {**facts(card), "next": card.next_command}.items()
        if name in FACTS
    )
    heights = [1.3, 0.7 + 0.3 * bars if charts else 0.1, 0.25 + 0.18 * (foot.count("\n") + 1)]
    figure = canvas(9, sum(heights))
    head, middle, end = figure.subfigures(3, 1, height_ratios=heights)
    write_head(head, card)
    for axes, (heading, rows) in zip(columns(middle, len(charts)), charts, strict=True):
        axes.set_title(heading, loc="left", fontsize="medium")
        axes.set_xlabel(AXIS, fontsize="small")
        draw(axes, rows, FAINT if heading.startswith("tried") else INK)
    end.text(0.02, 0.9, foot, va="top", fontsize="small", color=MUTED)
    return png_of(figure)


def columns(figure: Any, count: int) -> Sequence[Any]:
    """So many axes in a row."""
    return list(figure.subplots(1, count, squeeze=False)[0]) if count else []


def write_head(figure: Any, card: Card) -> None:
    """The pair, and the answer in large letters."""
    figure.text(0.02, 0.86, title(card), va="top", fontsize="large", color=MUTED)
    if card.speed is None:
        figure.text(0.02, 0.45, headline(card), va="center", fontsize="x-large", weight="bold")
        return
    colour = INK if card.sure else SECOND
    figure.text(
        0.02,
        0.36,
        f"{card.speed.ratio:.2f} ×",
        va="center",
        fontsize=34,
        weight="bold",
        color=colour,
    )
    found = f"the speed of plain decoding {evidence(card.speed)}"
    if not card.sure:
        found = f"{found}: not yet sure" + (f"; {card.needs}" if card.needs else "")
    lines = [*textwrap.wrap(found, 70, max_lines=2, placeholder=" …"), INTERVAL]
    figure.text(0.23, 0.36, "\n".join(lines), va="center", fontsize="medium")


def draw(axes: Any, rows: Sequence[Speed], colour: str = INK) -> None:
    """Bars of speeds."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(labelsize="small")
    ratio_bars(axes, [(row.name, row.ratio, row.low, row.high) for row in rows], colour)


def speed_by_kind(card: Card, path: Path) -> Path | None:
    """Speeds by kind of prompt as a plot; None where the card has none."""
    if not card.by_kind:
        return None
    height = 1.2 + 0.35 * len(card.by_kind)
    with drawing(path, f"Speed by kind of prompt, {title(card)}", AXIS, "", height) as axes:
        draw(axes, card.by_kind)
    return path
