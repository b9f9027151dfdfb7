"""A generator on its way: advanced from command to command by the engine."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterator
from contextlib import ExitStack
from typing import Any

from draftwell.serving.runtime.commands import Decision, Forward, Overlap
from draftwell.serving.runtime.logits import Span


class Task:
    """A generator that is advanced until it waits for a forward pass, or for a decision on rows
    that it was given; an `Overlap` makes it wait for child tasks.

    Of the forward pass that it waits for, `read` tokens have been run, and `piece` is run next
    (prompt_pieces.py); `rows` are those of earlier pieces that are wanted (`Forward.rates`).
    `seconds` is the time that its forward passes took; `overlaps` has, for every `Overlap` that is
    over, the seconds from its start to its end and the seconds of its longer side's forward passes:
    equal if the shorter side cost nothing.
    """

    def __init__(self, steps: Generator[Any, Any, Any]):
        self.steps = steps
        self.waiting: Forward | None = None
        self.deciding: Decision | None = None
        self.flying = False
        self.piece: Forward | None = None
        self.read = 0
        self.rows: list[Span] = []
        self.children: list[Task] = []
        self.done = False
        self.result: Any = None
        self.seconds = 0.0
        self.overlaps: list[tuple[float, float]] = []
        self._parted = 0.0

    def resume(self, value: Any = None) -> None:
        """Send a value and run to the next command."""
        self.waiting, self.flying, self.piece, self.read, self.rows = None, False, None, 0, []
        self.deciding = None
        try:
            command = self.steps.send(value)
        except StopIteration as stop:
            self.done, self.result = True, stop.value
            return
        if isinstance(command, Overlap):
            self._parted = time.perf_counter()
            self.children = [Task(side) for side in command.sides]
            for child in self.children:
                child.resume()
            self.join()
        elif isinstance(command, Forward):
            self.waiting = command
        else:
            self.deciding = command

    def land_piece(self, span: Span) -> Span | None:
        """Note that the piece has been run, and what was said of it; return that of the whole
        forward pass if it was the last one."""
        assert self.waiting is not None
        assert self.piece is not None
        self.read += len(self.piece.tokens)
        self.flying = False
        if self.read == len(self.waiting.tokens):
            return Span.joined([*self.rows, span]) if self.rows else span
        if self.waiting.rates:
            # a copy: else all rows of its batch stay in memory
            self.rows.append(Span.joined([span]))
        return None

    @property
    def reading(self) -> bool:
        """Whether tokens of its forward pass will be left once the next piece has been run."""
        return (
            self.waiting is not None
            and self.piece is not None
            and self.read + len(self.piece.tokens) < len(self.waiting.tokens)
        )

    def wrap(
        self, around: Callable[[Generator[Any, Any, Any], Forward], Generator[Any, Any, Any]]
    ) -> None:
        """Put a generator around what is left of this one, which waits for a forward pass: that is
        what it must yield first."""
        assert self.waiting is not None
        self.steps = around(self.steps, self.waiting)
        self.waiting = next(self.steps)

    def join(self) -> None:
        """Go on once all children are done."""
        for child in self.children:
            child.join()
        if self.children and all(child.done for child in self.children):
            longer = max(child.seconds for child in self.children)
            self.seconds += longer
            self.overlaps.append((time.perf_counter() - self._parted, longer))
            results = tuple(child.result for child in self.children)
            self.children = []
            self.resume(results)

    def leaves(self) -> Iterator[Task]:
        """The tasks below that wait for a forward pass or a decision."""
        if self.waiting is not None or self.deciding is not None:
            yield self
        for child in self.children:
            yield from child.leaves()

    def close(self) -> None:
        """Close all generators, each of them even if another raises while it is closed."""
        with ExitStack() as closing:
            closing.callback(self.steps.close)
            for child in self.children:
                closing.callback(child.close)
