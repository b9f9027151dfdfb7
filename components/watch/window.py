"""Windows: what an engine did between two samples of its counters."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from draftwell.components.engines.remote.counters import SUMS, Counters
from draftwell.components.watch.schema import Probe

FALLS_SECONDS = 1200
"""How far back falls of counters are counted."""
SLOWED = 60.0
"""Seconds after a plain probe in which requests that were slower beside it end, and are counted."""


@dataclass(frozen=True)
class Window:
    """The difference of two samples. A figure is None where the engine does not say enough.

    Args:
        start, end: Unix seconds.
        counts: what was added.
        born: when the engine started, as it says or as its counters show; None: not known.
        falls: how often counters fell in the 20 minutes before, without a new start.
        beside_probe: whether the engine decoded a probe without speculation meanwhile, or shortly
            before: all other requests are slower beside one.
    """

    start: float
    end: float
    counts: Counters
    born: float | None = None
    falls: int = 0
    beside_probe: bool = False

    @property
    def seconds(self) -> float:
        """Length of the window."""
        return self.end - self.start

    @property
    def version(self) -> str | None:
        """Of the engine."""
        return self.counts.version

    @property
    def uptime(self) -> float | None:
        """Seconds since the engine's start."""
        return None if self.born is None else self.end - self.born

    @property
    def new_tokens(self) -> int:
        """Output tokens; 0 where the engine does not say."""
        return self.counts.new_tokens or 0

    @property
    def length(self) -> float | None:
        """Tokens that a round brings, 1 + accepted / rounds; None where nothing was drafted."""
        rounds, accepted = self.counts.rounds, self.counts.accepted
        return 1 + accepted / rounds if rounds and accepted is not None else None

    @property
    def accepted_share(self) -> float | None:
        """Accepted / drafted."""
        drafted, accepted = self.counts.drafted, self.counts.accepted
        return accepted / drafted if drafted and accepted is not None else None

    @property
    def accepted_at(self) -> tuple[float, ...]:
        """Share of the rounds that accepted each position of the draft."""
        rounds = self.counts.rounds
        return tuple(count / rounds for count in self.counts.accepted_at) if rounds else ()

    @property
    def drafted_per_token(self) -> float | None:
        """Draft tokens for each output token."""
        drafted = self.counts.drafted
        return drafted / self.new_tokens if self.new_tokens and drafted is not None else None

    @property
    def wasted_per_token(self) -> float | None:
        """Rejected draft tokens for each output token."""
        drafted, accepted = self.counts.drafted, self.counts.accepted
        if not self.new_tokens or drafted is None or accepted is None:
            return None
        return (drafted - accepted) / self.new_tokens

    @property
    def hit_rate(self) -> float | None:
        """Share of the prompts' tokens that came from the prefix cache."""
        return ratio(self.counts.cached_prompt_tokens, self.counts.prompt_tokens)

    @property
    def hits_per_request(self) -> float | None:
        """Tokens of a prompt that came from the prefix cache."""
        return ratio(self.counts.cached_prompt_tokens, self.counts.requests)

    @property
    def prompt_length(self) -> float | None:
        """Mean tokens of a prompt."""
        return ratio(self.counts.prompt_tokens, self.counts.requests)

    @property
    def seconds_per_token(self) -> float | None:
        """Seconds of an output token, as a request sees them.

        Engines add up either each request's mean (about as many steps as requests) or the seconds
        of each step (as many steps as rounds or tokens).
        """
        seconds, steps = self.counts.decode_seconds, self.counts.decode_steps
        if not seconds or not steps or not self.new_tokens:
            return None
        by_request = steps <= 1.2 * (self.counts.requests or 0)
        return seconds / (steps if by_request else self.new_tokens)

    @property
    def step_seconds(self) -> float | None:
        """Seconds of a round: of a token, times the tokens that a round brings. Whatever the
        acceptance, it stays the same at equal load."""
        seconds = self.seconds_per_token
        return None if seconds is None else seconds * (self.length or 1.0)

    @property
    def at_once(self) -> float | None:
        """Mean requests that were decoded at once, by Little's law: tokens a second times seconds
        of a token; the gauge where the engine does not time its tokens."""
        seconds = self.seconds_per_token
        if seconds is None or self.seconds <= 0:
            return None if self.counts.running is None else float(self.counts.running)
        return self.new_tokens * seconds / self.seconds


def ratio(part: float | None, whole: float | None) -> float | None:
    """part / whole, where both are known and there is a whole."""
    return part / whole if whole and part is not None else None


def windows_of(samples: Iterable[Counters], probes: Sequence[Probe] = ()) -> list[Window]:
    """Windows between successive samples, in the order of their ends; those with plain probes are
    marked.

    Samples that name another start are of another engine, or of another replica behind the
    address: each is compared with the last one of its own start. A window over a start or a fall of
    counters is left out.
    """
    found: list[Window] = []
    last: dict[float | None, Counters] = {}
    born: dict[float | None, float | None] = {}
    falls: list[float] = []
    plain = sorted(probe.at for probe in probes if probe.plain and not probe.elsewhere)
    for sample in sorted(samples, key=lambda sample: sample.at):
        before = last.get(sample.started)
        last[sample.started] = sample
        born.setdefault(sample.started, sample.started)
        if before is None or sample.at <= before.at:
            continue
        counts = sample.since(before)
        falls = [at for at in falls if sample.at - at <= FALLS_SECONDS]
        if counts is None:
            born[sample.started] = sample.started or sample.at
            falls.append(sample.at)
            continue
        earlier, probed = (bisect_left(plain, at) for at in (before.at - SLOWED, sample.at))
        of_start = (born[sample.started], len(falls))
        found.append(Window(before.at, sample.at, counts, *of_start, earlier < probed))
    return found


def merged(windows: Sequence[Window]) -> Window:
    """One window over several of one version, with the sums of their counts."""
    if len(windows) == 1:
        return windows[0]
    parts = [window.counts for window in windows]
    update: dict[str, object] = {}
    for name in SUMS:
        values = [getattr(part, name) for part in parts]
        update[name] = None if None in values else sum(values)
    width = min(len(part.accepted_at) for part in parts)
    update["accepted_at"] = tuple(sum(part.accepted_at[i] for part in parts) for i in range(width))
    # windows of several replicas overlap: what lasts is the sum of them
    end = windows[-1].end
    return Window(
        end - sum(window.seconds for window in windows),
        end,
        parts[-1].model_copy(update=update),
        windows[-1].born,
        max(window.falls for window in windows),
        any(window.beside_probe for window in windows),
    )


def equal_sized(windows: Iterable[Window], tokens: float) -> list[Window]:
    """Successive windows of one version and start, merged until each has this many new tokens: an
    idle minute says little, and its figures would vary more than others.

    What is left at the end, or at a start, has too few tokens and is left out.
    """
    found: list[Window] = []
    waiting: list[Window] = []
    for window in windows:
        if waiting and waiting[-1].version != window.version:
            waiting = []
        waiting.append(window)
        if sum(part.new_tokens for part in waiting) >= tokens:
            found.append(merged(waiting))
            waiting = []
    return found
