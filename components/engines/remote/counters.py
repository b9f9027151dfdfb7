"""What an engine's metrics say at a moment: sums since its start, and two gauges."""

from __future__ import annotations

from pydantic import Field

from draftwell.components.engines.port import Message

SUMS = (
    *("requests", "prompt_tokens", "cached_prompt_tokens", "new_tokens", "rounds", "drafted"),
    *("accepted", "decode_seconds", "decode_steps"),
)
"""Fields that only grow while an engine runs."""


class Counters(Message):
    """Counters of an engine since its start; None where it does not say."""

    at: float = Field(description="when they were read, Unix seconds")
    started: float | None = Field(None, description="when the engine started, Unix seconds")
    version: str | None = None
    requests: int | None = Field(None, description="that have ended")
    prompt_tokens: int | None = None
    cached_prompt_tokens: int | None = Field(None, description="of these, read from a cache")
    new_tokens: int | None = None
    rounds: int | None = Field(None, description="in which the target verified a draft")
    drafted: int | None = None
    accepted: int | None = None
    accepted_at: tuple[int, ...] = Field(
        (), strict=False, description="accepted tokens by position in the draft; (): not said"
    )
    running: int | None = Field(None, description="requests that are decoded now")
    waiting: int | None = Field(None, description="requests that wait now")
    decode_seconds: float | None = Field(
        None, description="sum of the seconds that each output token took, over `decode_steps`"
    )
    decode_steps: int | None = Field(None, description="how many times `decode_seconds` adds")

    def since(self, before: Counters) -> Counters | None:
        """What was added since `before`: its sums are differences, its times, version and gauges
        are those of now. None where the engine was started again or a sum fell; where only one
        side says something, it is not said.

        >>> Counters(at=9.0, rounds=7).since(Counters(at=5.0, rounds=4)).rounds
        3
        """
        if (self.started, self.version) != (before.started, before.version):
            return None
        sums = {name: less(getattr(self, name), getattr(before, name)) for name in SUMS}
        accepted_at = differences(self.accepted_at, before.accepted_at)
        # where it follows from others that are not read at one moment, this one may fall alone
        if (accepted := sums["accepted"]) is not None:
            sums["accepted"] = max(0, accepted)
        known = [value for value in (*sums.values(), *accepted_at) if value is not None]
        if any(value < 0 for value in known):
            return None
        return self.model_copy(update={**sums, "accepted_at": accepted_at})


def less(now: float | None, before: float | None) -> float | None:
    """A difference, where both sides are known."""
    return None if now is None or before is None else now - before


def differences(now: tuple[int, ...], before: tuple[int, ...]) -> tuple[int, ...]:
    """Differences by place, where both sides say something; a place that is new began at 0."""
    if not now or not before:
        return ()
    longer = before + (0,) * (len(now) - len(before))
    return tuple(a - b for a, b in zip(now, longer, strict=False))
