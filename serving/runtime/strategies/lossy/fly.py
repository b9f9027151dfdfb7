"""FLy: a rejected token stays where the target is undecided and agrees with what follows
(2511.22972)."""

from __future__ import annotations

from pydantic import Field, model_validator

from draftwell.serving.runtime.acceptance.deferred import Deferred, EntropyName
from draftwell.serving.runtime.commands import Step
from draftwell.serving.runtime.drafting.draft_model import DraftModel
from draftwell.serving.runtime.drafting.stopping import FixedLength
from draftwell.serving.runtime.schedules.serial import serial
from draftwell.serving.runtime.session.session import Session
from draftwell.serving.runtime.strategies.base import Strategy, StrategyConfig


class FLy(Strategy):
    name = "fly"
    lossless = False
    paper = "FLy, Li 2025 (2511.22972), section 2.2"
    length_field = "num_speculative_tokens"

    class Config(StrategyConfig):
        num_speculative_tokens: int = Field(
            15, ge=1, le=32, description="K: draft tokens per round"
        )
        entropy: EntropyName = Field(
            "normalised",
            description="of the target's raw distribution: normalised, divided by ln |V| as in "
            "the paper; top3, of the three likeliest tokens in nats as in its code",
        )
        threshold: float = Field(
            0.3, ge=0, description="theta: smallest entropy at which a rejected token may stay"
        )
        window: int = Field(
            6, ge=0, le=31, description="W: tokens behind it that must pass the exact test"
        )

        @model_validator(mode="after")
        def _window_fits(self) -> FLy.Config:
            if self.window >= self.num_speculative_tokens:
                raise ValueError(
                    f"window {self.window} must be below num_speculative_tokens "
                    f"{self.num_speculative_tokens}: else no rejected token could stay"
                )
            return self

    def run(self, session: Session) -> Step[None]:
        config = self.config
        rule = Deferred(
            config.entropy, config.threshold, config.window, self.resources.special_tokens
        )
        yield from serial(session, DraftModel(FixedLength(config.num_speculative_tokens)), rule)
