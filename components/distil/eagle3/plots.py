"""Plot of a head's training, as a PNG file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from draftwell.components.report.drawing import INK, SECOND, drawing


def training_plot(report: Mapping[str, Any], path: Path) -> Path:
    """How many tokens of a draft are kept on held-out texts, during training and at its end.

    Args:
        report: what `train_head` returns.
    """
    curve: Sequence[tuple[int, float]] = report["curves"]["sample_accepted_length"]
    title, kept = (
        "EAGLE-3 head: accepted tokens of a draft, held-out texts",
        "tokens of a draft that are kept",
    )
    with drawing(path, title, "optimizer steps", kept) as axes:
        axes.plot(
            [step for step, _ in curve], [length for _, length in curve], color=INK, marker="."
        )
        axes.axhline(
            report["accepted_length"],
            color=SECOND,
            linestyle="--",
            label="at the end; by depth "
            + ", ".join(f"{share:.2f}" for share in report["acceptance"]),
        )
        axes.legend(frameon=False, loc="lower right")
        axes.set(ylim=(0, None))
    return path
