"""AdaEDL: stop before a token whose acceptance has a low bound, by entropy (Agrawal 2024, ENLSP at
NeurIPS; 2410.18351)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import Field

from draftwell.serving.runtime.acceptance.exact import Exact
from draftwell.serving.runtime.commands import Step
from draftwell.serving.runtime.drafting.adaptive import AdaptiveThreshold
from draftwell.serving.runtime.drafting.draft_model import DraftModel
from draftwell.serving.runtime.drafting.stopping import LowAcceptanceBound
from draftwell.serving.runtime.schedules.serial import serial
from draftwell.serving.runtime.session.session import Session
from draftwell.serving.runtime.strategies.base import Strategy, StrategyConfig, StrategyResources
from draftwell.serving.runtime.strategies.search_space import space
from draftwell.serving.runtime.strategies.speculation import Speculation
from draftwell.serving.runtime.types import Draft, Verdict


class AdaEDL(Strategy):
    """Its threshold is shared by all requests, or starts again with each in deterministic mode
    (docs/methods.md)."""

    name = "adaedl"
    lossless = True
    paper = "AdaEDL, Agrawal 2024 (2410.18351)"
    replayable = True
    search_space = space(threshold=(0.5, 0.4, 0.6, 0.7, 0.8), max_draft=(8, 4, 16))

    class Config(StrategyConfig):
        threshold: float = Field(
            ge=0,
            le=1,
            description="lambda at first: stop before a token with 1 − sqrt(entropy_scale·H) "
            "below it; "
            "not published, so there is no default",
        )
        max_draft: int = Field(
            ge=1, le=64, description="longest draft; not published, so there is no default"
        )
        entropy_scale: float = Field(
            0.2, gt=0, le=1, description="what the entropy is multiplied by in the paper's bound"
        )

    def __init__(self, config: StrategyConfig, resources: StrategyResources):
        super().__init__(config, resources)
        self.shared = self.first_threshold()

    @classmethod
    def speculation(cls, config: Any) -> Speculation:
        return Speculation("draft", notes=("AdaEDL's bound, which ends drafts, is left out.",))

    def run(self, session: Session) -> Step[None]:
        adaptive = self.first_threshold() if self.resources.deterministic else self.shared
        stop = LowAcceptanceBound(adaptive.value, self.config.max_draft, self.config.entropy_scale)

        def learn(draft: Draft, verdict: Verdict) -> None:
            adaptive.learn(draft, verdict)
            stop.threshold = adaptive.value

        yield from serial(session, DraftModel(stop), Exact(), learn)

    def learnt(self) -> dict[str, float]:
        return self.shared.learnt()

    def resume(self, learnt: Mapping[str, float]) -> None:
        self.shared.resume(learnt)

    def first_threshold(self) -> AdaptiveThreshold:
        """The threshold before anything was learnt."""
        return AdaptiveThreshold(self.config.threshold, self.config.max_draft)
