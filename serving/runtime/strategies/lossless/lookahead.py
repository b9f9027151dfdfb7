"""Lookahead decoding: the target guesses many tokens ahead while it verifies n-grams from earlier
guesses (Fu 2024, 2402.02057)."""

from __future__ import annotations

from pydantic import Field

from draftwell.serving.runtime.acceptance.tree import ExactTree
from draftwell.serving.runtime.commands import Step
from draftwell.serving.runtime.drafting.lookahead import Lookahead
from draftwell.serving.runtime.schedules.serial import serial_trees
from draftwell.serving.runtime.session.session import Session
from draftwell.serving.runtime.strategies.base import Strategy, StrategyConfig


class LookaheadDecoding(Strategy):
    name = "lookahead"
    lossless = True
    paper = "Lookahead decoding, Fu 2024 (2402.02057), section 3"
    roles = ("target",)

    class Config(StrategyConfig):
        window: int = Field(
            5, ge=1, le=32, description="W: columns of the window, tokens guessed at once"
        )
        ngram: int = Field(
            3, ge=2, le=8, description="N: tokens of an n-gram; the window has N - 1 levels"
        )
        guesses: int = Field(
            3, ge=1, le=32, description="G: n-grams verified at once, and kept for each first token"
        )
        pool_from_text: bool = Field(
            True, description="whether n-grams of prompt and output are proposed, too"
        )

    @property
    def longest_draft(self) -> int:
        return int(self.config.guesses * (self.config.ngram - 1))

    def run(self, session: Session) -> Step[None]:
        config = self.config
        drafter = Lookahead(
            config.window, config.ngram, config.guesses, from_text=config.pool_from_text
        )
        yield from serial_trees(session, drafter, ExactTree(), follow=drafter.follow)
