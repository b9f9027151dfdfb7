"""The judgement: baseline, windows and probes in, alarms out."""

from __future__ import annotations

from collections.abc import Sequence

from draftwell.components.watch.baseline import Baseline
from draftwell.components.watch.causes import FEW, Case, diagnose
from draftwell.components.watch.evidence import Episode
from draftwell.components.watch.figures import Figure, judged_windows, watched
from draftwell.components.watch.remedies import REMEDIES
from draftwell.components.watch.schema import Alarm, Evidence, Probe, WatchLimits
from draftwell.components.watch.window import Window

CAUSES_OF_SLOWNESS = ("acceptance", "drafting", "speed", "build")
"""Figures that, when worse, explain that plain decoding is faster."""
MOST_FALLS = 3
"""Of counters within 20 minutes, without a new start."""


def judge(
    baseline: Baseline | None,
    windows: Sequence[Window],
    probes: Sequence[Probe] = (),
    limits: WatchLimits | None = None,
    *,
    now: float | None = None,
    heard: float | None = None,
) -> list[Alarm]:
    """Alarms that stand, the oldest first.

    Args:
        baseline: None, while there is none yet, finds lost metrics alone.
        windows: all since the baseline, in the order of time (`windows_of`). The judgement of a
            moment depends on those before it alone, so it may be asked for every minute.
        probes: of the same time and before, in any order.
        now: Unix seconds; None: the end of the last window.
        heard: when the engine was last heard of: a sample after a start ends no window. None: the
            end of the last window.
    """
    return [
        alarm
        for alarm in history(baseline, windows, probes, limits, now=now, heard=heard)
        if alarm.until is None
    ]


def history(
    baseline: Baseline | None,
    windows: Sequence[Window],
    probes: Sequence[Probe] = (),
    limits: WatchLimits | None = None,
    *,
    now: float | None = None,
    heard: float | None = None,
) -> list[Alarm]:
    """All alarms that were ever raised, those that ended too; arguments as of `judge`."""
    limits = limits or WatchLimits()
    lost = metrics_lost(baseline, windows, limits, now, heard)
    if baseline is None:
        return lost
    sized = judged_windows(baseline, windows, limits)
    found = [
        (figure, episode)
        for figure in watched(baseline, sized, probes, limits)
        for episode in figure.episodes(limits)
    ]
    alarms = [
        diagnose(Case(figure, episode, baseline, sized, probes))
        for figure, episode in found
        if figure.name != "crossover" or not explained(figure, episode, found)
    ]
    return sorted(merge([*alarms, *lost]), key=lambda alarm: alarm.since)


def explained(crossover: Figure, episode: Episode, found: Sequence[tuple[Figure, Episode]]) -> bool:
    """Whether something else that is worse at the time makes speculation slower than plain
    decoding."""
    begun, ended = span(crossover, episode)
    others = [span(figure, e) for figure, e in found if figure.name in CAUSES_OF_SLOWNESS]
    return any(begin < ended and begun < end for begin, end in others)


def span(figure: Figure, episode: Episode) -> tuple[float, float]:
    """Beginning and end of an episode, Unix seconds."""
    end = figure.spans[-1][1] if episode.until is None else figure.spans[episode.until][1]
    return figure.spans[episode.since][0], end


def merge(alarms: Sequence[Alarm]) -> list[Alarm]:
    """Alarms of one cause that stand, or stood, at one time are one alarm."""
    found: list[Alarm] = []
    for alarm in sorted(alarms, key=lambda alarm: (alarm.cause, alarm.since)):
        last = found[-1] if found else None
        if last is None or last.cause != alarm.cause or (last.until or alarm.since) < alarm.since:
            found.append(alarm)
            continue
        ends = (last.until, alarm.until)
        found[-1] = last.model_copy(
            update={
                "or_else": tuple(cause for cause in last.or_else if cause in alarm.or_else),
                "seen": min(last.seen, alarm.seen),
                "until": None if None in ends else max(end for end in ends if end is not None),
                "evidence": (*last.evidence, *alarm.evidence),
                "to_tell": last.to_tell if last.or_else and alarm.or_else else "",
            }
        )
    return found


def metrics_lost(
    baseline: Baseline | None,
    windows: Sequence[Window],
    limits: WatchLimits,
    now: float | None,
    heard: float | None,
) -> list[Alarm]:
    """No samples, counters that fall again and again, or figures that the engine says no more."""
    end = baseline.end if baseline else 0.0
    last = heard or (windows[-1].end if windows else end)
    now = last if now is None else now
    newest = [w.counts for w in windows[-FEW:] if w.end > end]
    untold = [counts for counts in newest if counts.new_tokens is None]
    if last and now - last > limits.lost_seconds:
        since, value, limit = last, now - last, limits.lost_seconds
        words = f"no sample for {value:.0f} seconds"
    elif windows and windows[-1].falls >= MOST_FALLS:
        since, value, limit = windows[-1].start, float(windows[-1].falls), float(MOST_FALLS)
        words = f"counters fell {value:.0f} times in 20 minutes, as those of several replicas do"
    elif len(untold) == FEW:
        since, value, limit = windows[-FEW].start, 0.0, 1.0
        words = "the metrics do not say any more what they said in the baseline"
    else:
        return []
    line = Evidence(name="metrics", value=value, baseline=None, limit=limit, words=words)
    return [
        Alarm(
            cause="metrics_lost",
            since=since,
            seen=now,
            evidence=(line,),
            remedy=REMEDIES["metrics_lost"],
        )
    ]
