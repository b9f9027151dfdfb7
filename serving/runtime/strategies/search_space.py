"""How a strategy class declares the values of its parameters that a tuner may try."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Span:
    """Numbers from `low` to `high`, both included, in steps.

    >>> Span(0.1, 0.3, 0.1).values
    (0.1, 0.2, 0.3)
    """

    low: float
    high: float
    step: float = 1

    @property
    def values(self) -> tuple[float, ...]:
        """The numbers one by one."""
        count = round((self.high - self.low) / self.step) + 1
        return tuple(self._plain(self.low + i * self.step) for i in range(count))

    @property
    def whole(self) -> bool:
        """Whether all of them are integers."""
        return all(float(number).is_integer() for number in (self.low, self.high, self.step))

    def _plain(self, value: float) -> float:
        return int(value) if self.whole else round(value, 6)


Space = Mapping[str, Span | tuple[Any, ...]]
"""Parameter → its values, as a range or one by one."""


def space(**values: Span | tuple[Any, ...]) -> Space:
    """A search space, parameter by parameter.

    >>> space(num_speculative_tokens=Span(1, 12))
    {'num_speculative_tokens': Span(low=1, high=12, step=1)}
    """
    return values
