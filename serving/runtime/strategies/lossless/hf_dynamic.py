"""Dynamic speculation as in transformers' assisted generation: stop after an unlikely token (Mamou
2024, 2405.04304)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import Field

from draftwell.serving.runtime.acceptance.exact import Exact
from draftwell.serving.runtime.commands import Step
from draftwell.serving.runtime.drafting.adaptive import HeuristicLength
from draftwell.serving.runtime.drafting.draft_model import DraftModel
from draftwell.serving.runtime.drafting.stopping import UnlikelyToken
from draftwell.serving.runtime.schedules.serial import serial
from draftwell.serving.runtime.session.session import Session
from draftwell.serving.runtime.strategies.base import Strategy, StrategyConfig, StrategyResources
from draftwell.serving.runtime.strategies.search_space import Span, space
from draftwell.serving.runtime.strategies.speculation import Speculation
from draftwell.serving.runtime.types import Draft, Verdict

FIRST_LENGTH = 5


class HFDynamic(Strategy):
    """The heuristic length is shared by all requests, or starts again with each in deterministic
    mode (docs/methods.md)."""

    name = "hf_dynamic"
    lossless = True
    paper = "Mamou 2024 (2405.04304); transformers' assisted generation"
    replayable = True
    search_space = space(threshold=Span(0.2, 0.8, 0.1), max_draft=(8, 20), heuristic=(False, True))

    class Config(StrategyConfig):
        threshold: float = Field(
            0.4, ge=0, le=1, description="stop after a token of lower draft probability"
        )
        max_draft: int = Field(20, ge=1, le=64, description="longest draft")
        heuristic: bool = Field(
            False,
            description=(
                "the length limit starts at 5, two more when all match, else one fewer; off: "
                "constant"
            ),
        )

    def __init__(self, config: StrategyConfig, resources: StrategyResources):
        super().__init__(config, resources)
        self.shared = self.first_length()

    @classmethod
    def speculation(cls, config: Any) -> Speculation:
        return Speculation("draft", config.max_draft, config.threshold, config.heuristic)

    def run(self, session: Session) -> Step[None]:
        if not self.config.heuristic:
            yield from serial(
                session,
                DraftModel(UnlikelyToken(self.config.threshold, self.config.max_draft)),
                Exact(),
            )
            return
        length = self.first_length() if self.resources.deterministic else self.shared
        stop = UnlikelyToken(self.config.threshold, length.value)

        def learn(draft: Draft, verdict: Verdict) -> None:
            length.learn(draft, verdict)
            stop.num_tokens = length.value

        yield from serial(session, DraftModel(stop), Exact(), learn)

    def learnt(self) -> dict[str, float]:
        return self.shared.learnt() if self.config.heuristic else {}

    def resume(self, learnt: Mapping[str, float]) -> None:
        self.shared.resume(learnt)

    def first_length(self) -> HeuristicLength:
        """The length before anything was learnt."""
        return HeuristicLength(FIRST_LENGTH, self.config.max_draft)
