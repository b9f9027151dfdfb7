"""Figures by category of prompts, as SPEED-Bench reports them: the mean acceptance length of a
category's prompts, its speed, and the macro average, in which every category weighs the same.

Each category of its throughput splits (a tier of entropy) is one category for each input length.
Intervals are of Student's t over prompts: a category often has too few for a bootstrap.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import exp, log, nan

import numpy as np
from pydantic import BaseModel, ConfigDict, Field

from draftwell.components.report.intervals import TAIL, Timed, jackknife, student_reach

ALL = "macro average"
ENTROPY = frozenset({"low_entropy", "mixed", "high_entropy"})
"""Categories of the throughput splits."""
LENGTHS = {256: "256", 1 << 10: "1k", 1 << 11: "2k", 1 << 13: "8k", 1 << 14: "16k", 1 << 15: "32k"}
"""Tokens of the throughput splits, and of a shorter one of ours, with their names."""


class CategoryFigure(BaseModel):
    """Prompts of one category, decoded by one contender; ends of intervals are None where one
    prompt says nothing of the others."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    category: str
    prompts: int = Field(ge=1)
    speedup: float
    """Over plain decoding: the macro average is the geometric mean."""
    speedup_low: float | None
    speedup_high: float | None
    acceptance_length: float | None
    """Tokens a round that drafted, its own token of the target included: the mean over prompts of
    their means. None where nothing was drafted."""
    acceptance_low: float | None
    acceptance_high: float | None


@dataclass(frozen=True)
class Drafts:
    """Rounds in which the target verified a draft, and draft tokens that it kept, by prompt."""

    rounds: list[int]
    accepted: list[int]


def category_of(task: str | None, tokens: int) -> str:
    """The name of a prompt's category; of the throughput splits with the length that is nearest.

    >>> category_of("coding", 900), category_of("mixed", 1300), category_of(None, 5)
    ('coding', '1k mixed', 'other')
    """
    if task not in ENTROPY:
        return task or "other"
    nearest = min(LENGTHS, key=lambda length: abs(log(max(1, tokens) / length)))
    return f"{LENGTHS[nearest]} {task}"


def category_figures(
    categories: Sequence[str], plain: Timed, other: Timed, drafts: Drafts
) -> tuple[CategoryFigure, ...]:
    """A figure for each category in the order in which they first come, and the macro average;
    empty of a single category.

    Args:
        categories: one for each prompt, as everything else.
    """
    places: dict[str, list[int]] = {}
    for place, name in enumerate(categories):
        places.setdefault(name, []).append(place)
    if len(places) < 2:
        return ()
    speeds = {name: log_speedup(plain, other, at) for name, at in places.items()}
    lengths = {name: acceptance(drafts, at) for name, at in places.items()}
    rows = [figure(name, len(at), speeds[name], lengths[name]) for name, at in places.items()]
    return (*rows, figure(ALL, len(categories), macro(speeds), macro(lengths)))


@dataclass(frozen=True)
class Estimate:
    """A value, its variance (NaN where it is unknown), and the degrees of freedom of that."""

    value: float
    variance: float
    freedom: int

    def interval(self, tail: float = TAIL) -> tuple[float, float] | None:
        """Both ends, `tail` left out at each; None where the variance is unknown."""
        if self.freedom < 1 or not self.variance >= 0:
            return None
        reach = student_reach(self.variance, self.freedom, tail)
        return self.value - reach, self.value + reach


def log_speedup(plain: Timed, other: Timed, at: Sequence[int]) -> Estimate:
    """Logarithm of the ratio of both sides' speeds on some prompts."""
    columns = np.array([plain.seconds, plain.tokens, other.seconds, other.tokens], dtype=np.float64)
    value, variance = jackknife(
        lambda sums: np.log(sums[0] / sums[1] / (sums[2] / sums[3])), columns[:, at]
    )
    return Estimate(value, variance if len(at) > 1 else nan, len(at) - 1)


def acceptance(drafts: Drafts, at: Sequence[int]) -> Estimate | None:
    """Mean acceptance length of the prompts that drafted; None where none did."""
    drafted = [1 + drafts.accepted[i] / drafts.rounds[i] for i in at if drafts.rounds[i]]
    if not drafted:
        return None
    count = len(drafted)
    variance = float(np.var(drafted, ddof=1)) / count if count > 1 else nan
    return Estimate(float(np.mean(drafted)), variance, count - 1)


def macro(found: Mapping[str, Estimate | None]) -> Estimate | None:
    """The mean of the categories that have a value, of which each weighs the same."""
    known = [one for one in found.values() if one is not None]
    if not known:
        return None
    return Estimate(
        sum(one.value for one in known) / len(known),
        sum(one.variance for one in known) / len(known) ** 2,
        sum(one.freedom for one in known),
    )


def figure(
    name: str, prompts: int, speed: Estimate | None, length: Estimate | None
) -> CategoryFigure:
    """A row of both."""
    assert speed is not None
    low, high = speed.interval() or (None, None)
    shortest, longest = (length.interval() if length else None) or (None, None)
    return CategoryFigure(
        category=name,
        prompts=prompts,
        speedup=exp(speed.value),
        speedup_low=None if low is None else exp(low),
        speedup_high=None if high is None else exp(high),
        acceptance_length=None if length is None else length.value,
        acceptance_low=shortest,
        acceptance_high=longest,
    )
