"""What the watchdog says: limits, probes, and alarms with their evidence. Plain data."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from draftwell.components.engines.port import Acceptance, Message
from draftwell.serving.settings import Settings

Cause = Literal[
    "drift_of_traffic",
    "context_length",
    "stale_draft",
    "dead_draft",
    "load_crossover",
    "build_change",
    "prefix_cache",
    "machine",
    "metrics_lost",
]


class WatchLimits(Settings):
    """What counts as an alarm. Falls and rises are relative to the baseline."""

    called, error_code = "limit", "bad_watch_limit"

    acceptance: float = Field(0.08, gt=0, lt=1, description="fall of the tokens of a round")
    speed: float = Field(0.06, gt=0, lt=1, description="rise of a round's seconds at equal load")
    cache: float = Field(0.5, gt=0, lt=1, description="fall of the prefix cache's hits")
    quiet_days: float = Field(30, gt=0, description="days between two false alarms, at least")
    baseline_windows: int = Field(120, ge=30, description="quiet windows that a baseline takes")
    warm_up_seconds: float = Field(300, ge=0, description="after a start that are not judged")
    lost_seconds: float = Field(300, gt=0, description="without a sample that are an alarm")
    gap_seconds: float = Field(900, gt=0, description="a longer window is not judged")


class Probe(Message):
    """A request of the watchdog's own: a fixed prompt, decoded greedily."""

    at: float = Field(description="when it was answered, Unix seconds")
    name: str = Field(description="of the fixed prompt: equal names are equal prompts")
    kind: str = Field(description="of prompt, such as code; the same kind in several lengths")
    prompt_tokens: int = Field(ge=1)
    new_tokens: int = Field(ge=1)
    seconds: float = Field(gt=0, description="of the answer after its first token")
    plain: bool = Field(False, description="decoded without speculation")
    elsewhere: bool = Field(False, description="by another engine than the one that is watched")
    answered: bool = Field(True, description="in time; else it only made others slower")
    acceptance: Acceptance | None = None
    at_once: float | None = Field(
        None, ge=0, description="requests that the engine decoded meanwhile, this one among them"
    )

    @property
    def seconds_per_token(self) -> float:
        """Seconds of an output token."""
        return self.seconds / self.new_tokens


class Evidence(Message):
    """One figure against its baseline and its limit."""

    name: str
    value: float
    baseline: float | None
    limit: float | None
    interval: tuple[float, float] | None = Field(None, strict=False, description="95 %")
    p: float | None = Field(None, description="holds at every look, whenever one stops")
    words: str


class Alarm(Message):
    """What has happened, since when, how that is known, and what to do."""

    cause: Cause
    or_else: tuple[Cause, ...] = Field(
        (), strict=False, description="causes that the evidence does not rule out"
    )
    since: float = Field(description="estimated beginning, Unix seconds")
    seen: float = Field(description="when the evidence sufficed, Unix seconds")
    until: float | None = Field(None, description="end, Unix seconds; None: it stands")
    evidence: tuple[Evidence, ...] = Field(strict=False)
    remedy: str
    to_tell: str = Field("", description="what would tell the causes apart; empty: nothing is open")
    switch_off_above: int | None = Field(
        None, description="requests at once above which plain decoding is faster"
    )
