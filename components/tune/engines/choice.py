"""What a tuning on another engine chose."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from draftwell.components.bench.engines.figures import Figure
from draftwell.components.engines.port import Message
from draftwell.components.engines.vllm_methods import OFF, Method
from draftwell.components.tune.levels import Level


class EngineChoice(Message):
    """What a tuning chose, why, and all that it measured."""

    method: str = Field(description="one of vLLM's methods, or off")
    k: int
    n: int
    schedule: tuple[Annotated[tuple[int, int, int], Field(strict=False)], ...] = Field(
        (), strict=False
    )
    reason: str
    levels: tuple[Level, ...] = Field(
        (), strict=False, description="lengths by load, where several loads were measured"
    )
    explored: tuple[Figure, ...] = Field((), strict=False)
    confirmed: tuple[Figure, ...] = Field((), strict=False)
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

    def of(self, method: Method, reason: str) -> EngineChoice:
        """This way at every load, with all that was measured before."""
        return self.model_copy(
            update={
                "method": method.name,
                "k": method.k,
                "n": method.n,
                "reason": reason,
                "levels": (),
                "schedule": (),
                "scheduled": (),
            }
        )

    def off(self, reason: str) -> EngineChoice:
        """Plain decoding instead, with all that was measured."""
        return self.model_copy(
            update={"method": OFF, "k": 0, "n": 0, "levels": (), "schedule": (), "reason": reason}
        )
