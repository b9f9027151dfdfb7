"""PEARL: the target pre-verifies and post-verifies while the draft continues (PEARL 2024,
2408.11850)."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from draftwell.serving.artifacts.hardware_profile import HardwareProfile
from draftwell.serving.runtime.acceptance.exact import Exact
from draftwell.serving.runtime.commands import Step
from draftwell.serving.runtime.drafting.draft_model import DraftModel
from draftwell.serving.runtime.drafting.stopping import FixedLength
from draftwell.serving.runtime.schedules.parallel import parallel
from draftwell.serving.runtime.session.session import Session
from draftwell.serving.runtime.strategies.base import Strategy, StrategyConfig
from draftwell.serving.runtime.strategies.search_space import space
from draftwell.serving.runtime.strategies.speculation import Speculation

LONGEST = 32


class Pearl(Strategy):
    name = "pearl"
    lossless = True
    paper = "PEARL 2024 (2408.11850), pre-verify and post-verify"
    artifacts = ("hardware_profile",)
    overlaps = True
    replayable = True
    search_space = space(num_speculative_tokens=(None, *range(1, 9)))

    class Config(StrategyConfig):
        num_speculative_tokens: int | None = Field(
            None,
            ge=1,
            le=LONGEST,
            description=(
                "gamma: draft tokens per round; None: how many the draft makes in a verification"
            ),
        )

    @classmethod
    def speculation(cls, config: Any) -> Speculation:
        note = "Draft and target do not run at once: PEARL's overlap is left out."
        return Speculation("draft", config.num_speculative_tokens, notes=(note,))

    def rollout_needed(self) -> int:
        """PEARL drafts gamma tokens after gamma − 1 that are not verified yet."""
        return 2 * self.gamma() - 1

    def run(self, session: Session) -> Step[None]:
        gamma = self.gamma()
        yield from parallel(session, DraftModel(FixedLength(gamma)), Exact(), gamma)

    def gamma(self) -> int:
        """The draft length: as set, or how many times as fast as the target the draft is."""
        if self.config.num_speculative_tokens is not None:
            return int(self.config.num_speculative_tokens)
        return min(
            LONGEST,
            max(1, round(self.artifact(HardwareProfile).when(overlapping=True).speed_ratio)),
        )
