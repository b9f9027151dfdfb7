"""EAGLE-3: a head on the target's hidden states drafts a chain, or EAGLE-2's dynamic tree (Li 2025,
2503.01840; Li 2024, 2406.16858)."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Literal

from pydantic import Field

from draftwell.serving.artifacts.acceptance_table import AcceptanceTable
from draftwell.serving.artifacts.eagle3_head import Eagle3Head
from draftwell.serving.runtime.acceptance.exact import Exact
from draftwell.serving.runtime.acceptance.tree import ExactTree
from draftwell.serving.runtime.commands import Role, Step
from draftwell.serving.runtime.drafting.counts_kept import table_learnt, table_resumed
from draftwell.serving.runtime.drafting.head import HeadChain, HeadTree
from draftwell.serving.runtime.drafting.stopping import (
    CumulativeAcceptance,
    FixedLength,
    HighEntropy,
    UnlikelyToken,
    count_kept,
)
from draftwell.serving.runtime.model import Model
from draftwell.serving.runtime.models.eagle3_model import head_of
from draftwell.serving.runtime.requests import Sampling
from draftwell.serving.runtime.schedules.serial import serial, serial_trees
from draftwell.serving.runtime.session.session import Session
from draftwell.serving.runtime.strategies.base import Strategy, StrategyConfig, StrategyResources

ENTROPY_SCALE = 0.15
"""As SVIP has it."""


class Eagle3(Strategy):
    """The acceptance that SPIDE's rule expects is counted here, from the head's own drafts: a
    pair's table is of its draft model."""

    name = "eagle3"
    lossless = True
    paper = "Li 2025, EAGLE-3 (2503.01840); trees: EAGLE-2 (2406.16858), section 4"
    roles = ("target",)
    artifacts = ("eagle3_head",)

    class Config(StrategyConfig):
        num_speculative_tokens: int = Field(
            3, ge=1, le=16, description="levels: tokens of a chain, or of a tree's longest path"
        )
        top_k: int = Field(
            1,
            ge=1,
            le=10,
            description="tokens tried after each one, and nodes expanded a level; 1: a chain",
        )
        tree_tokens: int = Field(7, ge=1, le=63, description="tokens of a tree (top_k above 1)")
        stop: Literal["probability", "entropy", "acceptance"] = Field(
            "probability",
            description="what ends a chain early: an unlikely token (hf_dynamic), a high entropy "
            "(svip), or a low chance "
            "that all are accepted, as counted so far (spide)",
        )
        threshold: float = Field(
            0.0, ge=0, le=2, description="of the rule that ends a chain; 0 with probability: never"
        )

    def __init__(self, config: StrategyConfig, resources: StrategyResources):
        super().__init__(config, resources)
        self.counted = AcceptanceTable.empty()

    def choose_models(self, models: Mapping[Role, Model]) -> dict[Role, Model]:
        """The target, and the head beside it: a head is an artifact, and becomes a model where it
        is used."""
        head = (
            models["head"]
            if "head" in models
            else head_of(models["target"], self.artifact(Eagle3Head))
        )
        return {"target": models["target"], "head": head}

    def couples(self, sampling: Sampling, target: Model) -> bool:
        """Without a seed where it drafts a tree, of which more is kept so."""
        drafts_tree = self.config.top_k > 1 and target.trees and not sampling.penalises
        return drafts_tree or super().couples(sampling, target)

    def learnt(self) -> dict[str, float]:
        return table_learnt(self.counted)

    def resume(self, learnt: Mapping[str, float]) -> None:
        self.counted = table_resumed(self.counted, learnt)
        if self.learnt() != dict(learnt):
            raise ValueError("it holds other numbers than eagle3 counts")

    @property
    def longest_draft(self) -> int:
        return int(
            self.config.num_speculative_tokens
            if self.config.top_k == 1
            else self.config.tree_tokens
        )

    def run(self, session: Session) -> Step[None]:
        config = self.config
        if config.top_k > 1 and session.target.trees:
            yield from serial_trees(
                session,
                HeadTree(config.num_speculative_tokens, config.tree_tokens, config.top_k),
                ExactTree(),
            )
            return
        table = AcceptanceTable.empty() if self.resources.deterministic else self.counted

        yield from serial(
            session,
            HeadChain(self._stop(table), with_confidence=config.stop == "acceptance"),
            Exact(),
            partial(count_kept, table),
        )

    def _stop(self, table: AcceptanceTable) -> FixedLength:
        config, longest = self.config, self.config.num_speculative_tokens
        # the chain that stands for a tree where the request or the target allows none
        if config.top_k > 1:
            return FixedLength(longest)
        if config.stop == "entropy":
            return HighEntropy(config.threshold, longest, ENTROPY_SCALE)
        if config.stop == "acceptance":
            return CumulativeAcceptance(table, config.threshold, longest)
        return (
            UnlikelyToken(config.threshold, longest) if config.threshold else FixedLength(longest)
        )
