"""Counters of one generation, and the measures that docs/methods.md defines on them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from draftwell.serving.runtime.commands import SHADOW, Forward
from draftwell.serving.runtime.types import Draft, Verdict

Interval = tuple[str, float, float]
"""Role, start and end of a forward pass, in seconds from the start of the request."""


@dataclass
class Stats:
    """What happened during one generation.

    Seconds are wall time inside forward passes (shared evenly by the requests of a batch), `wall`
    is the whole request and `busy` the part of it in which at least one forward pass ran;
    `timeline` has every forward pass of this generation, `overlap_seconds` those of every `Overlap`
    and of its longer side alone.

    With a qualifier there are two stages: `drafted`, `judged`, `accepted` and all that follows from
    them speak of what the target was given; `inner_*` of what the qualifier was given by the draft
    (`inner_sampled`: its corrections and bonuses). `cached_tokens` of the prompt the target need
    not read, because a slot held them; `target_tokens` leave them out. `verdicts` are the
    judgements by the target, of no draft too. `predicted…` are the parts of `drafted`, `judged`,
    `accepted` and `rounds` for which a client's prediction was the draft, `forced…` those for which
    a grammar left no choice. `kept` has the accepted tokens by what drafted them: `drafter`, which
    is named before a draft is judged and is "strategy" where a strategy has one drafter only.
    `sequences` counts the rounds that drafted so many sequences, by whether the first sequence's
    first token was kept.
    """

    emitted: int = 0
    drafted: int = 0
    judged: int = 0
    accepted: int = 0
    rescued: int = 0
    sampled: int = 0
    verdicts: int = 0
    predicted: int = 0
    predicted_judged: int = 0
    predicted_accepted: int = 0
    predicted_rounds: int = 0
    forced: int = 0
    forced_judged: int = 0
    forced_accepted: int = 0
    forced_rounds: int = 0
    rounds: int = 0
    target_calls: int = 0
    target_tokens: int = 0
    cached_tokens: int = 0
    draft_calls: int = 0
    qualifier_calls: int = 0
    inner_rounds: int = 0
    inner_drafted: int = 0
    inner_judged: int = 0
    inner_accepted: int = 0
    inner_sampled: int = 0
    prefill_calls: int = 0
    judged_at: Counter[int] = field(default_factory=Counter)
    accepted_at: Counter[int] = field(default_factory=Counter)
    kept: Counter[str] = field(default_factory=Counter)
    sequences: Counter[tuple[int, bool]] = field(default_factory=Counter)
    drafter: str = "strategy"
    target_seconds: float = 0.0
    draft_seconds: float = 0.0
    qualifier_seconds: float = 0.0
    prefill_seconds: float = 0.0
    wall_seconds: float = 0.0
    busy_seconds: float = 0.0
    first_token_seconds: float = 0.0
    timeline: list[Interval] = field(default_factory=list)
    overlap_seconds: list[tuple[float, float]] = field(default_factory=list)

    def time_forward(self, command: Forward, start: float, end: float, sharers: int) -> None:
        """Note a forward pass that ran from `start` to `end` for `sharers` requests; a shadow's is
        none of the request's."""
        if command.model == SHADOW:
            return
        self.timeline.append(("draft" if command.skip else command.model, start, end))
        seconds = (end - start) / sharers
        if command.prefill:
            self.prefill_seconds += seconds
        elif command.model == "target" and not command.skip:
            self.target_seconds += seconds
        elif command.model == "qualifier":
            self.qualifier_seconds += seconds
        else:
            self.draft_seconds += seconds

    def end(self, wall_seconds: float, emitted: int) -> None:
        """The generation is over."""
        self.wall_seconds, self.emitted = wall_seconds, emitted
        self.busy_seconds = covered(self.timeline)

    def count(self, draft: Draft, verdict: Verdict, start: int = 0) -> None:
        """Count one verification of `draft` (drafters count what they draft).

        Args:
            start: place of its first token in the round's draft; the round is counted with that
                of place 0.
        """
        self.verdicts += start == 0
        self.judged += verdict.judged
        self.accepted += verdict.accepted
        self.kept[self.drafter] += verdict.accepted
        self.rescued += verdict.rescued
        self.sampled += verdict.token is not None
        self.rounds += start == 0 and len(draft) > 0
        for i in range(len(draft)):
            self.judged_at[start + i] += 1
            self.accepted_at[start + i] += i < verdict.accepted

    def count_inner(self, draft: Draft, verdict: Verdict) -> None:
        """Count one judgement by the qualifier; its drafter counted the tokens as drafted for the
        target, which they are not."""
        self.drafted -= len(draft)
        self.inner_rounds += 1
        self.inner_drafted += len(draft)
        self.inner_judged += verdict.judged
        self.inner_accepted += verdict.accepted
        self.inner_sampled += verdict.token is not None

    @classmethod
    def total(cls, parts: Iterable[Stats]) -> Stats:
        """Sum of the counters of many generations; timelines, and who drafts next, stay with their
        generation."""
        result = cls()
        for part in parts:
            for name in cls.__dataclass_fields__.keys() - {"timeline", "drafter"}:
                setattr(result, name, getattr(result, name) + getattr(part, name))
        return result

    @property
    def own(self) -> Stats:
        """The same without what came with the request (a prediction, what a grammar forces): what
        the strategy itself drafted."""
        return replace(
            self,
            drafted=self.drafted - self.predicted - self.forced,
            judged=self.judged - self.predicted_judged - self.forced_judged,
            accepted=self.accepted - self.predicted_accepted - self.forced_accepted,
            rounds=self.rounds - self.predicted_rounds - self.forced_rounds,
            predicted=0,
            predicted_judged=0,
            predicted_accepted=0,
            predicted_rounds=0,
            forced=0,
            forced_judged=0,
            forced_accepted=0,
            forced_rounds=0,
        )

    @property
    def acceptance_rate(self) -> float | None:
        """Accepted / judged draft tokens; None when nothing was judged."""
        return self.accepted / self.judged if self.judged else None

    @property
    def inner_acceptance_rate(self) -> float | None:
        """Accepted / judged tokens of the draft at the qualifier; None without a qualifier."""
        return self.inner_accepted / self.inner_judged if self.inner_judged else None

    @property
    def draft_efficiency(self) -> float | None:
        """Accepted / drafted tokens."""
        return self.accepted / self.drafted if self.drafted else None

    @property
    def mat(self) -> float:
        """Accepted draft tokens / tokens sampled from the target."""
        return self.accepted / self.sampled if self.sampled else float(self.accepted)

    @property
    def accepted_per_call(self) -> float:
        """Accepted draft tokens / target calls."""
        return self.accepted / self.target_calls if self.target_calls else 0.0

    @property
    def mean_acceptance_length(self) -> float:
        """1 + accepted / rounds that drafted (vLLM's convention)."""
        return 1 + self.accepted / self.rounds if self.rounds else 1.0

    @property
    def calls_per_token(self) -> float:
        """Target calls / emitted tokens; the numerator of the cost ratio."""
        return self.target_calls / self.emitted if self.emitted else 0.0

    @property
    def overlap_stretch(self) -> float | None:
        """How many times as long as their longer sides overlaps took, all together; 1 would be
        perfect, None without any."""
        longer = sum(alone for _, alone in self.overlap_seconds)
        return sum(together for together, _ in self.overlap_seconds) / longer if longer else None

    @property
    def overhead_seconds(self) -> float:
        """Wall time in which no forward pass of this request ran."""
        return max(0.0, self.wall_seconds - self.busy_seconds)


def covered(timeline: Sequence[Interval]) -> float:
    """Seconds that at least one interval covers.

    >>> covered([("draft", 0.0, 1.0), ("draft", 1.5, 2.0), ("target", 0.0, 1.75)])
    2.0
    """
    total = until = 0.0
    for _, start, end in sorted(timeline, key=lambda interval: interval[1]):
        total += max(0.0, end - max(start, until))
        until = max(until, end)
    return total
