"""Figures of emulated runs beside what formulas predict: tables, their page, and what the papers'
summary takes from them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from draftwell.components.emulation.cells import emulated_cells
from draftwell.components.emulation.prediction import predicted_speeds
from draftwell.components.emulation.result import EmulatedRun
from draftwell.components.papers.estimates import Estimate
from draftwell.components.papers.verdicts import trust
from draftwell.components.report.tables import markdown, span

TEMPLATE = Path(__file__).with_name("page.md")
GAINS = ("cell", "c", "devices", "α", "prompts", "tokens", "late", "comparison", "emulated")
SPEEDS = ("cell", "strategy", "emulated", "predicted", "reached", "target passes a text")
PLACED = {"own": "two", "shared": "one"}
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


def emulated_page(runs: Mapping[str, EmulatedRun]) -> str:
    """The page of all runs."""
    curves = {run.curve.name: run.curve.source for run in runs.values()}
    missing = [f"`{cell.name}`" for cell in emulated_cells() if cell.name not in runs]
    return TEMPLATE.read_text(encoding="utf-8").format(
        gains=gains_table(runs),
        speeds=speeds_table(runs),
        missing=", ".join(missing) or "none",
        sources="\n".join(f"- `{name}`: {source}." for name, source in curves.items()),
    )


def gains_table(runs: Mapping[str, EmulatedRun]) -> str:
    """Name → run as a table of their comparisons."""
    rows = [row for name, run in runs.items() for row in gain_rows(name, run)]
    return markdown((*GAINS, "predicted", "verdict"), rows)


def speeds_table(runs: Mapping[str, EmulatedRun]) -> str:
    """The same of every strategy's speed over plain decoding, by the curve."""
    return markdown(
        SPEEDS,
        [
            [
                f"`{name}`",
                one.label,
                f"{one.emulated * run.curve.target[1]:.3f}",
                f"{one.predicted * run.curve.target[1]:.3f}",
                f"{one.share:.0%}",
                f"{run.rows[one.label].target_calls / len(run.prompt_ids):.1f}",
            ]
            for name, run in runs.items()
            for one in beside_prediction(run)
            if one.over is None
        ],
    )


def gain_rows(name: str, run: EmulatedRun) -> list[list[str]]:
    """A line for each comparison of a run; one that says why it is void."""
    cost = "–" if run.curve.cost is None else f"{run.curve.cost:.3g}"
    late, again = (
        max(row.late for row in run.rows.values()),
        sum(row.again for row in run.rows.values()),
    )
    begin = [
        f"`{name}`",
        cost,
        PLACED[run.placement],
        f"{acceptance_of(run):.2f}",
        str(len(run.prompt_ids)),
        str(run.max_tokens),
        f"{late:.2%}" + (f", {again} texts again" if again else ""),
    ]
    if run.void is not None:
        return [[*begin, "–", "–", "–", f"void: {run.void}"]]
    return [
        [*begin, one.what, with_interval(one), f"{one.predicted:.3f}", verdict_on(one)]
        for one in beside_prediction(run)
        if one.over
    ]


def acceptance_of(run: EmulatedRun) -> float:
    """Of vanilla SD, or of the first strategy."""
    rows = sorted(run.rows.values(), key=lambda row: row.strategy != "vanilla_sd")
    return rows[0].acceptance or 0.0


def with_interval(one: Compared) -> str:
    """A gain and the ends of its interval.

    >>> with_interval(Compared("a", "b", 1.25, 1.1, 1.4, 1.2))
    '1.250 [1.100, 1.400]'
    """
    return f"{one.emulated:.3f} [{one.low:.3f}, {one.high:.3f}]"


def verdict_on(one: Compared) -> str:
    """Whether a gain is shown, and whether formulas say the same within a tenth.

    >>> verdict_on(Compared("a", "b", 1.25, 1.1, 1.4, 1.2))
    'faster; as predicted (+4 %)'
    """
    low, high = one.low or 0.0, one.high or 0.0
    shown = "faster" if low > 1 else "slower" if high < 1 else "no difference shown"
    close = "as predicted" if one.close else "not as predicted"
    return f"{shown}; {close} ({round(100 * (one.share - 1)):+d} %)"


def summary_cells(runs: Sequence[EmulatedRun]) -> dict[tuple[str, ...], list[str]]:
    """What the papers' summary shows: a strategy and the one that it is compared with → cells of a
    row, of the runs that count on devices of their own with a curve of the draft."""
    found = defaultdict[tuple[str, ...], list[tuple[EmulatedRun, Compared]]](list)
    for run in runs:
        for one in beside_prediction(run):
            if one.over and run.placement == "own" and run.curve.cost is not None:
                pair = run.rows[one.label].strategy, run.rows[one.over].strategy
                found[pair].append((run, one))
    return {pair: gain_cells(some) for pair, some in found.items()}


def gain_cells(some: Sequence[tuple[EmulatedRun, Compared]]) -> list[str]:
    """Gains of one strategy over another, the cheapest draft first."""
    some = sorted(some, key=lambda one: one[0].curve.cost or 0.0)
    runs, compared = [run for run, _ in some], [one for _, one in some]
    values = [Estimate(one.emulated, one.low or 0.0, one.high or 0.0) for one in compared]
    costs, prompts = [run.curve.cost or 0.0 for run in runs], [len(run.prompt_ids) for run in runs]
    each = (f"{value} at c {cost:.3g}" for value, cost in zip(values, costs, strict=True))
    return [
        f"emulated: {', '.join(each)}",
        span(prompts, "g"),
        f"α {span([acceptance_of(run) for run in runs])}, c {span(costs, '.3g')}, "
        f"devices of their own, at most {span([run.max_tokens for run in runs], 'g')} tokens; "
        f"formulas say {span([one.predicted for one in compared])}",
        "no paper's pair beside it; the whole interval is above 1 in "
        f"{sum(value.low > 1 for value in values)}, "
        f"below 1 in {sum(value.high < 1 for value in values)} of {len(values)}",
        trust(min(prompts)),
    ]
