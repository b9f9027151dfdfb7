"""SVIP: the draft model's entropy says when to stop (Zhang 2024, 2411.18462)."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from draftwell.serving.runtime.acceptance.exact import Exact
from draftwell.serving.runtime.commands import Step
from draftwell.serving.runtime.drafting.draft_model import DraftModel
from draftwell.serving.runtime.drafting.stopping import HighEntropy
from draftwell.serving.runtime.schedules.serial import serial
from draftwell.serving.runtime.session.session import Session
from draftwell.serving.runtime.strategies.base import Strategy, StrategyConfig
from draftwell.serving.runtime.strategies.search_space import Span, space
from draftwell.serving.runtime.strategies.speculation import Speculation


class SVIP(Strategy):
    name = "svip"
    lossless = True
    paper = "Zhang 2024 (2411.18462), self-verification length policy"
    replayable = True
    search_space = space(threshold=Span(0.15, 0.6, 0.05), max_draft=(8, 16, 40))

    class Config(StrategyConfig):
        threshold: float = Field(
            0.3,
            ge=0,
            le=2,
            description="stop after a token whose sqrt(entropy_scale·H) exceeds this",
        )
        entropy_scale: float = Field(
            0.15, gt=0, le=1, description="what the entropy is multiplied by in the paper's bound"
        )
        max_draft: int = Field(40, ge=1, le=64, description="longest draft")

    @classmethod
    def speculation(cls, config: Any) -> Speculation:
        return Speculation(
            "draft", notes=("SVIP's entropy threshold, which ends drafts, is left out.",)
        )

    def run(self, session: Session) -> Step[None]:
        stop = HighEntropy(self.config.threshold, self.config.max_draft, self.config.entropy_scale)
        yield from serial(session, DraftModel(stop), Exact())
