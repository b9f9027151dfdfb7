"""Draft & Verify's length rule: stop after an unlikely token, with a threshold that adapts (Zhang
2023, 2309.08168).

The paper drafts with the target's own layers; here the pair's draft does, and only the rule is the
paper's.
"""

from __future__ import annotations

from typing import Any

from pydantic import Field

from draftwell.serving.runtime.acceptance.exact import Exact
from draftwell.serving.runtime.commands import Step
from draftwell.serving.runtime.drafting.adaptive import AdaptiveThreshold
from draftwell.serving.runtime.drafting.draft_model import DraftModel
from draftwell.serving.runtime.drafting.stopping import UnlikelyToken
from draftwell.serving.runtime.requests import Sampling
from draftwell.serving.runtime.schedules.serial import serial
from draftwell.serving.runtime.session.session import Session
from draftwell.serving.runtime.strategies.base import Strategy, StrategyConfig
from draftwell.serving.runtime.strategies.search_space import space
from draftwell.serving.runtime.strategies.speculation import Speculation
from draftwell.serving.runtime.types import Draft, Verdict

GREEDY, SAMPLED = 0.8, 0.5


class DraftVerify(Strategy):
    name = "draft_verify"
    lossless = True
    paper = "Draft & Verify (2309.08168), section 3.3"
    replayable = True
    search_space = space(threshold=(0.8, 0.3, 0.5, 0.7, 0.9), max_draft=(4, 8, 16))

    class Config(StrategyConfig):
        threshold: float | None = Field(
            None,
            ge=0,
            le=1,
            description="first threshold of a request; None: .8 greedy, .5 sampled",
        )
        max_draft: int = Field(8, ge=1, le=64, description="longest draft")

    @classmethod
    def speculation(cls, config: Any) -> Speculation:
        threshold = GREEDY if config.threshold is None else config.threshold
        note = f"The threshold stays at {threshold}: Draft & Verify adapts it."
        return Speculation("draft", config.max_draft, threshold, notes=(note,))

    def run(self, session: Session) -> Step[None]:
        adaptive = AdaptiveThreshold(self.first_threshold(session.sampling), self.config.max_draft)
        stop = UnlikelyToken(adaptive.value, self.config.max_draft)

        def learn(draft: Draft, verdict: Verdict) -> None:
            adaptive.learn(draft, verdict)
            stop.threshold = adaptive.value

        yield from serial(session, DraftModel(stop), Exact(), learn)

    def first_threshold(self, sampling: Sampling) -> float:
        """As set, or the paper's for this kind of sampling."""
        if self.config.threshold is not None:
            return float(self.config.threshold)
        return GREEDY if sampling.greedy else SAMPLED
