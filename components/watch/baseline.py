"""What an engine did when it was well: the first quiet windows."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence

import numpy as np
from pydantic import Field

from draftwell.components.engines.port import Message
from draftwell.components.watch.evidence import FEWEST, Normal
from draftwell.components.watch.schema import WatchLimits
from draftwell.components.watch.window import Window, equal_sized


class StepTime(Message):
    """Seconds of a round by the requests at once: `base + each * at_once`.

    Engines that time tokens by request give a mean of ratios, not the ratio of means, and so a
    round's seconds move a little with acceptance where they should not: by `tilt` for each unit of
    log(tokens of a round), within the range of the baseline.
    """

    base: float
    each: float
    error: Normal
    """Of log(seconds / those expected) in quiet windows."""
    load: Normal
    """Of log2 of the requests at once."""
    tilt: float = 0.0
    length: Normal | None = None
    """Of log(tokens of a round)."""

    @classmethod
    def of(cls, windows: Sequence[Window]) -> StepTime | None:
        """Fitted by relative least squares; None where too few windows are timed without plain
        probes."""
        alone = [w for w in windows if not w.beside_probe]
        known = [(w.at_once, w.step_seconds, w.length or 1.0) for w in alone]
        timed = [(load, step, length) for load, step, length in known if load and step]
        if len(timed) < FEWEST:
            return None
        loads, steps, lengths = np.array(timed).T
        columns = np.stack([1 / steps, loads / steps], 1)
        (base, each), *_ = np.linalg.lstsq(columns, np.ones(len(steps)), rcond=None)
        if base <= 0 or each < 0:  # a load that hardly varies says nothing of its cost
            base, each = 1 / np.mean(1 / steps), 0.0
        error, logs = np.log(steps / (base + each * loads)), np.log(lengths)
        around = logs - logs.mean()
        tilt = float(around @ error) / max(float(around @ around), 1e-9)
        return cls(
            base=float(base),
            each=float(each),
            error=Normal.of((error - tilt * around).tolist()),
            load=Normal.of(np.log2(loads).tolist()),
            tilt=tilt,
            length=Normal.of(logs.tolist()),
        )

    def effect(self, window: Window) -> float | None:
        """log(seconds of a round / those expected at this load); None where they are not known, or
        plain probes made them longer."""
        load, step = window.at_once, window.step_seconds
        if not load or not step or window.beside_probe:
            return None
        found = math.log(step / (self.base + self.each * load))
        if self.length is None:
            return found
        length = min(max(math.log(window.length or 1.0), self.length.low), self.length.high)
        return found - self.tilt * (length - self.length.mean)


class Baseline(Message):
    """What windows are compared with."""

    end: float = Field(description="of its last window, Unix seconds; later ones are judged")
    source: str = Field(description="what it was made of, for readers")
    version: str | None = None
    tokens: float = Field(gt=0, description="new tokens that a judged window has at least")
    accepted_at: tuple[float, ...] = Field((), strict=False, description="share of rounds")
    accepted_share: float | None = None
    length: Normal | None = Field(None, description="of log(tokens of a round)")
    step_time: StepTime | None = None
    prompt: Normal | None = Field(None, description="of log2(mean tokens of a prompt)")
    hits: Normal | None = Field(None, description="of the prefix cache's share of prompt tokens")
    hits_per_request: float | None = None
    hits_of_request: Normal | None = Field(None, description="of the same, by window")

    @classmethod
    def of(cls, windows: Sequence[Window], limits: WatchLimits) -> Baseline | None:
        """Of the first `quiet_windows`; None while there are too few."""
        quiet = quiet_windows(windows, limits)[: limits.baseline_windows]
        if len(quiet) < limits.baseline_windows:
            return None
        tokens = float(np.median([w.new_tokens for w in quiet])) / 2
        sized = equal_sized(quiet, tokens)
        lengths = normal_of([w.length for w in sized], math.log)
        drafted = sum(w.counts.drafted or 0 for w in quiet)
        accepted = sum(w.counts.accepted or 0 for w in quiet)
        requests = sum(w.counts.requests or 0 for w in quiet)
        cached = sum(w.counts.cached_prompt_tokens or 0 for w in quiet)
        return cls(
            end=quiet[-1].end,
            source="the first quiet windows",
            version=quiet[0].version,
            tokens=tokens,
            accepted_at=mean_acceptance(quiet),
            accepted_share=accepted / drafted if drafted else None,
            length=lengths,
            step_time=StepTime.of(sized),
            prompt=normal_of([w.prompt_length for w in sized], math.log2),
            hits=normal_of([w.hit_rate for w in sized], float),
            hits_per_request=cached / requests if requests and cached else None,
            hits_of_request=normal_of([w.hits_per_request for w in sized], float),
        )


def quiet_windows(windows: Sequence[Window], limits: WatchLimits) -> list[Window]:
    """Usable windows with traffic, of the version that has most of them."""
    quiet = [w for w in windows if usable(w, limits) and w.new_tokens]
    most = Counter(w.version for w in quiet).most_common(1)
    return [w for w in quiet if w.version == most[0][0]]


def usable(window: Window, limits: WatchLimits) -> bool:
    """Whether a window is neither in the warm-up, nor over a gap, nor of mixed replicas."""
    warm = window.uptime is None or window.uptime - window.seconds >= limits.warm_up_seconds
    return warm and window.seconds <= limits.gap_seconds and window.falls < 2


def normal_of(values: Iterable[float | None], scale: Callable[[float], float]) -> Normal | None:
    """`Normal` of the known positive values, scaled; None where they are fewer than `FEWEST`."""
    known = [scale(value) for value in values if value is not None and value > 0]
    return Normal.of(known) if len(known) >= FEWEST else None


def mean_acceptance(windows: Sequence[Window]) -> tuple[float, ...]:
    """Share of rounds that accepted each position, over all windows."""
    rounds = sum(w.counts.rounds or 0 for w in windows)
    width = max((len(w.counts.accepted_at) for w in windows), default=0)
    if not rounds:
        return ()
    return tuple(
        sum(w.counts.accepted_at[i] for w in windows if i < len(w.counts.accepted_at)) / rounds
        for i in range(width)
    )
