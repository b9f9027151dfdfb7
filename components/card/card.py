"""What a card says, as data: one place for the table, the HTML page, the picture and the server."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from pydantic import Field, ValidationInfo, field_validator

from draftwell.components.bench.schema import Frozen
from draftwell.components.report.tables import beside

FORMAT = 1
FEWEST_CONFIRMING = 16
"""Prompts of the gate, with fewer of which a card says that it is not yet sure."""
WIDEST = 0.12
"""Half of a sure interval's width at most, as a share of the ratio."""
FEWEST_FOR_INTERVAL = 4
"""Prompts. Two or three give ends that are far too wide or, by resampling, far too narrow."""

PLAIN = ("autoregressive", "off")
"""Plain decoding, as our own engine and others call it."""


class Speed(Frozen):
    """How many times as fast as plain decoding, on the same prompts in the same run."""

    name: str
    """Kind of prompt, number of requests at once, or strategy."""
    ratio: float
    prompts: int
    """0 of a prediction."""
    low: float | None = None
    high: float | None = None
    """Ends of the 90 % interval over prompts; None where there were fewer than four."""
    tokens_per_second: float | None = None

    @field_validator("low", "high")
    @classmethod
    def _few_have_none(cls, end: float | None, given: ValidationInfo) -> float | None:
        return end if given.data.get("prompts", 0) >= FEWEST_FOR_INTERVAL else None


class Tried(Frozen):
    """A setting that tuning measured, on prompts of its own, or replayed, and that was not
    chosen."""

    speed: Speed
    parameters: dict[str, Any] = Field(default_factory=dict)
    why_not: str


class Card(Frozen):
    """The outcome of `draftwell tune`. Ratios are those of the gate's prompts, which nothing was
    chosen on, but for what was tried."""

    format: int = FORMAT
    version: str
    made: datetime
    seconds: float
    """That the command ran; earlier runs that it continued are not in it."""
    pair: str
    target: str
    draft: str | None
    engine: str
    """draftwell, or an engine's name with its version and address."""
    machine: str
    dtype: str
    fits: str
    """Whether the target fits this machine, and how many requests at once."""
    memory_bytes: int | None
    """Of the process at its highest, with the choice."""
    strategy: str
    parameters: dict[str, Any]
    speed: Speed | None
    """Of the choice; None where plain decoding was chosen, or nothing was measured."""
    by_kind: tuple[Speed, ...] = ()
    by_requests: tuple[Speed, ...] = ()
    exact: bool
    """Whether the choices are lossless and the target's passes give one answer under any load, as
    `/v1/models` says it of a bundle."""
    loses: str | None = None
    """Of a lossy choice: what it loses, with the figure, as a clause."""
    tried: tuple[Tried, ...] = ()
    own_device: str | None = None
    """What a device of its own for the draft would give by formula, as a clause."""
    others: float | None = None
    """Cores that the gate's threads lacked, because other processes used them; None where nobody
    looked."""
    verdict: str
    """passed, failed or undecided, by the gate."""
    needs: str | None = None
    """What it would take to be sure; None where the card is."""
    release: int | None = None
    bundle: str | None = None
    next_command: str

    @property
    def plain(self) -> bool:
        """Whether plain decoding was chosen."""
        return self.strategy in PLAIN

    @property
    def sure(self) -> bool:
        """Whether the gate decided, on enough prompts, no other process disturbed it, and the
        interval is narrow enough; plain decoding needs nothing of that."""
        if self.speed is None or self.verdict == "undecided":
            return self.plain
        if beside(self.others):
            return False
        low, high = self.speed.low, self.speed.high
        if low is None or high is None or self.speed.prompts < FEWEST_CONFIRMING:
            return False
        return (high - low) / 2 <= WIDEST * self.speed.ratio
