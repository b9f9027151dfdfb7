"""Lossy speculative decoding: a rejected token stays if the target finds it likely enough (CSD's
baseline, Eq. 3 alone)."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from draftwell.serving.runtime.acceptance.rescue import Rescue
from draftwell.serving.runtime.commands import Step
from draftwell.serving.runtime.drafting.draft_model import DraftModel
from draftwell.serving.runtime.drafting.stopping import FixedLength
from draftwell.serving.runtime.schedules.serial import serial
from draftwell.serving.runtime.session.session import Session
from draftwell.serving.runtime.strategies.base import Strategy, StrategyConfig
from draftwell.serving.runtime.strategies.search_space import space
from draftwell.serving.runtime.strategies.speculation import Speculation


class LossySD(Strategy):
    name = "lossy_sd"
    lossless = False
    paper = "CSD, section 5.1 (static lossy SD), Eq. 3"
    search_space = space(num_speculative_tokens=(3, 5, 7), tau=(0.3, 0.45, 0.6, 0.8))

    class Config(StrategyConfig):
        num_speculative_tokens: int = Field(
            5, ge=1, le=32, description="gamma: draft tokens per round"
        )
        tau: float = Field(
            0.6, gt=0, le=1, description="smallest p(x)/p(t*) at temperature 1 that is kept"
        )

    @classmethod
    def speculation(cls, config: Any) -> Speculation:
        return Speculation(
            "draft",
            config.num_speculative_tokens,
            notes=("lossy_sd's threshold on p(x)/p(t*) is left out.",),
        )

    def run(self, session: Session) -> Step[None]:
        rule = Rescue(None, 0, self.config.tau, self.resources.special_tokens)
        yield from serial(
            session, DraftModel(FixedLength(self.config.num_speculative_tokens)), rule
        )
