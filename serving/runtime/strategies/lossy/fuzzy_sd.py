"""Fuzzy speculative decoding: keep a token where draft and target nearly agree (2502.20704)."""

from __future__ import annotations

from collections.abc import Mapping

from pydantic import Field

from draftwell.serving.runtime.acceptance.divergence import DivergenceName, check_support
from draftwell.serving.runtime.acceptance.relaxed import Fuzzy
from draftwell.serving.runtime.commands import Role, Step
from draftwell.serving.runtime.drafting.draft_model import DraftModel
from draftwell.serving.runtime.drafting.stopping import FixedLength
from draftwell.serving.runtime.model import Model
from draftwell.serving.runtime.schedules.serial import serial
from draftwell.serving.runtime.session.session import Session
from draftwell.serving.runtime.strategies.base import (
    DrafterRole,
    Strategy,
    StrategyConfig,
    drafting_with,
)


class FuzzySD(Strategy):
    name = "fuzzy_sd"
    lossless = False
    paper = "Fuzzy speculative decoding (2502.20704), section 3"
    length_field = "num_speculative_tokens"

    class Config(StrategyConfig):
        num_speculative_tokens: int = Field(
            5, ge=1, le=32, description="gamma: draft tokens per round"
        )
        divergence: DivergenceName = Field(
            "js", description="of the raw distributions; the paper's thresholds mean fsd_js"
        )
        tau: float = Field(0.2, ge=0, description="T: largest divergence that is kept")
        drafter: DrafterRole = Field(
            "draft", description="the model that drafts; qualifier: as PyramidSD's baselines do"
        )

    def choose_models(self, models: Mapping[Role, Model]) -> dict[Role, Model]:
        chosen = super().choose_models(drafting_with(self.config.drafter, models))
        check_support(self.config.divergence, chosen["draft"])
        return chosen

    def run(self, session: Session) -> Step[None]:
        drafter = DraftModel(FixedLength(self.config.num_speculative_tokens))
        yield from serial(session, drafter, Fuzzy(self.config.divergence, self.config.tau))
