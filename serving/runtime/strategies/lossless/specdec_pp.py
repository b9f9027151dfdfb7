"""SpecDec++: a trained head predicts when a rejection is likely, and drafting stops there (Huang 2024, 2405.19715)."""

from __future__ import annotations

from pydantic import Field, model_validator

from serving.artifacts.acceptance_head import AcceptanceHead
from serving.runtime.acceptance.exact import Exact
from serving.runtime.commands import Step
from serving.runtime.drafting.draft_model import DraftModel
from serving.runtime.drafting.stopping import PredictedRejection
from serving.runtime.schedules.serial import serial
from serving.runtime.session import Session
from serving.runtime.strategies.base import Strategy, StrategyConfig


class SpecDecPP(Strategy):
    name = "specdec_pp"
    lossless = True
    paper = "SpecDec++ (2405.19715), section 4"
    artifacts = ("acceptance_head",)

    class Config(StrategyConfig):
        threshold: float = Field(0.3, ge=0, le=1, description="stop when the predicted chance of any rejection exceeds this")
        min_draft: int = Field(2, ge=1, le=64, description="shortest draft")
        max_draft: int = Field(20, ge=1, le=64, description="longest draft")

        @model_validator(mode="after")
        def _in_order(self) -> SpecDecPP.Config:
            if self.min_draft > self.max_draft:
                raise ValueError("min_draft cannot exceed max_draft")
            return self

    def run(self, session: Session) -> Step[None]:
        config = self.config
        stop = PredictedRejection(self.artifact(AcceptanceHead), config.threshold, config.min_draft, config.max_draft)
        yield from serial(session, DraftModel(stop), Exact())
