"""SWIFT: the target drafts for itself, skipping some of its attention and feed-forward sublayers
(Xia 2024, 2410.06916)."""

from __future__ import annotations

from pydantic import Field

from draftwell.serving.runtime.acceptance.exact import Exact
from draftwell.serving.runtime.commands import Step
from draftwell.serving.runtime.drafting.skipping import SelfDraft, SkipSearch
from draftwell.serving.runtime.drafting.stopping import UnlikelyToken
from draftwell.serving.runtime.schedules.serial import serial
from draftwell.serving.runtime.session.session import Session
from draftwell.serving.runtime.strategies.base import Strategy, StrategyConfig, StrategyResources


class Swift(Strategy):
    name = "swift"
    lossless = True
    paper = "SWIFT, Xia 2024 (2410.06916), section 4"
    roles = ("target",)
    length_field = "max_draft"

    class Config(StrategyConfig):
        skip_ratio: float = Field(
            0.45, ge=0, lt=1, description="share of the sublayers that is skipped while drafting"
        )
        threshold: float = Field(
            0.8, ge=0, le=1, description="stop after a token of lower probability"
        )
        max_draft: int = Field(8, ge=1, le=64, description="longest draft")
        interval: int = Field(
            16,
            ge=0,
            le=1000,
            description="rounds between two candidates for the skipped set; 0: it stays as it is",
        )
        window: int = Field(
            32, ge=1, le=256, description="last tokens of the text that a candidate is tried on"
        )

    def __init__(self, config: StrategyConfig, resources: StrategyResources):
        super().__init__(config, resources)
        self.shared: SkipSearch | None = None  # needs the target's number of layers

    def run(self, session: Session) -> Step[None]:
        config = self.config
        stop = UnlikelyToken(config.threshold, config.max_draft)
        drafter = SelfDraft(
            self.search(session), stop, interval=config.interval, window=config.window
        )
        yield from serial(session, drafter, Exact())

    def search(self, session: Session) -> SkipSearch:
        """What all requests have found so far; in deterministic mode a search of the request's
        own."""
        sublayers = session.target.model.sublayers
        if self.resources.deterministic:
            return SkipSearch(sublayers, self.config.skip_ratio)
        if self.shared is None or self.shared.sublayers != sublayers:
            self.shared = SkipSearch(sublayers, self.config.skip_ratio)
        return self.shared
