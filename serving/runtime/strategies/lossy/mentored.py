"""Mentored decoding: the most acceptance that a budget of divergence from the target buys (Hugging
Face, 2024)."""

from __future__ import annotations

from pydantic import Field

from draftwell.serving.runtime.acceptance.mentored import Mentored as MentoredRule
from draftwell.serving.runtime.commands import Step
from draftwell.serving.runtime.drafting.draft_model import DraftModel
from draftwell.serving.runtime.drafting.stopping import FixedLength
from draftwell.serving.runtime.schedules.serial import serial
from draftwell.serving.runtime.session.session import Session
from draftwell.serving.runtime.strategies.base import Strategy, StrategyConfig


class Mentored(Strategy):
    name = "mentored"
    lossless = False
    paper = "Mentored decoding (Hugging Face, 2024)"
    length_field = "num_speculative_tokens"

    class Config(StrategyConfig):
        num_speculative_tokens: int = Field(
            5, ge=1, le=32, description="gamma: draft tokens per round"
        )
        budget: float = Field(
            0.2,
            ge=0,
            description=(
                "D: KL(p‖π) of the result π from the target's p, in nats; exact at 0 and when "
                "greedy"
            ),
        )

    def run(self, session: Session) -> Step[None]:
        drafter = DraftModel(FixedLength(self.config.num_speculative_tokens))
        yield from serial(session, drafter, MentoredRule(self.config.budget))
