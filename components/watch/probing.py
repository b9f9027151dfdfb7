"""What the watchdog's own requests tell: did fixed prompts fall too, do long ones fare worse, and
is plain decoding faster?"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

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
    from scipy.special import stdtrit

    if len(changes) < 2:
        return None
    mean = float(np.mean(changes))
    spread = max(float(np.std(changes, ddof=1)), 0.02) / math.sqrt(len(changes))
    half = float(stdtrit(max(len(changes) - 1, 3), 0.975)) * spread
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
    return probe.seconds_per_token if probe.plain else None


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
    from scipy.special import stdtrit

    table = np.array([(v.load, v.seconds, v.plain) for v in measured])
    if len(table) < BLOCKS or np.ptp(table[:, 0]) == 0:
        return None
    found = zero_of(table)
    blocks = np.array_split(np.arange(len(table)), BLOCKS)
    without = [zero_of(np.delete(table, block, axis=0)) for block in blocks]
    if found is None:
        return None
    logs = np.log([value for value in without if value is not None])
    if len(logs) < BLOCKS:
        return Crossing(found, 1.0, math.inf)
    spread = math.sqrt((BLOCKS - 1) / BLOCKS * float(((logs - logs.mean()) ** 2).sum()))
    half = float(stdtrit(BLOCKS - 1, 0.975)) * spread
    return Crossing(found, found * math.exp(-half), found * math.exp(half))


def zero_of(table: np.ndarray) -> float | None:
    """−A / B of `[measurements, 3]` load, seconds, plain; None where it is not above 0."""
    load, seconds, plain = table.T
    columns = np.stack([1 / plain, load / plain], 1)
    (a, b), *_ = np.linalg.lstsq(columns, (seconds - plain) / plain, rcond=None)
    return float(-a / b) if b > 0 and a < 0 else None
