"""What the watchdog's own requests tell: did fixed prompts fall too, do long ones fare worse, and
is plain decoding faster?"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from draftwell.components.report.intervals import TAIL, jackknife, student_reach
from draftwell.components.watch.schema import Evidence, Probe

PAIR_SECONDS = 300
"""A speculative and a plain answer to one prompt, this close to each other, are a pair."""
PAIR_LOADS = 2.0
"""How many times more requests one of them may be decoded with."""
RECENT_PROBES = 3
"""Of each prompt: their mean says how it is now."""
BLOCKS = 10
"""Of successive measurements, of which a jackknife leaves one out."""


class Change(NamedTuple):
    """Mean change of a logarithm over several prompts, with its 95 % interval."""

    mean: float
    low: float
    high: float
    prompts: int


def change_since(
    probes: Sequence[Probe], since: float, figure: Callable[[Probe], float | None]
) -> Change | None:
    """How far fixed prompts moved: of each the mean of its newest probes after `since` less that of
    those before, as a logarithm; None without two prompts that were probed on both sides."""
    moved = []
    for name in sorted({probe.name for probe in probes}):
        before = logs(probes, name, figure, lambda probe: probe.at < since)
        after = logs(probes, name, figure, lambda probe: probe.at >= since)
        if len(before) >= 2 and after:
            moved.append(float(np.mean(after[-RECENT_PROBES:]) - np.mean(before)))
    return of_prompts(moved)


def longer_prompts(probes: Sequence[Probe], short: float, long: float) -> Change | None:
    """log(tokens of a round of prompts of about `long` tokens / of about `short` tokens) within a
    kind of prompt, interpolated between the lengths that were probed."""
    gaps = []
    for kind in sorted({probe.kind for probe in probes}):
        of_kind = [p for p in probes if p.kind == kind and tokens_of_round(p) is not None]
        by_length: dict[int, list[float]] = {}
        for probe in of_kind:
            by_length.setdefault(probe.prompt_tokens, []).append(
                math.log(tokens_of_round(probe) or 1)
            )
        lengths = sorted(by_length)
        if len(lengths) < 2:
            continue
        means = [float(np.mean(by_length[length][-RECENT_PROBES:])) for length in lengths]
        at = np.interp(np.log2([short, long]), np.log2(lengths), means)
        gaps.append(at[1] - at[0])
    return of_prompts(gaps)


def logs(
    probes: Sequence[Probe],
    name: str,
    figure: Callable[[Probe], float | None],
    where: Callable[[Probe], bool],
) -> list[float]:
    """Logarithms of a figure of one prompt, in the order of time."""
    of_name = sorted((p for p in probes if p.name == name and where(p)), key=lambda p: p.at)
    values = [figure(probe) for probe in of_name]
    return [math.log(value) for value in values if value]


def of_prompts(changes: Sequence[float]) -> Change | None:
    """Mean and interval over prompts, by Student's t; a prompt's own noise is taken for at least
    2 %."""
    if len(changes) < 2:
        return None
    mean = float(np.mean(changes))
    variance = max(float(np.var(changes, ddof=1)), 0.02**2) / len(changes)
    half = student_reach(variance, max(len(changes) - 1, 3), TAIL / 2)
    return Change(mean, mean - half, mean + half, len(changes))


def tokens_of_round(probe: Probe) -> float | None:
    """Tokens that a round of a speculative probe brings; 1 where nothing was drafted, None where
    the rounds were not counted."""
    found = probe.acceptance
    if probe.plain or found is None or (found.drafted and not found.rounds):
        return None
    return found.length or 1.0


def plain_seconds(probe: Probe) -> float | None:
    """Seconds of a token of a probe without speculation."""
    return probe.seconds_per_token if probe.plain and probe.answered else None


class Versus(NamedTuple):
    """Speculation and plain decoding at one load."""

    at: float
    load: float
    seconds: float
    """Of an output token, with speculation."""
    plain: float
    """Without."""

    @property
    def slower(self) -> float:
        """log(seconds / plain): above 0, speculation costs time."""
        return math.log(self.seconds / self.plain)


def pairs(probes: Sequence[Probe]) -> list[Versus]:
    """Probes of one prompt with and without speculation, close in time and load, at the mean of
    their loads."""
    found = []
    plain = [probe for probe in probes if probe.plain and probe.at_once is not None]
    for probe in probes:
        if probe.plain or probe.at_once is None:
            continue
        near = [p for p in plain if p.name == probe.name and abs(p.at - probe.at) <= PAIR_SECONDS]
        if near:
            other = min(near, key=lambda p: abs(p.at - probe.at))
            low, high = sorted((probe.at_once, other.at_once or 0.0))
            if high > PAIR_LOADS * low:
                continue
            seconds = (probe.seconds_per_token, other.seconds_per_token)
            found.append(Versus(probe.at, (low + high) / 2, *seconds))
    return sorted(found)


@dataclass(frozen=True)
class Crossing:
    """Requests at once above which plain decoding is faster."""

    load: float
    low: float
    """95 % interval."""
    high: float

    @property
    def evidence(self) -> Evidence:
        """As a line of an alarm."""
        return Evidence(
            name="crossover",
            value=self.load,
            baseline=None,
            limit=None,
            interval=(self.low, self.high),
            words=(
                f"plain decoding is faster above {self.load:.3g} requests at once "
                f"(95 %: {self.low:.3g} to {self.high:.3g})"
            ),
        )


def crossing(measured: Sequence[Versus]) -> Crossing | None:
    """Where seconds with and without speculation are equal.

    A step's seconds grow linearly with the requests at once, so their difference does too:
    seconds − plain = A + B · load, fitted relative to `plain`; it is 0 at −A / B. The interval is
    a jackknife over blocks of successive measurements, on the logarithm.

    Returns:
        None where fewer than ten measurements or one load is there, or the difference does not
        grow with load.
    """
    if len(measured) < BLOCKS:
        return None
    load, seconds, plain = np.array([(v.load, v.seconds, v.plain) for v in measured]).T
    one, slope, gap = 1 / plain, load / plain, (seconds - plain) / plain
    products = np.stack([one * one, one * slope, slope * slope, gap * one, gap * slope])
    blocks = [part.sum(1) for part in np.array_split(products, BLOCKS, axis=1)]
    log_load, variance = jackknife(log_zero, np.stack(blocks, 1))
    if not math.isfinite(log_load):
        return None
    if not math.isfinite(variance):  # without one of the blocks it does not grow with load
        return Crossing(math.exp(log_load), 1.0, math.inf)
    half = student_reach(variance, BLOCKS - 1, TAIL / 2)
    return Crossing(*(math.exp(log_load + side) for side in (0, -half, half)))


def log_zero(sums: np.ndarray) -> np.ndarray:
    """log(−A / B) by the normal equations, of sums `[5, …]` over measurements; NaN where A is not
    below 0 and B above it, or all are of one load."""
    ones, mixed, slopes, gap_one, gap_slope = sums
    apart = ones * slopes - mixed**2 > 1e-9 * ones * slopes
    a, b = slopes * gap_one - mixed * gap_slope, ones * gap_slope - mixed * gap_one
    return np.where(apart, np.log(-a) - np.log(b), np.nan)
