"""REST: a trie of what followed the longest match in a datastore is the draft, verified as a tree
(He 2023, 2311.08252). A rival of DuoDecoding's Table 1."""

from __future__ import annotations

from pydantic import Field

from draftwell.serving.artifacts.datastore import Datastore
from draftwell.serving.runtime.acceptance.tree import ExactTree
from draftwell.serving.runtime.commands import Step
from draftwell.serving.runtime.drafting.datastore_lookup import DatastoreLookup
from draftwell.serving.runtime.schedules.serial import serial_trees
from draftwell.serving.runtime.session.session import Session
from draftwell.serving.runtime.strategies.base import Strategy, StrategyConfig


class Rest(Strategy):
    name = "rest"
    lossless = True
    paper = "He 2023, REST: retrieval-based speculative decoding (2311.08252)"
    roles = ("target",)
    artifacts = ("datastore",)
    length_field = "max_nodes"

    class Config(StrategyConfig):
        max_nodes: int = Field(
            8, ge=1, le=64, description="tokens of the draft tree at most (the paper's c, 64 there)"
        )
        max_depth: int = Field(10, ge=1, le=16, description="tokens of one continuation at most")

    def run(self, session: Session) -> Step[None]:
        drafter = DatastoreLookup(
            self.artifact(Datastore), self.config.max_nodes, self.config.max_depth
        )
        yield from serial_trees(session, drafter, ExactTree())
