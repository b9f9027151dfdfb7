"""PEARL: the target pre-verifies and post-verifies while the draft continues (PEARL 2024,
2408.11850)."""

from __future__ import annotations

from pydantic import Field

from draftwell.serving.artifacts.hardware_profile import HardwareProfile
from draftwell.serving.runtime.acceptance.exact import Exact
from draftwell.serving.runtime.commands import Step
from draftwell.serving.runtime.drafting.draft_model import DraftModel
from draftwell.serving.runtime.drafting.stopping import FixedLength
from draftwell.serving.runtime.schedules.parallel import parallel
from draftwell.serving.runtime.session.session import Session
from draftwell.serving.runtime.strategies.base import Strategy, StrategyConfig

LONGEST = 32


class Pearl(Strategy):
    name = "pearl"
    lossless = True
    paper = "PEARL 2024 (2408.11850), pre-verify and post-verify"
    artifacts = ("hardware_profile",)
    overlaps = True

    class Config(StrategyConfig):
        num_speculative_tokens: int | None = Field(
            None,
            ge=1,
            le=LONGEST,
            description=(
                "gamma: draft tokens per round; None: how many the draft makes in a verification, "
                "and no more than the target verifies in about one pass"
            ),
        )

    def run(self, session: Session) -> Step[None]:
        gamma = self.gamma()
        yield from parallel(session, DraftModel(FixedLength(gamma)), Exact(), gamma)

    @property
    def longest_draft(self) -> int | None:
        measured = HardwareProfile.kind in self.resources.artifacts
        return self.gamma() if self.config.num_speculative_tokens or measured else None

    def gamma(self) -> int:
        """The draft length: as set, or as the profile says."""
        if self.config.num_speculative_tokens is not None:
            return int(self.config.num_speculative_tokens)
        return self.artifact(HardwareProfile).overlapped_length(LONGEST)
