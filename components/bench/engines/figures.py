"""Figures of an engine's settings: speed over its plain decoding with an interval, tokens a second, acceptance."""

from __future__ import annotations

from pydantic import Field

from components.bench.engines.measure import Beside
from components.engines.port import Acceptance, Message
from components.report.intervals import expanded_tail, paired_bootstrap_ratio

TAIL = 0.05
"""Left out at each end of an interval."""


class Figure(Message):
    """One way to speculate at one load, compared with plain decoding of the same engine."""

    label: str
    at_once: int = Field(ge=1, description="requests that are decoded at once")
    groups: int = Field(ge=1, description="that the interval is over: prompts where one is sent at a time")
    ratio: float = Field(gt=0, description="times plain decoding's tokens a second")
    low: float
    high: float
    tokens_per_second: float
    plain_tokens_per_second: float
    acceptance: Acceptance = Field(default_factory=Acceptance)

    @property
    def surely_faster(self) -> bool:
        """Whether even the low end is above 1."""
        return self.low > 1.0

    @property
    def surely_slower(self) -> bool:
        """Whether even the high end is below 1."""
        return self.high < 1.0


def figure_of(label: str, beside: Beside, tail: float = TAIL) -> Figure:
    """Compare two sides, with an interval over groups that `tail` is left out of at each end; few groups make it wider."""
    plain, other = beside.plain, beside.other
    groups = len(plain.seconds)
    ratio, low, high = paired_bootstrap_ratio(plain.seconds, plain.tokens, other.seconds, other.tokens, tail=expanded_tail(tail, groups))
    return Figure(label=label, at_once=beside.at_once, groups=groups, ratio=ratio, low=low, high=high,
                  tokens_per_second=sum(other.tokens) / sum(other.seconds),
                  plain_tokens_per_second=sum(plain.tokens) / sum(plain.seconds), acceptance=other.acceptance)
