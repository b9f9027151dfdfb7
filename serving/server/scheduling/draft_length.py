"""Which draft length brings the most tokens per second, by the rounds that a server really runs:
one object for each kind of load.

A length is *in force*. Now and then a few rounds in a row, a *block*, try another one: every second
block plain decoding, as a control, the others a length next to the one in force or one that
promises more. A block counts what it brought, and what the length in force, by its last rounds,
would have brought in the same seconds; the sums of many blocks give the *gain*. So a machine that
becomes slower for all lengths alike changes no comparison. What no block has tried yet is taken
from the hardware profile, corrected by what was measured of other lengths. The length in force
changes only for a gain that is beyond doubt.

How long a block took decides when the next one comes, so blocks have a bounded share of the time:
the more a length may still gain the larger, from 1 in 65 to 1 in 9. Even with drafts that bring
nothing a server makes the rest of the tokens of plain decoding. A block takes longer than its
rounds: drafts of a model that has been idle read the texts first. So it continues for as long as
that took.

Numbers only: no torch, no clock.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

from draftwell.serving.server.scheduling.ratio import Ratio

BLOCK, LONG_BLOCK = 8, 32
"""Rounds of a block that count; and all of one whose drafts had much to read, at most."""
SETTLING = 2
"""Rounds before and after a block that do not: drafts of the first began with the length before; in
the second they catch up with what plain decoding wrote."""
OFTEN, SELDOM = 8, 64
"""The length in force gets at least so many times the seconds of the block before: `OFTEN` where
another may gain `LARGE`, more in inverse proportion where less is to be had, and `SELDOM` where
nothing that would put another in force."""
LARGE, UNTRIED = 0.25, 0.05
"""Gains: a large one, and the least that a length may bring which nothing has tried."""
MEMORY = 128
"""Rounds that the speed of the length in force is the average of, with exponentially falling
weights."""
ENOUGH = 16
"""Rounds of the length in force before a block."""
KEPT = 0.9
"""Weight of a length's earlier blocks at its next one."""
BLOCKS = 3
"""Blocks of a length before it may be put in force."""
CLEAR = 3.0
"""Standard errors by which a gain must exceed 1, or a block differ from those before, to be beyond
doubt."""
MARGIN, PLAIN_MARGIN = 0.04, 0.01
"""Gain of a length that is put in force, and of plain decoding, which is exact about what it costs.
Between the two nothing changes."""
HOPE = 0.85
"""A length is worth a block if it is expected to bring this share of the tokens of the one in
force; the lengths next to it always are."""
CHANGED = 0.25
"""Relative change of the speed in force after which comparisons are repeated soon."""
LONG_AWAY = 256
"""A load that comes back after more time than so many of its rounds take is measured again, since
the machine may have changed."""
LONGEST_ROUND = 4.0
"""A round counts for at most so many usual ones: what the machine did meanwhile is not the
length's."""


@dataclass
class Gain:
    """Tokens of a length over those that the length in force would have brought in the same
    seconds."""

    rounds: Ratio = field(default_factory=Ratio)
    blocks: Ratio = field(default_factory=Ratio)
    confirmed: int = 0
    """Blocks since the last that contradicted the ones before it."""
    predicted: float = 1.0
    """What the prior said of the two lengths at the last block."""

    @classmethod
    def of(cls, block: Sequence[tuple[float, float]], speed: float) -> Gain:
        """Of one block: tokens and seconds of its rounds, and tokens per second of the length in
        force."""
        gain, longest = cls(), LONGEST_ROUND * median(seconds for _, seconds in block)
        for tokens, seconds in block:
            gain.rounds.add(tokens, min(seconds, longest) * speed)
        gain.blocks.add(gain.rounds.above, gain.rounds.below)
        return gain

    @property
    def value(self) -> float:
        return self.blocks.value

    @property
    def error(self) -> float:
        """Standard error, by the scatter of rounds or of blocks, whichever is larger: rounds of one
        block share a moment of the machine. Of two blocks, the older of which has faded, the rounds
        say more."""
        return (
            max(self.rounds.error, self.blocks.error)
            if self.blocks.count >= 2
            else self.rounds.error
        )

    @property
    def doubt(self) -> float:
        """By how much it may be larger than it seems; a few blocks say little."""
        return self.error * (CLEAR if self.confirmed < BLOCKS else 1.0)

    def follow(self, block: Gain) -> bool:
        """Take in a block; True: it contradicts the earlier ones, which are forgotten."""
        doubt = CLEAR * (self.error**2 + block.error**2) ** 0.5
        contradicts = self.blocks.count > 0 and abs(block.value - self.value) > max(
            doubt, CHANGED * self.value
        )
        self.confirmed = 1 if contradicts else self.confirmed + 1
        for own, new in ((self.rounds, block.rounds), (self.blocks, block.blocks)):
            own.fade(0.0 if contradicts else KEPT)
            own.include(new)
        return contradicts

    def rescale(self, factor: float) -> None:
        """Compare with a length that is `factor` times as fast."""
        self.rounds.scale(factor)
        self.blocks.scale(factor)


