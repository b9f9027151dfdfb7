"""Why a figure is worse: the cause that the evidence leaves, or the causes and what would tell them
apart."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from draftwell.components.watch.baseline import Baseline
from draftwell.components.watch.evidence import LATEST, Episode
from draftwell.components.watch.figures import Figure
from draftwell.components.watch.probing import (
    Change,
    change_since,
    crossing,
    longer_prompts,
    plain_seconds,
    tokens_of_round,
)
from draftwell.components.watch.remedies import REMEDIES, TELLING, switch_off_above
from draftwell.components.watch.schema import Alarm, Cause, Evidence, Probe
from draftwell.components.watch.window import Window

ACCEPTANCE_SECONDS, SPEED_SECONDS = 900, 3600
"""A change that begins this soon after another version does is that version's: a fall of
acceptance shows at once, slower rounds need longer."""
DEAD = 0.25
"""Share of the former acceptance, or hits, that is left of a dead draft or an empty cache."""
LONGER = 1.4
"""How many times as long prompts are that count as longer."""
FEW = 5
"""Windows that say something together."""


@dataclass
class Case:
    """A figure that was worse for a time, and what else is known of that time."""

    figure: Figure
    episode: Episode
    baseline: Baseline
    windows: Sequence[Window]
    """All judged ones, up to now."""
    probes: Sequence[Probe]
    found: list[Evidence] = field(default_factory=list)

    @property
    def since(self) -> float:
        """Estimated beginning."""
        return self.figure.spans[self.episode.since][0]

    @property
    def until(self) -> float | None:
        """End; None: it stands."""
        end = self.episode.until
        return None if end is None else self.figure.spans[end][1]

    @property
    def during(self) -> list[Window]:
        """Windows since the beginning, up to the end."""
        last = self.episode.until
        end = self.figure.spans[-1 if last is None else max(last - LATEST, self.episode.seen)][1]
        return [w for w in self.windows if self.since <= w.start and w.end <= end]

    @property
    def recent(self) -> list[Window]:
        """The newest of them."""
        return self.during[-LATEST:]

    @property
    def effect(self) -> float:
        """Mean of the newest effects, as a logarithm; above 0."""
        end = self.episode.until
        last = len(self.figure.effects) if end is None else end - LATEST + 1
        first = max(self.episode.since, last - LATEST)
        values = self.figure.effects[first : max(last, self.episode.seen + 1)]
        return float(np.mean(values)) - self.figure.normal.mean

    def note(self, name: str, change: Change, words: str) -> None:
        """Add a change of probes to the evidence."""
        interval = (math.exp(change.low), math.exp(change.high))
        ratio = math.exp(change.mean)
        self.found.append(
            Evidence(
                name=name,
                value=ratio,
                baseline=1.0,
                limit=None,
                interval=interval,
                words=words.format(percent=percent(ratio), prompts=change.prompts),
            )
        )

    def alarm(self, cause: Cause, *or_else: Cause, since: float | None = None) -> Alarm:
        """The alarm with all evidence."""
        return Alarm(
            cause=cause,
            or_else=or_else,
            since=self.since if since is None else since,
            seen=self.figure.spans[self.episode.seen][1],
            until=self.until,
            evidence=(first_line(self), *self.found),
            remedy=REMEDIES[cause],
            to_tell=TELLING.get((cause, *or_else), "") if or_else else "",
        )


def percent(ratio: float) -> str:
    """A ratio in words.

    >>> percent(0.8), percent(1.1)
    ('20 % lower', '10 % higher')
    """
    return f"{abs(ratio - 1):.0%}".replace("%", " %") + (" lower" if ratio < 1 else " higher")


def first_line(case: Case) -> Evidence:
    """The figure that was worse."""
    figure, effect = case.figure, case.effect
    count = min(LATEST, len(figure.effects) - case.episode.since)
    half = 1.96 * figure.normal.spread / math.sqrt(max(count, 1))
    ends = (effect - half, effect + half)
    if figure.name == "acceptance":
        usual = math.exp(-figure.normal.mean)
        low, value, high = (usual * math.exp(-x) for x in (ends[1], effect, ends[0]))
        limit, name = usual * math.exp(-figure.limit), "tokens of a round"
        words = f"a round brings {value:.3g} tokens, {usual:.3g} in the baseline"
    elif figure.name in ("speed", "build", "crossover"):
        usual = 1.0
        low, value, high = (math.exp(x) for x in (ends[0], effect, ends[1]))
        limit = math.exp(figure.limit)
        name = "seconds of a token" if figure.name == "crossover" else "seconds of a round"
        than = (
            "without speculation" if figure.name == "crossover" else "at this load in the baseline"
        )
        words = f"{name} are {value:.3g} times those {than}"
    else:
        usual, limit = 1.0, 1 - figure.limit
        low, value, high = (max(0.0, 1 - x) for x in (ends[1], effect, ends[0]))
        name = "prefix-cache hits" if figure.name == "cache" else "windows with drafts"
        words = f"{name} are {value:.0%} of the baseline's".replace("%", " %")
    return Evidence(
        name=name,
        value=value,
        baseline=usual,
        limit=limit,
        interval=(low, high),
        p=case.episode.p,
        words=words,
    )


def diagnose(case: Case) -> Alarm:
    """The alarm of a figure that was worse."""
    by_figure: dict[str, Callable[[Case], Alarm]] = {
        "acceptance": lost_acceptance,
        "drafting": no_drafts,
        "speed": slower_rounds,
        "build": slower_rounds,
        "cache": lost_hits,
        "crossover": slower_than_plain,
    }
    return by_figure[case.figure.name](case)


def lost_acceptance(case: Case) -> Alarm:
    """Build change, dead draft, context length, stale draft or drift of traffic."""
    fixed = fixed_prompts(case)
    changed = None if fixed == "same" else build_change(case, ACCEPTANCE_SECONDS)
    if changed is not None:
        return case.alarm("build_change", since=changed)
    left = share_left(case)
    if left is not None and left <= DEAD and fixed != "same" and abrupt(case):
        sure = fixed == "fell" or left <= DEAD / 2
        return case.alarm("dead_draft", *(() if sure else ("drift_of_traffic",)))
    if longer_now(case) >= LONGER and fixed != "fell":
        return longer_context(case)
    return stale_or_drift(case, fixed)


def share_left(case: Case) -> float | None:
    """Accepted / drafted now, relative to the baseline."""
    shares = [w.accepted_share for w in case.recent if w.accepted_share is not None]
    usual = case.baseline.accepted_share
    return float(np.mean(shares[-FEW:])) / usual if shares and usual else None


def abrupt(case: Case) -> bool:
    """Whether most of the fall came from one window to the next, as when weights are replaced,
    and not little by little."""
    known = [-math.log(w.length) for w in case.windows if w.length]
    steps = [
        float(np.mean(known[i : i + 3]) - np.mean(known[max(0, i - 3) : i]))
        for i in range(1, len(known) - 1)
    ]
    return bool(steps) and max(steps) >= 0.6 * case.effect


def no_drafts(case: Case) -> Alarm:
    """Nothing is drafted any more."""
    changed = build_change(case, ACCEPTANCE_SECONDS)
    return (
        case.alarm("dead_draft") if changed is None else case.alarm("build_change", since=changed)
    )


def stale_or_drift(case: Case, fixed: str) -> Alarm:
    """By fixed prompts; without them, by what a restart did."""
    if fixed == "fell":
        return case.alarm("stale_draft")
    if fixed == "same":
        return case.alarm("drift_of_traffic")
    helped = restart_helped(case)
    if helped:
        return case.alarm("stale_draft")
    if helped is False:
        return case.alarm("drift_of_traffic")
    return case.alarm("drift_of_traffic", "stale_draft")


def longer_context(case: Case) -> Alarm:
    """Prompts became longer: does that explain the fall? Probes of the same kind in two lengths
    say it, else windows whose prompts are as short as before."""
    assert case.baseline.prompt is not None
    short = 2**case.baseline.prompt.mean
    gap = longer_prompts(case.probes, short, short * longer_now(case))
    if gap is not None:
        case.note(
            "longer fixed prompts",
            gap,
            "fixed prompts as long as those now bring {percent} tokens a round than short ones "
            "of their kind ({prompts} kinds)",
        )
        if gap.mean <= -case.effect / 3:
            return case.alarm("context_length")
        if gap.mean > -case.effect / 6:
            return stale_or_drift(case, fixed_prompts(case))
    as_short = [
        math.log(w.length) + case.figure.normal.mean
        for w in case.during
        if w.length and w.prompt_length and math.log2(w.prompt_length) <= case.baseline.prompt.high
    ]
    if gap is None and len(as_short) >= FEW:
        if np.mean(as_short) > -case.figure.limit / 2:
            return case.alarm("context_length")
        if np.mean(as_short) < -case.figure.limit:
            return stale_or_drift(case, fixed_prompts(case))
    return case.alarm("context_length", "drift_of_traffic")


def longer_now(case: Case) -> float:
    """How many times as long prompts are as in the baseline; 1 where that is not known."""
    lengths = [math.log2(w.prompt_length) for w in case.recent if w.prompt_length]
    if case.baseline.prompt is None or not lengths:
        return 1.0
    return float(2 ** (np.mean(lengths) - case.baseline.prompt.mean))


def fixed_prompts(case: Case) -> str:
    """What fixed prompts of the usual lengths did since: fell, same, or unknown."""
    usual = math.inf if case.baseline.prompt is None else 2 ** (case.baseline.prompt.high + 1)
    short = [probe for probe in case.probes if probe.prompt_tokens <= usual]
    change = change_since(short, case.since, tokens_of_round)
    if change is None:
        return "unknown"
    if not any(line.name == "fixed prompts" for line in case.found):
        words = "fixed prompts bring {percent} tokens a round than before ({prompts} prompts)"
        case.note("fixed prompts", change, words)
    if change.mean <= -case.effect / 2 and change.high < 0:
        return "fell"
    return "same" if change.mean > -case.effect / 4 else "unknown"


def restart_helped(case: Case) -> bool | None:
    """Whether a restart of the same version brought acceptance back; None without a restart."""
    later = [w for w in case.windows if w.start >= case.since and w.length]
    for i in range(1, len(later)):
        if later[i].born != later[i - 1].born and later[i].version == later[i - 1].version:
            before = np.mean([math.log(w.length or 1) for w in later[max(0, i - FEW) : i]])
            after = [math.log(w.length or 1) for w in later[i : i + FEW]]
            if len(after) == FEW:
                return bool(np.mean(after) - before >= case.figure.limit)
    return None


def build_change(case: Case, within: float) -> float | None:
    """When another version began, if the figure became worse soon after; None else."""
    version = case.recent[-1].version if case.recent else None
    if version is None or version == case.baseline.version or case.baseline.version is None:
        return None
    begun = min(w.start for w in case.windows if w.version == version)
    near = begun - ACCEPTANCE_SECONDS <= case.since <= begun + within
    if not near:
        return None
    case.found.append(
        Evidence(
            name="version",
            value=begun,
            baseline=None,
            limit=None,
            words=f"version {case.baseline.version} was replaced by {version}",
        )
    )
    return begun


def slower_rounds(case: Case) -> Alarm:
    """Build change, or the machine."""
    changed = build_change(case, SPEED_SECONDS)
    if changed is not None:
        return case.alarm("build_change", since=changed)
    plain = change_since(case.probes, case.since, plain_seconds)
    if plain is not None:
        words = "plain decoding of fixed prompts takes {percent} seconds than before"
        case.note("plain decoding", plain, words)
    before = [w for w in case.windows if w.end <= case.since + 60]
    restarted = bool(before) and before[-1].born != case.during[0].born if case.during else False
    return case.alarm("machine", *(("build_change",) if restarted else ()))


def lost_hits(case: Case) -> Alarm:
    """The prefix cache, or traffic that repeats itself less."""
    left = 1 - case.effect
    return case.alarm("prefix_cache", *(() if left <= DEAD else ("drift_of_traffic",)))


def slower_than_plain(case: Case) -> Alarm:
    """Load crossover: above which load, by all pairs until now."""
    found = crossing(case.figure.measured)
    alarm = case.alarm("load_crossover")
    width = len(case.baseline.accepted_at)
    if found is None:
        return alarm.model_copy(
            update={"remedy": switch_off_above(0, width), "switch_off_above": 0}
        )
    above = max(0, math.floor(found.load))
    return alarm.model_copy(
        update={
            "evidence": (*alarm.evidence, found.evidence),
            "remedy": switch_off_above(above, width),
            "switch_off_above": above,
        }
    )
