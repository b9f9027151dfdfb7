"""The figures that are watched: each a series of effects, positive where the engine is worse."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from draftwell.components.watch.baseline import Baseline, usable
from draftwell.components.watch.evidence import FEWEST, Episode, Normal, episodes
from draftwell.components.watch.probing import Versus, pairs
from draftwell.components.watch.schema import Probe, WatchLimits
from draftwell.components.watch.window import Window, equal_sized

FIGURES = 5
"""Among which the permitted rate of false alarms is shared: those of `watched`."""
LOAD_MARGIN, PROMPT_MARGIN, HITS_MARGIN = 0.3, 0.3, 0.15
"""How far beyond the baseline's a window's log2 of load, log2 of prompt length and share of hits
may be, so that its seconds can be compared."""
PAIR_SPREAD = 0.08
"""Standard deviation of log(seconds with / without speculation) of a pair of probes."""
CACHE_SPREAD = 0.1
BUILD_SECONDS, BUILD_CHANCE = 7200, 1e-3
"""How long another version's speed is judged as that of a change at a known moment, and the chance
of a false alarm of each."""
SLOWER_THAN_PLAIN = math.log(1.03)
"""Seconds of a token, as a logarithm, that are an alarm."""
EXACT = 10**6
"""Windows of a baseline that is known and not estimated."""


@dataclass(frozen=True)
class Figure:
    """A watched figure.

    Args:
        name: acceptance, drafting, speed, build (speed since another version), cache or crossover.
        spans: beginning and end of what each effect was measured over, Unix seconds.
        effects: relative, positive where worse.
        normal: of the effects in the baseline.
        limit: effect that matters.
        measured: what the effects of `crossover` were made of.
    """

    name: str
    spans: list[tuple[float, float]]
    effects: list[float]
    normal: Normal
    limit: float
    measured: tuple[Versus, ...] = ()

    def episodes(self, limits: WatchLimits) -> list[Episode]:
        """When it was worse, at the permitted rate of false alarms."""
        if not self.effects:
            return []
        ends = np.array([end for _, end in self.spans])
        apart = float(np.median(np.diff(ends))) if len(ends) > 1 else 60.0
        looks = limits.quiet_days * 86_400 / max(apart, 60.0)
        if self.name == "build":
            threshold = -math.log(BUILD_CHANCE)
            return episodes(self.effects, self.normal, self.limit, threshold, from_first=True)
        return episodes(self.effects, self.normal, self.limit, math.log(FIGURES * looks))


def judged_windows(
    baseline: Baseline, windows: Sequence[Window], limits: WatchLimits
) -> list[Window]:
    """Windows after the baseline that can be judged, of equal size."""
    later = [w for w in windows if w.start >= baseline.end - 1 and usable(w, limits)]
    return equal_sized(later, baseline.tokens)


def watched(
    baseline: Baseline, sized: Sequence[Window], probes: Sequence[Probe], limits: WatchLimits
) -> list[Figure]:
    """All figures that baseline and windows know."""
    found = [
        acceptance(baseline, sized, limits),
        drafting(baseline, sized, limits),
        speed(baseline, sized, limits),
        build(baseline, sized, limits),
        cache(baseline, sized, limits),
        crossover(baseline, probes),
    ]
    return [figure for figure in found if figure is not None]


def acceptance(baseline: Baseline, sized: Sequence[Window], limits: WatchLimits) -> Figure | None:
    """log(tokens of a round in the baseline / now)."""
    if baseline.length is None:
        return None
    known = [(w, -math.log(w.length)) for w in sized if w.length is not None]
    normal = baseline.length.model_copy(update={"mean": -baseline.length.mean})
    return figure("acceptance", known, normal, -math.log(1 - limits.acceptance))


def drafting(baseline: Baseline, sized: Sequence[Window], limits: WatchLimits) -> Figure | None:
    """1 where nothing was drafted, at a load at which the baseline drafted: engines may switch
    speculation off at a higher one."""
    if baseline.length is None:
        return None
    load = baseline.step_time.load if baseline.step_time else None
    # without drafts requests take longer, and more of them are decoded at once
    margin = LOAD_MARGIN + 2 * baseline.length.mean / math.log(2)
    known = []
    for w in sized:
        usual = load is None or not w.at_once or math.log2(w.at_once) <= load.high + margin
        # engines that were started without speculation say nothing of rounds
        drafted = w.counts.rounds if w.counts.drafted is None else w.counts.drafted
        if usual:
            known.append((w, float(not drafted)))
    normal = Normal(mean=0.0, spread=0.25, low=0.0, high=0.0, windows=FEWEST)
    return figure("drafting", known, normal, 0.5)


def speed(baseline: Baseline, sized: Sequence[Window], limits: WatchLimits) -> Figure | None:
    """log(seconds of a round / in the baseline at this load), of the windows whose load, length of
    prompts and hits the baseline knows."""
    step = baseline.step_time
    if step is None:
        return None
    known = []
    for window in sized:
        effect = step.effect(window)
        if effect is not None and comparable(baseline, window):
            known.append((window, effect))
    return figure("speed", known, step.error, math.log(1 + limits.speed))


def build(baseline: Baseline, sized: Sequence[Window], limits: WatchLimits) -> Figure | None:
    """`speed` of the first hours of another version than the baseline's."""
    version = sized[-1].version if sized else None
    if version is None or baseline.version in (None, version):
        return None
    begun = min(w.start for w in sized if w.version == version)
    first = [w for w in sized if w.version == version and w.end <= begun + BUILD_SECONDS]
    found = speed(baseline, first, limits)
    return None if found is None else replace(found, name="build")


