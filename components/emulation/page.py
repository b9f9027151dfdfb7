"""The page of the emulated cells, and what the papers' summary takes from them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from draftwell.components.emulation.comparison import Compared, beside_prediction
from draftwell.components.emulation.result import EmulatedRun
from draftwell.components.papers.emulated import EmulatedGain
from draftwell.components.papers.estimates import Estimate
from draftwell.components.report.tables import markdown

TEMPLATE = Path(__file__).with_name("page.md")
GAINS = ("cell", "c", "devices", "α", "prompts", "tokens", "late", "comparison", "emulated")
SPEEDS = ("cell", "strategy", "emulated", "predicted", "reached", "target passes a text")
PLACED = {"own": "two", "shared": "one"}


def emulated_page(runs: Mapping[str, EmulatedRun]) -> str:
    """The page, with every comparison and every speed of the runs."""
    gains, speeds = [], []
    for name, run in runs.items():
        gains += gain_rows(name, run)
        speeds += speed_rows(name, run)
    text = TEMPLATE.read_text(encoding="utf-8")
    return text.format(
        gains=markdown((*GAINS, "predicted", "verdict"), gains),
        speeds=markdown(SPEEDS, speeds),
        sources="\n".join(f"- `{name}`: {words}." for name, words in sources(runs).items()),
    )


def sources(runs: Mapping[str, EmulatedRun]) -> dict[str, str]:
    """Curve → whose it is."""
    return {run.curve.name: run.curve.source for run in runs.values()}


def gain_rows(name: str, run: EmulatedRun) -> list[list[str]]:
    """A line for each comparison of a run; one that says why it is void."""
    cost = "–" if run.curve.cost is None else f"{run.curve.cost:.3g}"
    begin = [
        f"`{name}`",
        cost,
        PLACED[run.placement],
        f"{acceptance_of(run):.2f}",
        *(str(len(run.prompt_ids)), str(run.max_tokens), f"{worst_late(run):.2%}"),
    ]
    if run.void is not None:
        return [[*begin, "–", "–", "–", f"void: {run.void}"]]
    return [
        [*begin, one.what, with_interval(one), f"{one.predicted:.3f}", verdict_on(one)]
        for one in beside_prediction(run)
        if one.over
    ]


def speed_rows(name: str, run: EmulatedRun) -> list[list[str]]:
    """A line for each strategy of a run, over plain decoding by the curve."""
    plain = run.curve.target[1]
    return [
        [
            f"`{name}`",
            one.label,
            f"{one.emulated * plain:.3f}",
            f"{one.predicted * plain:.3f}",
            f"{one.share:.0%}",
            f"{run.rows[one.label].target_calls / len(run.prompt_ids):.1f}",
        ]
        for one in beside_prediction(run)
        if one.over is None
    ]


def acceptance_of(run: EmulatedRun) -> float:
    """Of vanilla SD, or of the first strategy."""
    rows = sorted(run.rows.values(), key=lambda row: row.strategy != "vanilla_sd")
    return rows[0].acceptance or 0.0


def worst_late(run: EmulatedRun) -> float:
    """Of the strategy with most late passes."""
    return max(row.late for row in run.rows.values())


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
    return f"{shown}; {close} ({100 * (one.share - 1):+.0f} %)"


def gains(runs: Sequence[EmulatedRun]) -> list[EmulatedGain]:
    """What the papers' summary shows: comparisons on devices of their own, with a curve of the
    draft, of runs that count."""
    return [
        EmulatedGain(
            strategy=run.rows[one.label].strategy,
            over=run.rows[one.over].strategy,
            cost=run.curve.cost,
            acceptance=acceptance_of(run),
            ours=Estimate(one.emulated, one.low or 0.0, one.high or 0.0),
            predicted=one.predicted,
            prompts=len(run.prompt_ids),
            max_tokens=run.max_tokens,
        )
        for run in runs
        if run.placement == "own" and run.curve.cost is not None
        for one in beside_prediction(run)
        if one.over
    ]
