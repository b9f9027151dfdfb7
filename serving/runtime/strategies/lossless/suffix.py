"""SuffixDecoding: what followed the longest match of the text's end, in the text or in a datastore,
is the draft (2411.04975)."""

from __future__ import annotations

from pydantic import Field

from draftwell.serving.artifacts.datastore import Datastore
from draftwell.serving.runtime.acceptance.tree import ExactTree
from draftwell.serving.runtime.commands import Step
from draftwell.serving.runtime.drafting.suffix import Suffix
from draftwell.serving.runtime.schedules.serial import serial_trees
from draftwell.serving.runtime.session.session import Session
from draftwell.serving.runtime.strategies.base import Strategy, StrategyConfig


class SuffixDecoding(Strategy):
    name = "suffix"
    lossless = True
    paper = "Oliaro 2024, SuffixDecoding (2411.04975)"
    roles = ("target",)
    optional_artifacts = ("datastore",)
    length_field = "max_draft"
    not_in_traces = (("use_datastore", True),)  # it would find every text in itself

    class Config(StrategyConfig):
        alpha: float = Field(
            1.0, gt=0, le=8, description="longest draft for each token of the match"
        )
        max_draft: int = Field(8, ge=1, le=64, description="tokens of a draft at most")
        max_branches: int = Field(
            1, ge=1, le=8, description="alternatives at one place at most; 1 drafts chains"
        )
        min_probability: float = Field(
            0.1, ge=0, le=1, description="smallest share of the occurrences that a drafted path has"
        )
        use_datastore: bool = Field(
            True, description="look into the datastore too, where there is one"
        )

    def run(self, session: Session) -> Step[None]:
        config, datastore = (
            self.config,
            self.optional_artifact(Datastore) if self.config.use_datastore else None,
        )
        drafter = Suffix(
            config.alpha, config.max_draft, config.max_branches, config.min_probability, datastore
        )
        yield from serial_trees(session, drafter, ExactTree())
