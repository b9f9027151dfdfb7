"""How many tokens of prompts a step may read: while requests are being answered, as many as keep
their pauses short.

All prompt tokens of a step delay everybody's next token, so the budget is one of time. What a
prompt's first tokens cost depends on the model and the machine; it is measured as prompts are read.
Later tokens attend over more, and count for more than one (`Engine._weight`). The more requests
wait for their first token, for each that is being answered, the longer a pause may be, up to
`LONGEST_PAUSE`: many who wait for a few count for more than those few. While nobody is being
answered there is a limit too, since others may come.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Hashable, Mapping

from draftwell.serving.runtime.engine.piece_sizes import SMALLEST
from draftwell.serving.runtime.engine.prompt_pieces import LONGEST

START_TOKENS = 64
"""Budget before the cost of a token is known; where many wait it grows as pauses do, up to
`LONGEST`."""
MOST_TOKENS = 4096
"""Largest budget, and that of steps in which nobody waits for a next token: some seconds' work,
after which requests that came meanwhile are read as well."""
EXTRA = 1.75
"""How much longer than usual a pause is to become, as a share of the usual one: a little less than
what makes it three times as long, for what else varies. Where `SMALLEST` tokens take longer, as
late in a prompt of very many, it becomes longer still."""
WAITING = 2
"""Pauses grow further where several wait, more than one for every two that are being answered: by
the square of this times the ratio. A burst is then over sooner than with pauses of one length;
growth in proportion, by four times the ratio, did about as well (docs/log.md)."""
LONGEST_PAUSE = 0.5
"""Seconds up to which a pause grows where many wait: the square has no bound of its own, and one
who is answered beside thirty that wait would not get a token until all of them are read."""
SLOWER, FASTER = 0.5, 1.25
"""By how much the rate at which prompts are read changes at most from one pause to the next."""
TELLING = SMALLEST
"""Tokens of prompts in a pause that is long enough to tell the rate."""
CLEAN_EVERY = 12
"""After so many pauses in which prompts were read comes one without, so that the usual pause of
those who are now answered is known."""
REMEMBERED = 5
"""Pauses without prompts of which the usual one is the median: one that something else prolonged
does not count."""


class PromptBudget:
    """Tokens of prompts for the next step.

    Args:
        tokens: a fixed number; None: what the measured pauses allow.

    >>> budget = PromptBudget()
    >>> budget.room("target", answering=8, waiting=1)
    0
    >>> budget.learn(0.020, {})
    >>> budget.room("target", answering=8, waiting=1)
    64
    >>> budget.learn(0.080, {"target": 60})
    >>> (
    ...     budget.room("target", answering=8, waiting=1),
    ...     budget.room("target", answering=8, waiting=16),
    ... )
    (32, 468)
    """

    def __init__(self, tokens: int | None = None):
        self._fixed = tokens
        self._clean: dict[int, deque[float]] = {}
        """Seconds of the last pauses without prompts, by the size of the number that is answered
        (`size`): many take longer than few."""
        self._rates: dict[Hashable, float] = {}
        """First tokens of prompts per second, by model."""
        self._unclean = CLEAN_EVERY  # the first is measured
        self._measuring = False
        self._since: float | None = None
        self._read: dict[Hashable, float] = {}
        self._answering = 1

    @property
    def adapts(self) -> bool:
        """Whether it follows what was measured; a fixed one counts every token alike."""
        return self._fixed is None

    def room(
        self, model: Hashable, answering: int, waiting: int, *, reading: int = 0, readers: int = 1
    ) -> int:
        """Tokens, each by its weight, that a model may read in the next step, besides what was read
        since the last tokens came.

        Args:
            answering: requests that have their first token.
            waiting: requests that have none yet.
            reading: of those that are being answered, the ones that read a prompt themselves (a
                draft model does so later).
            readers: models that have prompts to read; each gets its share.
        Returns:
            0: none now, but in a later step; never where nobody would go on meanwhile.
        """
        self._answering = max(1, answering)
        if not answering:
            self._since, self._read = None, {}
            return MOST_TOKENS
        if reading == answering == 1 and not waiting:  # it reads for itself alone
            return MOST_TOKENS
        if self._fixed is not None:
            return max(SMALLEST, self._fixed // readers)
        goes_on = reading < answering
        if self._unclean >= CLEAN_EVERY and goes_on:
            self._measuring = True
            return 0
        usual, rate, own = self._usual(), self._rates.get(model), self._read.get(model, 0)
        # a single one is no burst
        scale = max(1.0, (WAITING * waiting / answering) ** 2) if waiting > 1 else 1.0
        if usual is None or rate is None:
            left = min(START_TOKENS * scale, LONGEST) / readers - own
        else:
            pause = max(EXTRA * usual, min(EXTRA * usual * scale, LONGEST_PAUSE))
            spent = sum(read / self._rates.get(other, rate) for other, read in self._read.items())
            left = rate * min(pause - spent, pause / readers - own / rate)
        if left < SMALLEST and own and goes_on:
            return 0
        return max(SMALLEST, min(MOST_TOKENS, int(left + 1e-6)))

    def spend(self, model: Hashable, tokens: float) -> None:
        """A model reads so many tokens of prompts, by their weights, in the step that begins."""
        if tokens:
            self._read[model] = self._read.get(model, 0) + tokens

    def end_pause(self, now: float) -> None:
        """A step brought tokens to requests that had some, at the time `now`, in seconds."""
        if self._since is not None:
            self.learn(now - self._since, self._read)
        self._since, self._read = now, {}

    def learn(self, pause: float, read: Mapping[Hashable, float]) -> None:
        """Follow one pause of those for whom `room` was asked last.

        Args:
            pause: seconds between two steps that brought tokens to requests that had some.
            read: tokens of prompts that were read in between, by their weights, for each model.
        """
        measured, self._measuring = self._measuring, False
        if not read:
            self._clean.setdefault(size(self._answering), deque(maxlen=REMEMBERED)).append(pause)
            self._unclean = 0
            return
        # prompts of a few tokens are always read: where they come without end, the next attempt is
        # as far off as the last
        self._unclean = 0 if measured else self._unclean + 1
        usual, tokens = self._usual(), sum(read.values())
        if usual is None or tokens < TELLING:
            return
        for model in read:  # at first as if all of the pause had been for the prompts
            self._rates.setdefault(model, tokens / max(pause, 1e-9))
        expected = sum(count / self._rates[model] for model, count in read.items())
        factor = min(FASTER, max(SLOWER, expected / max(pause - usual, 0.01 * pause, 1e-9)))
        for model in read:
            self._rates[model] *= factor

    def _usual(self) -> float | None:
        """The usual pause of as many as are answered now; where they were never seen without
        prompts, of the number nearest to it."""
        if not self._clean:
            return None
        return statistics.median(
            self._clean[min(self._clean, key=lambda known: abs(known - size(self._answering)))]
        )


def size(answering: int) -> int:
    """Numbers between two powers of two count as alike.

    >>> [size(n) for n in (1, 2, 3, 4, 7, 8, 32)]
    [1, 2, 2, 3, 3, 4, 6]
    """
    return answering.bit_length()
