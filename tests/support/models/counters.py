"""What tests of replay compare: counters of a request, and what stood in them after every
verification."""

from __future__ import annotations

from dataclasses import fields
from typing import Any, NamedTuple

import pytest

from draftwell.serving.runtime.acceptance.exact import Exact
from draftwell.serving.runtime.commands import Forward
from draftwell.serving.runtime.session.stats import Stats
from draftwell.serving.runtime.types import Draft, Verdict

COUNTERS = [
    field.name
    for field in fields(Stats)
    if not field.name.endswith("_seconds") and field.name != "timeline"
]


class Round(NamedTuple):
    """A verification: the draft it judged and what came of it, and the request's calls up to
    then."""

    drafted: int
    judged: int
    accepted: int
    target_calls: int
    draft_calls: int


class Rounds:
    """Every verification since the last look, request by request where they run one at a time."""

    def __init__(self) -> None:
        self.seen: list[tuple[Stats, Round]] = []

    def take(self) -> list[Round]:
        """What was seen, which is then forgotten."""
        seen, self.seen = self.seen, []
        return [one for _, one in seen]

    def of(self, stats: Stats) -> list[Round]:
        """Those of one request, of several that may have run at once."""
        return [one for whose, one in self.seen if whose is stats]


def rounds_of(monkeypatch: pytest.MonkeyPatch) -> Rounds:
    """Watch all verifications, real and replayed."""
    rounds, count = Rounds(), Stats.count

    def watch(stats: Stats, draft: Draft, verdict: Verdict) -> None:
        count(stats, draft, verdict)
        rounds.seen.append(
            (
                stats,
                Round(
                    len(draft),
                    verdict.judged,
                    verdict.accepted,
                    stats.target_calls,
                    stats.draft_calls,
                ),
            )
        )

    monkeypatch.setattr(Stats, "count", watch)
    return rounds


def counters(stats: Stats) -> dict[str, Any]:
    """All that was counted; no seconds."""
    return {name: getattr(stats, name) for name in COUNTERS}


def forwards_of(model: Any) -> list[Forward]:
    """All that a model is given from now on; the list grows."""
    seen, forward = list[Forward](), model.forward
    model.forward = lambda rows: (seen.extend(rows), forward(rows))[1]
    return seen


def judged_positions(monkeypatch) -> list[int]:
    """Positions of the text that the exact rule judges, in order."""
    seen: list[int] = []
    original = Exact.judge

    def spy(self, draft, target, rng, *, bonus=True):
        verdict = yield from original(self, draft, target, rng, bonus=bonus)
        seen.extend(draft.tokens[: verdict.judged])
        return verdict

    monkeypatch.setattr(Exact, "judge", spy)
    return seen
