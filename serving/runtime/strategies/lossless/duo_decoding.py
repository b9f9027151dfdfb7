"""DuoDecoding: draft and target on devices of their own, several sequences where the draft is unsure (Algorithms 1 and 2)."""

from __future__ import annotations

from typing import Any

from pydantic import Field, model_validator

from serving.artifacts.hardware_profile import HardwareProfile
from serving.runtime.acceptance.exact import Exact
from serving.runtime.acceptance.ranked import Ranked
from serving.runtime.commands import Step
from serving.runtime.drafting.multi_sequence import MultiSequence
from serving.runtime.models.onnx.onnx_model import OnnxModel
from serving.runtime.schedules.heterogeneous import heterogeneous
from serving.runtime.session.session import Session
from serving.runtime.strategies.base import Strategy, StrategyConfig
from serving.runtime.strategies.search_space import space
from serving.runtime.strategies.speculation import Speculation

LONGEST = 64


class DuoDecoding(Strategy):
    name = "duo_decoding"
    lossless = True
    paper = "DuoDecoding, Algorithms 1 and 2, section 3.2"
    artifacts = ("hardware_profile",)
    overlaps = True
    prefers_onnx = True
    search_space = space(max_sequences=(1, 8))
    # replayable stays False: a trace holds no drafts of several sequences

    class Config(StrategyConfig):
        num_speculative_tokens: int | None = Field(
            None, ge=1, le=LONGEST, description="gamma: budget of a round; None: how many tokens the draft makes in a verification")
        max_sequences: int = Field(8, ge=1, le=8, description="most sequences that share the budget; 1: a single one (ablation)")
        static_sequences: bool = Field(False, description="always as many as `max_sequences` (ablation, Table 2)")
        budget_offset: int = Field(0, ge=-16, le=16, description="added to a measured gamma (ablation, Table 3)")

        @model_validator(mode="after")
        def _measured(self) -> DuoDecoding.Config:
            if self.budget_offset and self.num_speculative_tokens is not None:
                raise ValueError("budget_offset is added to a measured budget: leave num_speculative_tokens out, or add it there")
            return self

    @classmethod
    def speculation(cls, config: Any) -> Speculation:
        note = "Draft and target do not run at once, and one sequence is drafted: DuoDecoding's overlap and sequences are left out."
        return Speculation("draft", config.num_speculative_tokens, notes=(note,))

    def run(self, session: Session) -> Step[None]:
        drafter = MultiSequence(self.config.max_sequences, static=self.config.static_sequences)
        onnx = isinstance(session.draft.model, OnnxModel)
        yield from heterogeneous(session, drafter, Exact(), Ranked(), self.budget(onnx))

    def budget(self, onnx_draft: bool = False) -> int:
        """Gamma as set, or as measured: round(t_verify / t_draft) and the offset, at least 1."""
        if self.config.num_speculative_tokens is not None:
            return int(self.config.num_speculative_tokens)
        measured = round(self.artifact(HardwareProfile).when(overlapping=True, onnx_draft=onnx_draft).speed_ratio)
        return min(LONGEST, max(1, measured + int(self.config.budget_offset)))
