"""Plain decoding: one forward pass of the target for each token. Every other strategy is compared
with it."""

from __future__ import annotations

from draftwell.serving.runtime.commands import Step
from draftwell.serving.runtime.session.session import Session
from draftwell.serving.runtime.strategies.base import Strategy, StrategyConfig


class Autoregressive(Strategy):
    name = "autoregressive"
    lossless = True
    paper = "-"
    roles = ("target",)

    class Config(StrategyConfig):
        """No parameters."""

    def run(self, session: Session) -> Step[None]:
        yield from session.prefill()
        while not session.text.finished:
            if (yield from session.follow_prediction()):
                continue
            yield from session.decode_plainly()
