"""SpecDec++: a trained head predicts when a rejection is likely, and drafting stops there (Huang
2024, 2405.19715)."""

from __future__ import annotations

from typing import Any

from pydantic import Field, model_validator

from draftwell.serving.artifacts.acceptance_head import AcceptanceHead
from draftwell.serving.runtime.acceptance.exact import Exact
from draftwell.serving.runtime.commands import Step
from draftwell.serving.runtime.drafting.draft_model import DraftModel
from draftwell.serving.runtime.drafting.stopping import PredictedRejection
from draftwell.serving.runtime.schedules.serial import serial
from draftwell.serving.runtime.session.session import Session
from draftwell.serving.runtime.strategies.base import Strategy, StrategyConfig
from draftwell.serving.runtime.strategies.search_space import Span, space
from draftwell.serving.runtime.strategies.speculation import Speculation


class SpecDecPP(Strategy):
    name = "specdec_pp"
    lossless = True
    paper = "SpecDec++ (2405.19715), section 4"
    artifacts = ("acceptance_head",)
    replayable = True
    search_space = space(threshold=Span(0.1, 0.9, 0.1), max_draft=(5, 10, 20))

    class Config(StrategyConfig):
        threshold: float = Field(
            0.3,
            ge=0,
            le=1,
            description="stop when the predicted chance of any rejection exceeds this",
        )
        min_draft: int = Field(2, ge=1, le=64, description="shortest draft")
        max_draft: int = Field(20, ge=1, le=64, description="longest draft")

        @model_validator(mode="after")
        def _in_order(self) -> SpecDecPP.Config:
            if self.min_draft > self.max_draft:
                raise ValueError("min_draft cannot exceed max_draft")
            return self

    @classmethod
    def speculation(cls, config: Any) -> Speculation:
        return Speculation("draft", notes=("The acceptance head, which ends drafts, is left out.",))

    def run(self, session: Session) -> Step[None]:
        config = self.config
        stop = PredictedRejection(
            self.artifact(AcceptanceHead), config.threshold, config.min_draft, config.max_draft
        )
        yield from serial(session, DraftModel(stop), Exact())
