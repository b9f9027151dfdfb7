"""A ratio of two sums of what was observed, with its standard error; earlier observations can lose
weight."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Ratio:
    """Σ above / Σ below, and not the mean of ratios, in which a short round would weigh as much as
    a long one.

    >>> speed = Ratio()
    >>> for tokens, seconds in ((10, 1.0), (10, 3.0)):
    ...     speed.add(tokens, seconds)
    >>> speed.value, speed.count
    (5.0, 2.0)
    """

    above: float = 0.0
    below: float = 0.0
    count: float = 0.0
    _squares: tuple[float, float, float] = (0.0, 0.0, 0.0)  # of above, of both, of below

    @property
    def value(self) -> float:
        """The ratio; 0 before anything was observed."""
        return self.above / self.below if self.below else 0.0

    @property
    def mean_below(self) -> float:
        """Σ below for each observation."""
        return self.below / self.count if self.count else 0.0

    @property
    def error(self) -> float:
        """Standard error, by how observations scatter around the ratio; infinite with fewer than
        two."""
        if self.count < 2 or not self.below:
            return float("inf")
        above, both, below = self._squares
        scatter = max(0.0, above - 2 * self.value * both + self.value**2 * below)
        return float((scatter * self.count / (self.count - 1)) ** 0.5 / self.below)

    def add(self, above: float, below: float) -> None:
        """Count an observation."""
        self.include(Ratio(above, below, 1.0, (above * above, above * below, below * below)))

    def include(self, other: Ratio) -> None:
        """Count what another one has counted."""
        self.above, self.below, self.count = (
            self.above + other.above,
            self.below + other.below,
            self.count + other.count,
        )
        first, second, third = (
            mine + its for mine, its in zip(self._squares, other._squares, strict=True)
        )
        self._squares = first, second, third

    def fade(self, weight: float) -> None:
        """Weigh what was observed so far by `weight`."""
        self.above, self.below, self.count = (
            self.above * weight,
            self.below * weight,
            self.count * weight,
        )
        above, both, below = self._squares
        self._squares = above * weight, both * weight, below * weight

    def scale(self, factor: float) -> None:
        """Multiply what is below by `factor`."""
        above, both, below = self._squares
        self.below, self._squares = (
            self.below * factor,
            (above, both * factor, below * factor * factor),
        )

    def inverse(self) -> Ratio:
        """The same with above and below exchanged."""
        return Ratio(
            self.below,
            self.above,
            self.count,
            (self._squares[2], self._squares[1], self._squares[0]),
        )
