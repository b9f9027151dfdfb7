"""How long rounds take and what they bring: what a server's control of draft lengths is fed with
(server/scheduling/load_control.py)."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple


class Round(NamedTuple):
    """What lies between two steps that brought tokens to requests that had some: drafting,
    verifying, and everything beside it.

    Args:
        seconds: wall time.
        tokens: what those requests got, together.
        clean: no prompt was read meanwhile, by the target or by a draft; a few tokens that a draft
            had missed do not count.
    """

    seconds: float
    tokens: int
    clean: bool


class RoundMeter:
    """Measures the rounds of an engine.

    Args:
        clock: seconds, as `time.perf_counter`.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter):
        self.clock = clock
        self._last: Round | None = None
        self._since: float | None = None
        self._clean = True

    def take(self) -> Round | None:
        """The round that the last step ended, once; None: it ended none."""
        last, self._last = self._last, None
        return last

    def read_prompts(self) -> None:
        """The step that begins reads tokens of prompts."""
        self._clean = False

    def forget(self) -> None:
        """Nobody runs any more: what comes next is no round."""
        self._last = self._since = None

    def end_step(self, tokens: int, *, idle: bool) -> None:
        """A step is over.

        Args:
            tokens: what it brought to requests that had some.
            idle: nobody runs any more, so that what comes next is no round.
        """
        self._last = None
        if tokens:
            now = self.clock()
            if self._since is not None:
                self._last = Round(now - self._since, tokens, self._clean)
            self._since, self._clean = now, True
        if idle:
            self._since = None
