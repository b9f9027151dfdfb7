"""CSD: calibrated speculative decoding, rescuing rejected tokens that are benign (CSD, Algorithm
1)."""

from __future__ import annotations

from functools import cached_property

from pydantic import Field, model_validator

from draftwell.serving.artifacts.correction_memory import CorrectionMemory
from draftwell.serving.runtime.acceptance.rescue import Rescue
from draftwell.serving.runtime.commands import Step
from draftwell.serving.runtime.drafting.draft_model import DraftModel
from draftwell.serving.runtime.drafting.stopping import FixedLength
from draftwell.serving.runtime.schedules.serial import serial
from draftwell.serving.runtime.session.session import Session
from draftwell.serving.runtime.strategies.base import Strategy, StrategyConfig


class CSD(Strategy):
    name = "csd"
    lossless = False
    paper = "CSD, Algorithm 1, Eq. 3"
    artifacts = ("correction_memory",)
    bench_only = ("calibration_share",)
    length_field = "num_speculative_tokens"

    class Config(StrategyConfig):
        num_speculative_tokens: int = Field(
            6, ge=1, le=32, description="gamma: draft tokens per round"
        )
        min_count: float = Field(
            6, ge=0, description="lambda: rescue pairs seen at least this often; inf never rescues"
        )
        tau: float = Field(
            0.01, gt=0, le=1, description="smallest p(x)/p(t*) at temperature 1 that is rescued"
        )
        use_memory: bool = Field(True, description="off: the gate alone decides (ablation)")
        use_gate: bool = Field(True, description="off: the memory alone decides (ablation)")
        calibration_share: float = Field(
            1.0,
            ge=0,
            le=1,
            description="share of its calibration that the memory starts from; 0: it starts "
            "empty. Below 1 what it learns is not saved (ablation of Figure 3a, for benches)",
        )

        @model_validator(mode="after")
        def _one_of_them(self) -> CSD.Config:
            if not self.use_memory and not self.use_gate:
                raise ValueError(
                    "use_memory and use_gate cannot both be off: every rejected token would stay"
                )
            return self

    @cached_property
    def memory(self) -> CorrectionMemory:
        """What all requests read and write. First asked for by the thread that decodes, as all of
        `run` is."""
        memory = self.artifact(CorrectionMemory)
        return (
            memory
            if self.config.calibration_share == 1
            else memory.sample(self.config.calibration_share)
        )

    def run(self, session: Session) -> Step[None]:
        memory = self.memory
        rule = Rescue(
            memory.copy() if self.resources.deterministic else memory,
            self.config.min_count,
            self.config.tau,
            self.resources.special_tokens,
            use_memory=self.config.use_memory,
            use_gate=self.config.use_gate,
        )
        yield from serial(
            session, DraftModel(FixedLength(self.config.num_speculative_tokens)), rule
        )
