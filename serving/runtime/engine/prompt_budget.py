"""How many tokens of prompts a step may read while requests are being answered: as many as keep their pauses short.

All prompt tokens of a step delay everybody's next token by the same time, so the budget is meant in time. What a token of a prompt costs
depends on the model, the machine, and how long the prompt already is; so the number follows the pauses that it made. The more requests
wait for their first token, for each that is being answered, the longer a pause may be: thirty who wait for one count for more than that
one.
"""

from __future__ import annotations

from serving.runtime.engine.prompt_pieces import LEAST

START_TOKENS = 64
"""Budget before any pause was measured."""
EXTRA = 1.75
"""How much longer a pause may become, as a share of the usual one: with what else varies, none is more than three times as long."""
SLOWER, FASTER = 0.5, 1.25
"""By how much the rate at which prompts are read changes at most from one pause to the next."""
TELLING = 12
"""Tokens of prompts in a pause that is long enough to tell the rate."""
CLEAN_EVERY = 12
"""After so many pauses in which prompts were read comes one without, so that the usual pause of those who are now answered is known."""
WEIGHT = 0.3
"""Of the newest pause in the running mean of the usual ones."""


class PromptBudget:
    """Tokens of prompts for the next step.

    Args:
        tokens: a fixed number; None: what the measured pauses allow.

    >>> budget = PromptBudget()
    >>> budget.room(answering=8, waiting=1)
    64
    >>> budget.learn(0.020, 0)
    >>> budget.learn(0.080, 60)
    >>> budget.room(answering=8, waiting=1), budget.room(answering=8, waiting=16)
    (32, 65)
    """

    def __init__(self, tokens: int | None = None):
        self._fixed = tokens
        self._usual: dict[int, float] = {}
        """Seconds of a pause without prompts, by the size of the number that is answered (`size`): many take longer than few."""
        self._rate: float | None = None
        """Tokens of prompts per second."""
        self._unclean = 0
        self._since: float | None = None
        self._read = 0
        self._answering = 1

    def room(self, answering: int, waiting: int) -> int | None:
        """Tokens that the next step may read; None: no limit, for nobody would notice.

        Args:
            answering: requests that are being answered, less those that read a prompt themselves (a draft model does so later).
            waiting: all other requests.
        """
        if not answering:
            self._since, self._read = None, 0
            return None
        self._answering = answering
        if self._fixed is not None:
            return self._fixed
        if self._unclean >= CLEAN_EVERY:
            return 0
        usual = self._usual_pause()
        if usual is None or self._rate is None:
            return START_TOKENS
        return max(LEAST, int(self._rate * EXTRA * usual * max(1.0, waiting / answering) + 1e-6))

    def spend(self, tokens: int) -> None:
        """A step reads so many."""
        self._read += tokens

    def end_pause(self, now: float) -> None:
        """A step brought tokens to requests that had some, at the time `now`, in seconds."""
        if self._since is not None:
            self.learn(now - self._since, self._read)
        self._since, self._read = now, 0

    def learn(self, pause: float, read: int) -> None:
        """Follow one pause of those for whom `room` was asked last.

        Args:
            pause: seconds between two steps that brought tokens to requests that had some.
            read: tokens of prompts that were read in between.
        """
        if not read:
            before = self._usual.get(size(self._answering))
            self._usual[size(self._answering)] = pause if before is None else before + WEIGHT * (pause - before)
            self._unclean = 0
            return
        self._unclean += 1
        usual = self._usual_pause()
        if usual is None or read < TELLING:
            return
        before = self._rate or read / pause  # at first as if all of the pause had been for the prompts
        self._rate = before * min(FASTER, max(SLOWER, read / max(pause - usual, 0.01 * pause) / before))

    def _usual_pause(self) -> float | None:
        """Of as many as are answered now; where they were never seen without prompts, of the number nearest to it."""
        if not self._usual:
            return None
        return self._usual[min(self._usual, key=lambda known: abs(known - size(self._answering)))]


def size(answering: int) -> int:
    """Numbers between two powers of two count as alike.

    >>> [size(n) for n in (1, 2, 3, 4, 7, 8, 32)]
    [1, 2, 2, 3, 3, 4, 6]
    """
    return answering.bit_length()
