"""What a tuning on another engine chose."""

from __future__ import annotations

from pydantic import Field

from draftwell.components.bench.engines.figures import Figure
from draftwell.components.engines.port import Message
from draftwell.components.engines.vllm_methods import OFF, Method
from draftwell.components.tune.engines.schedule import Level


class Final(Message):
    """Two settings that were measured beside each other."""

    winner: str
    loser: str
    ratio: float = Field(ge=1, description="the winner's tokens a second over the loser's")
    low: float
    high: float

    def __str__(self) -> str:
        return (
            f"{self.winner} is {self.ratio:.2f} times as fast as {self.loser} beside it "
            f"({self.low:.2f} to {self.high:.2f})"
        )


class EngineChoice(Message):
    """What a tuning chose, why, and all that it measured."""

    method: str = Field(description="one of vLLM's methods, or off")
    k: int
    n: int
    schedule: tuple[tuple[int, int, int], ...] = Field((), strict=False)
    reason: str
    levels: tuple[Level, ...] = Field(
        (), strict=False, description="lengths by load, where several loads were measured"
    )
    explored: tuple[Figure, ...] = Field((), strict=False)
    confirmed: tuple[Figure, ...] = Field((), strict=False)
    finals: tuple[Final, ...] = Field(
        (), strict=False, description="between confirmed ones whose intervals overlap"
    )
    loads: tuple[Figure, ...] = Field(
        (), strict=False, description="of each length that was tried at each load above 1"
    )
    scheduled: tuple[Figure, ...] = Field(
        (), strict=False, description="of the lengths by load, at each load"
    )
    left_out: dict[str, str] = Field(default_factory=dict)

    @property
    def chosen(self) -> Method:
        """The way."""
        return Method(self.method, self.k, self.n, self.schedule)

    @property
    def alone(self) -> Method:
        """The way in which a single request is answered, without lengths for other loads."""
        k = self.levels[0].k if self.levels else self.k
        return self.chosen.with_k(k) if k else Method()

    def off(self, reason: str) -> EngineChoice:
        """Plain decoding instead, with all that was measured."""
        return self.model_copy(
            update={"method": OFF, "k": 0, "n": 0, "levels": (), "schedule": (), "reason": reason}
        )
