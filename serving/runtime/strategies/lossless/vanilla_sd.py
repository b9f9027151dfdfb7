"""Speculative decoding with a fixed draft length (Leviathan 2023, Algorithm 1; Chen 2023)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import Field

from draftwell.serving.runtime.acceptance.exact import Exact
from draftwell.serving.runtime.commands import Role, Step
from draftwell.serving.runtime.drafting.draft_model import DraftModel
from draftwell.serving.runtime.drafting.stopping import FixedLength
from draftwell.serving.runtime.output import Model
from draftwell.serving.runtime.schedules.serial import serial
from draftwell.serving.runtime.session.session import Session
from draftwell.serving.runtime.strategies.base import Strategy, StrategyConfig
from draftwell.serving.runtime.strategies.drafter_role import DrafterRole, drafting_with
from draftwell.serving.runtime.strategies.search_space import Span, space
from draftwell.serving.runtime.strategies.speculation import Speculation


class VanillaSD(Strategy):
    name = "vanilla_sd"
    lossless = True
    paper = "Leviathan 2023 (2211.17192), Algorithm 1"
    replayable = True
    search_space = space(num_speculative_tokens=Span(1, 12))

    class Config(StrategyConfig):
        num_speculative_tokens: int = Field(
            5, ge=1, le=32, description="gamma: draft tokens per round"
        )
        draft_first: bool = Field(
            False,
            description="draft before the target has read the prompt, as the papers' loops do: a "
            "longer time "
            "to the first token, and one target call less",
        )
        drafter: DrafterRole = Field(
            "draft", description="the model that drafts; qualifier: as PyramidSD's baselines do"
        )

    @classmethod
    def speculation(cls, config: Any) -> Speculation | None:
        if config.drafter == "qualifier":
            return None  # an engine gets the pair's draft model
        note = ("The prompt is read before anything is drafted.",) if config.draft_first else ()
        return Speculation("draft", config.num_speculative_tokens, notes=note)

    def choose_models(self, models: Mapping[Role, Model]) -> dict[Role, Model]:
        return super().choose_models(drafting_with(self.config.drafter, models))

    def rollout_needed(self) -> int:
        return int(self.config.num_speculative_tokens)

    def run(self, session: Session) -> Step[None]:
        drafter = DraftModel(FixedLength(self.config.num_speculative_tokens))
        yield from serial(session, drafter, Exact(), draft_first=self.config.draft_first)
