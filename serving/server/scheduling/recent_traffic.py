"""What requests were like of late: how much of their drafts was kept, how long their prompts were,
and how many ran at once."""

from __future__ import annotations

from dataclasses import dataclass

REQUEST_WEIGHT = 8.0
"""Draft tokens of its strategy's acceptance that a request begins with."""
STEADY = 1 / 128
"""Weight of a round in what the load usually is. Requests come and go in every other round: if each
made another kind of load, drafts would begin and end all the time, whose model then reads all that
it has missed, and blocks that compare lengths would be cut."""


@dataclass
class Acceptance:
    """The acceptance rate α of recent draft tokens; a typical rate before there are any."""

    USUAL, WEIGHT, MEMORY = 0.7, 16, 2048

    judged: float = 0.0
    accepted: float = 0.0

    @property
    def rate(self) -> float:
        return (self.accepted + self.USUAL * self.WEIGHT) / (self.judged + self.WEIGHT)

    def rate_beside(self, usual: float) -> float:
        """As `rate`, of one request among many whose rate is `usual`."""
        return (self.accepted + usual * REQUEST_WEIGHT) / (self.judged + REQUEST_WEIGHT)

    def fade(self, weight: float) -> None:
        """Weigh what was counted so far by `weight`."""
        self.judged, self.accepted = self.judged * weight, self.accepted * weight

    def learn(self, judged: int, accepted: int) -> None:
        """Count verified draft tokens; older ones lose weight."""
        self.judged, self.accepted = self.judged + judged, self.accepted + accepted
        if self.judged > self.MEMORY:
            self.judged, self.accepted = self.judged / 2, self.accepted / 2


@dataclass
class Prompts:
    """Prompt tokens per generated token of recent requests; 1 before there are any."""

    WEIGHT, MEMORY = 256, 8192

    read: float = 0.0
    written: float = 0.0

    @property
    def rate(self) -> float:
        return (self.read + self.WEIGHT) / (self.written + self.WEIGHT)

    def learn(self, read: int, written: int) -> None:
        """Count a complete answer; older ones lose weight."""
        self.read, self.written = self.read + read, self.written + written
        if self.read + self.written > self.MEMORY:
            self.read, self.written = self.read / 2, self.written / 2


@dataclass
class UsualLoad:
    """How many requests run together, and tokens of a text: more requests count at once, fewer and
    other texts by and by.

    >>> load = UsualLoad()
    >>> load.beside(8, 200.0)
    (8, 200.0)
    >>> load.learn(1, 200.0)
    >>> load.beside(1, 200.0)
    (8, 200.0)
    """

    requests: float = 0.0
    context: float = 0.0
    """Tokens; 0 before there is any text."""

    def learn(self, requests: int, context: float) -> None:
        """Take in a round."""
        self.requests += STEADY * (requests - self.requests)
        self.context = self.context + STEADY * (context - self.context) if self.context else context

    def beside(self, requests: int, context: float) -> tuple[int, float]:
        """The load as it has been for some time, beside what there is now: at least as many
        requests."""
        self.requests, self.context = max(self.requests, float(requests)), self.context or context
        return round(self.requests), self.context
