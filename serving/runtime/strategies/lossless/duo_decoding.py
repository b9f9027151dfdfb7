"""DuoDecoding: draft and target on devices of their own, several sequences where the draft is
unsure (Algorithms 1 and 2)."""

from __future__ import annotations

from pydantic import Field, model_validator

from draftwell.serving.artifacts.forward_costs import in_one_pass as in_one_pass
from draftwell.serving.artifacts.hardware_profile import HardwareProfile
from draftwell.serving.runtime.acceptance.exact import Exact
from draftwell.serving.runtime.acceptance.tree import Ranked
from draftwell.serving.runtime.commands import Step
from draftwell.serving.runtime.drafting.multi_sequence import MultiSequence
from draftwell.serving.runtime.models.onnx.onnx_model import OnnxModel
from draftwell.serving.runtime.schedules.heterogeneous import heterogeneous
from draftwell.serving.runtime.session.session import Session
from draftwell.serving.runtime.strategies.base import Strategy, StrategyConfig

LONGEST = 64


class DuoDecoding(Strategy):
    name = "duo_decoding"
    lossless = True
    paper = "DuoDecoding, Algorithms 1 and 2, section 3.2"
    artifacts = ("hardware_profile",)
    overlaps = True
    prefers_onnx = True

    class Config(StrategyConfig):
        num_speculative_tokens: int | None = Field(
            None,
            ge=1,
            le=LONGEST,
            description="gamma: budget of a round; None: how many tokens the draft makes in a "
            "verification, and no "
            "sequence longer than the target verifies in about one pass",
        )
        max_sequences: int = Field(
            8,
            ge=1,
            le=8,
            description="most sequences that share the budget; 1: a single one (ablation)",
        )
        static_sequences: bool = Field(
            False, description="always as many as `max_sequences` (ablation, Table 2)"
        )
        budget_offset: int = Field(
            0,
            ge=-16,
            le=16,
            description="added to a measured gamma and to its longest sequence (ablation, Table 3)",
        )

        @model_validator(mode="after")
        def _measured(self) -> DuoDecoding.Config:
            if self.budget_offset and self.num_speculative_tokens is not None:
                raise ValueError(
                    "budget_offset is added to a measured budget: leave "
                    "num_speculative_tokens out, or add it there"
                )
            return self

    def run(self, session: Session) -> Step[None]:
        budget, longest = self.lengths(isinstance(session.draft.model, OnnxModel))
        drafter = MultiSequence(
            self.config.max_sequences, static=self.config.static_sequences, longest=longest
        )
        yield from heterogeneous(session, drafter, Exact(), Ranked(), budget)

    @property
    def longest_draft(self) -> int | None:
        measured = HardwareProfile.kind in self.resources.artifacts
        return self.lengths()[0] if self.config.num_speculative_tokens or measured else None

    def lengths(self, onnx_draft: bool = False) -> tuple[int, int]:
        """Gamma, and the most tokens of one sequence: both as set, or both as measured.

        Measured, gamma is how many draft passes a target pass takes (section 3.1), rounded down so
        that several numbers of sequences divide it. The paper takes the time of a verification as
        that of one token; where longer ones take longer, a longer sequence costs more than its last
        tokens bring, so that none is longer than `in_one_pass` (ours).
        """
        gamma = self.config.num_speculative_tokens
        if gamma is not None:
            return gamma, gamma
        profile, more = (
            self.artifact(HardwareProfile).when(overlapping=True, onnx_draft=onnx_draft),
            self.config.budget_offset,
        )
        gamma = divisible(min(LONGEST, round(profile.speed_ratio)))
        longest = min(gamma, in_one_pass(profile.t_verify))
        return min(LONGEST, max(1, gamma + more)), min(LONGEST, max(1, longest + more))


def divisible(gamma: int) -> int:
    """The largest budget up to `gamma` that can be shared: a prime would have one sequence always.

    From 12 on it is a multiple of 4 or 6, below of 2 or 3, at least 1.

    >>> [divisible(gamma) for gamma in (0, 1, 3, 5, 7, 11, 13, 23, 24, 31)]
    [1, 1, 3, 4, 6, 10, 12, 20, 24, 30]
    """
    return max(1, *(gamma - gamma % step for step in ((4, 6) if gamma >= 12 else (2, 3))))
