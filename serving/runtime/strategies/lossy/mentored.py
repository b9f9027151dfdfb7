"""Mentored decoding: the most acceptance that a budget of divergence from the target buys (Hugging
Face, 2024)."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from draftwell.serving.runtime.acceptance.mentored import Mentored as MentoredRule
from draftwell.serving.runtime.commands import Step
from draftwell.serving.runtime.drafting.draft_model import DraftModel
from draftwell.serving.runtime.drafting.stopping import FixedLength
from draftwell.serving.runtime.schedules.serial import serial
from draftwell.serving.runtime.session.session import Session
from draftwell.serving.runtime.strategies.base import Strategy, StrategyConfig
from draftwell.serving.runtime.strategies.search_space import space
from draftwell.serving.runtime.strategies.speculation import Speculation


class Mentored(Strategy):
    name = "mentored"
    lossless = False
    paper = "Mentored decoding (Hugging Face, 2024)"
    search_space = space(num_speculative_tokens=(3, 5, 7), budget=(0.05, 0.1, 0.2, 0.4))

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

    @classmethod
    def speculation(cls, config: Any) -> Speculation:
        return Speculation(
            "draft",
            config.num_speculative_tokens,
            notes=("The divergence budget of mentored decoding is left out.",),
        )

    def run(self, session: Session) -> Step[None]:
        drafter = DraftModel(FixedLength(self.config.num_speculative_tokens))
        yield from serial(session, drafter, MentoredRule(self.config.budget))