def comparable(baseline: Baseline, window: Window) -> bool:
    """Whether the baseline has seen such a window: its load, prompts and hits."""
    step, load, prompt = baseline.step_time, window.at_once, window.prompt_length
    if step is None or not load or not step.load.covers(math.log2(load), LOAD_MARGIN):
        return False
    if baseline.prompt and prompt and not baseline.prompt.covers(math.log2(prompt), PROMPT_MARGIN):
        return False
    return baseline.hits is None or baseline.hits.covers(window.hit_rate, HITS_MARGIN)


def cache(baseline: Baseline, sized: Sequence[Window], limits: WatchLimits) -> Figure | None:
    """How much of the hits is gone: of their share of prompt tokens, or of those of a request,
    whichever fell less (longer prompts lower the share alone, shorter ones the hits of each).

    Servers count prompts when they are read, and requests, and some the hits, when they end: where
    few requests end in a window, one of the two is noise. What fell less fell no more than the
    steadier one, so that the steadier one's spread holds for it."""
    if baseline.hits is None or baseline.hits.mean < 0.05 or not baseline.hits_per_request:
        return None
    mean, known = baseline.hits.mean, []
    for window in sized:
        rate, each = window.hit_rate, window.hits_per_request
        if rate is not None and each is not None:
            known.append((window, 1 - max(rate / mean, each / baseline.hits_per_request)))
    spreads = [n.spread / n.mean for n in (baseline.hits, baseline.hits_of_request) if n]
    spread = max(min(spreads), CACHE_SPREAD)
    normal = Normal(mean=0.0, spread=spread, low=0.0, high=0.0, windows=baseline.hits.windows)
    return figure("cache", known, normal, limits.cache)


def crossover(baseline: Baseline, probes: Sequence[Probe]) -> Figure | None:
    """log(seconds of a token / without speculation at this load), of pairs of probes."""
    measured = [pair for pair in pairs(probes) if pair.at >= baseline.end]
    normal = Normal(mean=0.0, spread=PAIR_SPREAD, low=0.0, high=0.0, windows=EXACT)
    spans = [(pair.at, pair.at) for pair in measured]
    slower = [pair.slower for pair in measured]
    if not spans:
        return None
    return Figure("crossover", spans, slower, normal, SLOWER_THAN_PLAIN, tuple(measured))


def figure(
    name: str, known: Sequence[tuple[Window, float]], normal: Normal, limit: float
) -> Figure:
    """Of (window, effect) pairs."""
    spans = [(window.start, window.end) for window, _ in known]
    return Figure(name, spans, [effect for _, effect in known], normal, limit)
