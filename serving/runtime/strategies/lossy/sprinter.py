"""SPRINTER: a learned verifier accepts draft tokens sequentially; the target judges only flagged
ones (Algorithm 2)."""

from __future__ import annotations

from pydantic import Field

from draftwell.serving.artifacts.verifier import Verifier
from draftwell.serving.runtime.acceptance.exact import Exact
from draftwell.serving.runtime.commands import Step
from draftwell.serving.runtime.logits import Span
from draftwell.serving.runtime.schedules.sequential import sequential
from draftwell.serving.runtime.session.session import Session
from draftwell.serving.runtime.strategies.base import Strategy, StrategyConfig


class Sprinter(Strategy):
    name = "sprinter"
    lossless = False
    paper = "SPRINTER, Algorithm 2 and section 3.2"
    artifacts = ("verifier",)
    length_field = "max_run"

    class Config(StrategyConfig):
        tau: float | None = Field(
            None,
            ge=0,
            le=1,
            description="keep a token while its score >= tau; None: the verifier's own",
        )
        max_run: int = Field(
            20,
            ge=1,
            le=64,
            description="longest run; its last token is always judged by the target",
        )

    def run(self, session: Session) -> Step[None]:
        verifier = self.artifact(Verifier)
        tau = verifier.threshold if self.config.tau is None else self.config.tau
        reads_after = "after" in verifier.features

        def trusts(row: Span, after: Span | None, token: int) -> bool:
            return verifier.score_drafted(row, after, token) >= tau

        yield from sequential(session, trusts, Exact(), self.config.max_run, reads_after)
