"""Running a scheduler round by round, and a vocabulary of letters for its texts."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from draftwell.serving.server.scheduling.scheduler import Scheduler


def letters(ids: Sequence[int]) -> str:
    """Token 0 is a, 1 is b, and so on."""
    return "".join(chr(97 + i) for i in ids)


def turn_until(it: Scheduler, condition: Callable[[], object], rounds: int = 2000) -> None:
    """Run rounds until a condition holds; fail after `rounds`."""
    for _ in range(rounds):
        if condition():
            return
        it.turn()
    assert condition(), (
        f"the condition does not hold after {rounds} rounds: {it.running} requests run, "
        f"{it.waiting} wait"
    )


def turn_until_idle(it: Scheduler) -> None:
    """Run rounds, at least one, until no request runs or waits."""
    it.turn()
    turn_until(it, lambda: not it.running and not it.waiting)
