"""Medusa: heads on the target's last hidden state propose a tree of the tokens to come (Cai 2024,
2401.10774)."""

from __future__ import annotations

from typing import Any

from pydantic import Field
from torch import Tensor

from draftwell.serving.artifacts.base import ArtifactError
from draftwell.serving.artifacts.kinds import KINDS
from draftwell.serving.artifacts.medusa_heads import MedusaHeads
from draftwell.serving.runtime.acceptance.tree import ExactTree
from draftwell.serving.runtime.commands import Step
from draftwell.serving.runtime.drafting.medusa import SHAPE, Medusa
from draftwell.serving.runtime.models.beside import kept_beside
from draftwell.serving.runtime.schedules.serial import serial_trees
from draftwell.serving.runtime.session.session import Session
from draftwell.serving.runtime.strategies.base import Strategy, StrategyConfig


class MedusaDecoding(Strategy):
    name = "medusa"
    lossless = True
    paper = "Medusa, Cai 2024 (2401.10774), sections 2.1 and 2.3"
    roles = ("target",)
    artifacts = ("medusa_heads",)
    length_field = "nodes"

    class Config(StrategyConfig):
        nodes: int = Field(
            8, ge=1, le=len(SHAPE), description="tokens of the tree at most, the most useful first"
        )

    def run(self, session: Session) -> Step[None]:
        heads = self.artifact(MedusaHeads)
        drafter = Medusa(heads, self.embedding(session.target.model, heads), self.config.nodes)
        yield from serial_trees(session, drafter, ExactTree(), follow=drafter.follow)

    def embedding(self, model: Any, heads: MedusaHeads) -> Tensor:
        """The rows of a target's output embedding that the heads need, copied once for all
        strategies that use these heads."""

        def copied() -> Tensor:
            if int(heads.tokens[-1]) >= model.vocab_size:
                raise ArtifactError(
                    f"the Medusa heads propose token {int(heads.tokens[-1])}, the target "
                    f"has {model.vocab_size}: train "
                    f"them for this pair (`{KINDS[heads.kind].made_by}`)",
                    code="vocabulary_differs",
                )
            rows: Tensor = model.head_rows(heads.tokens)
            return rows

        return kept_beside(model, heads, copied)
