"""The card of a tuning on another engine: the gate's figures of what was chosen, and tuning's of
what was not."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from draftwell.components.bench.engines.figures import Figure
from draftwell.components.card.card import Card, Tried
from draftwell.components.engines.vllm_methods import OFF
from draftwell.components.gate.engine_checks import OUTPUTS, SETTINGS
from draftwell.flows.steps.outcome_card import (
    Asked,
    behind,
    card_base,
    kinds_of,
    load_speed,
    needs,
    verdict_word,
)
from draftwell.serving.bundle.verdict import Result

if TYPE_CHECKING:
    from draftwell.components.tune.engines.choice import EngineChoice
    from draftwell.flows.workspace import Workspace


@dataclass(frozen=True)
class EngineOutcome:
    """What came of a tuning on an engine.

    Args:
        engine: its name with version and address.
        choice: what was tuned; None of an engine that is judged as it runs.
        figures: of the gate, one for each number of requests.
        checks: of the gate; none where it passed in an earlier run.
        release: number; None where nothing was released.
        next_command: what a user types now.
    """

    engine: str
    choice: EngineChoice | None
    figures: Sequence[Figure]
    verdict: Result
    next_command: str
    checks: Sequence[Mapping[str, Any]] = ()
    release: int | None = None
    bundle: str | None = None


def engine_card(space: Workspace, found: EngineOutcome, asked: Asked) -> Card:
    """The card of an engine's outcome."""
    choice = found.choice
    alone = next((figure for figure in found.figures if figure.at_once == 1), None)
    speed = None if alone is None else load_speed(alone, alone.label)
    made = {"version": version("draftwell"), "made": datetime.now(UTC)}
    return Card(
        **made,
        **card_base(space, asked),
        engine=found.engine,
        memory_bytes=None,
        strategy="as it runs" if choice is None else choice.chosen.label,
        parameters={},
        speed=speed,
        by_kind=() if alone is None else tuple(kinds_of(alone.categories)),
        by_requests=tuple(load_speed(one, str(one.at_once)) for one in found.figures),
        exact=choice is not None and choice.method == OFF,
        loses=loses(found.checks),
        tried=() if choice is None else tuple(lost(choice)),
        verdict=verdict_word(found.verdict),
        needs=needs(speed, asked),
        release=found.release,
        bundle=found.bundle,
        next_command=found.next_command,
    )


def loses(checks: Sequence[Mapping[str, Any]]) -> str | None:
    """What the gate found of answers that are not plain decoding's; None where near-ties are all
    that differs, as passes of another width round otherwise."""
    wrong = [
        one["detail"]
        for one in checks
        if one["name"].startswith((OUTPUTS, SETTINGS)) and not one["passed"]
    ]
    return "; ".join(wrong) or None


def lost(choice: EngineChoice) -> Iterator[Tried]:
    """What was measured and not chosen, each by its last figure, the fastest first."""
    last = {one.label: one for one in (*choice.explored, *choice.confirmed)}
    chosen = [last.pop(one.label, None) for one in (choice.alone, choice.chosen)]
    best = next((load_speed(one, one.label) for one in chosen if one is not None), None)
    for one in sorted(last.values(), key=lambda one: -one.ratio):
        speed = load_speed(one, one.label)
        out = (choice.left_out.get(name) for name in (one.label, f"{one.label} by load"))
        why = next(filter(None, out), None) or behind(speed, best)
        if choice.method == OFF and one.label in choice.reason:
            why = choice.reason
        yield Tried(speed=speed, why_not=why)