class DraftLength:
    """The draft length for one kind of load.

    Args:
        prior: lengths that can be chosen, 0 (plain decoding) among them → tokens per second by the
            hardware profile. Only how they compare matters.
        start: the length in force at first, where another kind of load has shown one; None: the
            best of the prior, if it is clearly better than plain decoding.
        measured: try other lengths in blocks; False: the best of the prior stays in force.

    >>> speeds, control = {0: 100.0, 1: 150.0, 2: 120.0}, DraftLength({0: 1.0, 1: 1.0, 2: 1.5})
    >>> control.in_force
    2
    >>> for _ in range(2000):
    ...     control.observe(tokens=1, seconds=1 / speeds[control.length])
    >>> control.in_force, round(control.tokens_per_second()[0])
    (1, 100)
    """

    def __init__(
        self, prior: Mapping[int, float], start: int | None = None, *, measured: bool = True
    ):
        self.prior, self.measured = dict(prior), measured
        self._given = start in self.prior
        self.in_force = start if start is not None and self._given else best_of(self.prior)
        self.trial: int | None = None
        """The length of the block that runs; None: none does."""
        self.switches = 0
        self.rounds_in_force = self.rounds_in_trials = 0
        self._speed = Ratio()  # of the length in force: tokens, seconds
        self._known: float | None = None  # its tokens per second at the last block
        self._gains: dict[int, Gain] = {}
        self._tried: dict[int, int] = {}  # length → number of its last block
        self._blocks = 0
        self._in_force_seconds = self._block_seconds = 0.0
        self._settling, self._left = SETTLING, 0
        self._settled_seconds = 0.0  # of the rounds before the block's
        self._block: list[tuple[float, float]] = []

    @property
    def compared(self) -> bool:
        """Whether any two lengths have been compared."""
        return bool(self._gains)

    def expect(self, prior: Mapping[int, float]) -> None:
        """Replace the prior, since the acceptance of drafts has changed; before anything is
        compared it still decides."""
        self.prior = dict(prior)
        if (
            self.compared
            or self._given
            or self.trial is not None
            or self.in_force == (best := best_of(self.prior))
        ):
            return
        self.in_force, self._speed, self._settling = best, Ratio(), SETTLING

    def outdated(self, away: float) -> bool:
        """Whether the speed of the length in force is of too long ago, the last round being `away`
        seconds past."""
        return self._speed.count > 0 and away > LONG_AWAY * self._speed.mean_below

    def come_back(self, *, after_long: bool) -> None:
        """Another kind of load, or none, was there meanwhile: a block that ran is dropped.

        Args:
            after_long: so long that the speed of the length in force is no longer what rounds of
                now can be compared with.
        """
        self.trial, self._settling, self._block = None, SETTLING, []
        if after_long and self._speed.count:
            self._known, self._speed = self._speed.value, Ratio()

    @property
    def length(self) -> int:
        """Draft tokens for each request in the round that begins."""
        return self.in_force if self.trial is None else self.trial

    def observe(self, tokens: float, seconds: float, *, clean: bool = True) -> None:
        """A round of `length` is over.

        Args:
            tokens: of all requests together.
            clean: it can be compared with others; else only its time counts.
        """
        if self.trial is None:
            self.rounds_in_force += 1
            self._in_force_seconds += seconds
        else:
            self.rounds_in_trials += 1
            # what else the machine did is not the block's
            if not clean and self._speed.count >= ENOUGH:
                seconds = min(seconds, LONGEST_ROUND * self._speed.mean_below)
            self._block_seconds += seconds
            self._left -= 1
        if self._settling:
            self._settling -= 1
            self._settled_seconds = self._block_seconds
        elif clean and seconds > 0:
            self._count(tokens, seconds)
        if self.trial is None:
            self._begin_block()
        elif self._left <= 0 or (
            len(self._block) >= BLOCK and self._block_seconds >= 2 * self._settled_seconds
        ):
            self._end_block(self.trial)

    def tokens_per_second(self) -> dict[int, float]:
        """Length → tokens per second: measured in rounds; where no block has tried a length, by how
        the prior compares it with the one in force. Before anything is measured it is the prior."""
        base = self._speed.value if self._speed.count else self._known
        if base is None:
            return dict(self.prior)
        return {length: base * self._expected(length) for length in self.prior}

    def _expected(self, length: int) -> float:
        """Tokens per second over those of the length in force."""
        if length == self.in_force:
            return 1.0
        # drafts may be kept more, or less, than they were at its last block
        if gain := self._gains.get(length):
            return gain.value * self._predicted(length) / gain.predicted
        known = sorted((*self._gains, self.in_force))
        below = max((tried for tried in known if tried < length), default=known[0])
        above = min((tried for tried in known if tried > length), default=known[-1])
        share = (length - below) / (above - below) if above > below else 0.0
        return self._predicted(length) * self._off(below) ** (1 - share) * self._off(above) ** share

    def _predicted(self, length: int) -> float:
        return self.prior[length] / self.prior[self.in_force]

    def _off(self, length: int) -> float:
        """By what factor the prior was wrong about a length that was tried."""
        return self._expected(length) / self._predicted(length)

    def _count(self, tokens: float, seconds: float) -> None:
        if self.trial is None:
            if self._speed.count >= ENOUGH:
                seconds = min(seconds, LONGEST_ROUND * self._speed.mean_below)
            self._speed.fade(1 - 1 / MEMORY)
            self._speed.add(tokens, seconds)
        else:
            self._block.append((tokens, seconds))

    def _begin_block(self) -> None:
        if not self.measured or self._speed.count < ENOUGH or len(self.prior) == 1:
            return
        trial, hope = self._next_trial()
        if (
            self._in_force_seconds
            < min(SELDOM, OFTEN * max(1.0, LARGE / hope)) * self._block_seconds
        ):
            return
        self.trial = trial
        self._blocks += 1
        self._tried[self.trial] = self._blocks
        self._settling, self._block, self._left = SETTLING, [], LONG_BLOCK
        self._block_seconds = 0.0

    def _next_trial(self) -> tuple[int, float]:
        """What the next block tries, and the largest gain that any length may still prove to have,
        above 0."""
        lengths = sorted(self.prior)
        place = lengths.index(self.in_force)
        beside = {0, *lengths[max(0, place - 1) : place + 2]} - {self.in_force}
        others = [
            length
            for length in lengths
            if length != self.in_force and (length in beside or self._expected(length) >= HOPE)
        ]
        hopes = {
            length: hope for length in others if (hope := self._hope(length)) > margin_of(length)
        }
        largest = max(hopes.values(), default=LARGE * OFTEN / SELDOM)
        drafts = [length for length in hopes or others if length]
        if not drafts or (self.in_force and self._blocks % 2 == 0):
            return 0, largest
        return min(
            drafts, key=lambda length: (self._tried.get(length, 0), -self._expected(length))
        ), largest

    def _hope(self, length: int) -> float:
        """The gain that a length may still prove to have; one of up to `margin_of` would not put it
        in force, however often it is tried."""
        gain, expected = self._gains.get(length), self._expected(length) - 1
        return max(UNTRIED, expected) if gain is None else expected + gain.doubt

    def _end_block(self, length: int) -> None:
        self.trial, self._settling, self._in_force_seconds = None, SETTLING, 0.0
        if len(self._block) < 2:  # prompts were read all the time: it says nothing
            return
        gain = self._gains.setdefault(length, Gain())
        gain.follow(Gain.of(self._block, self._speed.value))
        gain.predicted = self._predicted(length)
        least = gain.value - CLEAR * gain.error
        enough = gain.confirmed >= BLOCKS or (gain.confirmed > 1 and least > 1 + CHANGED)
        if enough and least > 1 and gain.value > 1 + margin_of(length):
            self._put_in_force(length, gain)

    def _put_in_force(self, length: int, gain: Gain) -> None:
        before, factor = self.in_force, gain.value
        del self._gains[length]
        for other in self._gains.values():
            other.rescale(factor)
            other.predicted /= gain.predicted
        self._gains[before] = Gain(
            gain.rounds.inverse(), gain.blocks.inverse(), gain.confirmed, 1 / gain.predicted
        )
        self._known = self._speed.value * factor
        self.in_force, self._speed = length, Ratio()
        self.switches += 1


def margin_of(length: int) -> float:
    """Gain that a length needs to be put in force."""
    return MARGIN if length else PLAIN_MARGIN


def best_of(prior: Mapping[int, float]) -> int:
    """The fastest length of a prior; 0 if it is not clearly faster than plain decoding.

    >>> best_of({0: 1.0, 1: 1.5, 2: 1.2}), best_of({0: 1.0, 1: 1.01})
    (1, 0)
    """
    best = max(prior, key=lambda length: (prior[length], -length))
    return best if prior[best] > (1 + MARGIN) * prior[0] else 0
