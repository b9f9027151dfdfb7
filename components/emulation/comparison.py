"""Figures of an emulated run beside what formulas predict."""

from __future__ import annotations

from typing import NamedTuple

from draftwell.components.emulation.prediction import predicted_speeds
from draftwell.components.emulation.result import EmulatedRun
from draftwell.components.report.tables import markdown

CLOSE = 0.10
"""Share of a prediction by which what is emulated may differ from it and still agree."""


class Compared(NamedTuple):
    """An emulated figure beside the predicted one: a strategy's speed, or its gain over another's,
    with an interval."""

    label: str
    over: str | None
    emulated: float
    low: float | None
    high: float | None
    predicted: float

    @property
    def what(self) -> str:
        """The figure in words."""
        return self.label if self.over is None else f"{self.label} over {self.over}"

    @property
    def share(self) -> float:
        """What was reached of the prediction."""
        return self.emulated / self.predicted

    @property
    def close(self) -> bool:
        """Whether both agree within `CLOSE`."""
        return abs(self.share - 1) <= CLOSE


def beside_prediction(run: EmulatedRun) -> list[Compared]:
    """Every speed and every ratio of a run that has a prediction; empty of a void one."""
    expected = predicted_speeds(run)
    speeds = [
        Compared(label, None, row.speed, None, None, expected[label])
        for label, row in run.rows.items()
        if row.speed is not None and label in expected
    ]
    return speeds + [
        Compared(
            *(one.contender, one.over, one.ratio, one.low, one.high),
            expected[one.contender] / expected[one.over],
        )
        for one in run.ratios
        if one.contender in expected and one.over in expected
    ]


def table_of(run: EmulatedRun) -> str:
    """A run as Markdown: how it was emulated, and its figures beside the predicted ones."""
    cost = "computing without waiting" if run.curve.cost is None else f"c {run.curve.cost:.3g}"
    where = {"own": "devices of their own", "shared": "one device in turn"}[run.placement]
    said = (
        f"Emulated: {run.pair}, curve {run.curve.name} ({run.curve.source}), draft {cost}, on "
        f"{where}; "
        f"{len(run.prompt_ids)} prompts ({run.prompts}), at most {run.max_tokens} tokens; stretch "
        f"{run.stretch:.3g}, {run.late:.2%} of {run.passes} passes late; {run.identical} texts "
        "identical.\n\n"
    )
    if run.void is not None:
        return f"{said}Void: {run.void}\n"
    rows = [
        [
            one.what,
            f"{one.emulated:.3f}",
            "–" if one.low is None else f"{one.low:.3f} to {one.high:.3f}",
            f"{one.predicted:.3f}",
            f"{one.share:.0%}",
        ]
        for one in beside_prediction(run)
    ]
    return said + markdown(("figure", "emulated", "interval", "predicted", "share"), rows)
