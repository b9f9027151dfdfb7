"""Plain decoding: one target forward pass a token. The measure of every other strategy."""

from __future__ import annotations

from serving.runtime.commands import Step
from serving.runtime.session import Session
from serving.runtime.strategies.base import Strategy, StrategyConfig


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
            session.append_sampled((yield from session.target.read(session.text.ids)))
