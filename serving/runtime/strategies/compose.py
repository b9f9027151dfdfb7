"""A strategy from parts, without a class of its own: for compositions that no paper has
(docs/compose.md)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from draftwell.serving.runtime.commands import Role, Step
from draftwell.serving.runtime.session.session import Session
from draftwell.serving.runtime.strategies.base import Strategy, StrategyConfig, StrategyResources


class Composed(Strategy):
    """What `compose` returns."""

    name = "composed"
    lossless = False
    paper = "–"
    Config = StrategyConfig

    def __init__(
        self, steps: Callable[[Session], Step[None]], roles: tuple[Role, ...], overlaps: bool
    ):
        super().__init__(StrategyConfig(), StrategyResources())
        self.steps = steps
        self.roles, self.overlaps = roles, overlaps  # type: ignore[misc]

    def run(self, session: Session) -> Step[None]:
        yield from self.steps(session)


def compose(
    steps: Callable[[Session], Step[Any]],
    *,
    roles: tuple[Role, ...] = ("target", "draft"),
    overlaps: bool = False,
) -> Strategy:
    """A strategy that decodes a request with `steps`.

    Args:
        steps: called once for every request; builds the parts, which belong to one request, and
            yields from a schedule.
        roles: the models it uses.
        overlaps: the schedule yields overlaps of draft and target.

    >>> from draftwell.serving.runtime.acceptance.exact import Exact
    >>> from draftwell.serving.runtime.drafting.ngram import NGram
    >>> from draftwell.serving.runtime.schedules.serial import serial
    >>> lookup = compose(lambda session: serial(session, NGram(3, 10), Exact()), roles=("target",))
    """
    return Composed(steps, roles, overlaps)
