"""Lossy speculative decoding: a rejected token stays if the target finds it likely enough (CSD's
baseline, Eq. 3 alone)."""

from __future__ import annotations

from pydantic import Field

from draftwell.serving.runtime.acceptance.rescue import Rescue
from draftwell.serving.runtime.commands import Step
from draftwell.serving.runtime.drafting.draft_model import DraftModel
from draftwell.serving.runtime.drafting.stopping import FixedLength
from draftwell.serving.runtime.schedules.serial import serial
from draftwell.serving.runtime.session.session import Session
from draftwell.serving.runtime.strategies.base import Strategy, StrategyConfig


class LossySD(Strategy):
    name = "lossy_sd"
    lossless = False
    paper = "CSD, section 5.1 (static lossy SD), Eq. 3"
    length_field = "num_speculative_tokens"

    class Config(StrategyConfig):
        num_speculative_tokens: int = Field(
            5, ge=1, le=32, description="gamma: draft tokens per round"
        )
        tau: float = Field(
            0.6, gt=0, le=1, description="smallest p(x)/p(t*) at temperature 1 that is kept"
        )

    def run(self, session: Session) -> Step[None]:
        rule = Rescue(None, 0, self.config.tau, self.resources.special_tokens)
        yield from serial(
            session, DraftModel(FixedLength(self.config.num_speculative_tokens)), rule
        )
