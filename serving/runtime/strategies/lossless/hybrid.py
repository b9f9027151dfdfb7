"""Hybrid: each round a continuation of the text, a head's or a draft model's draft, or plain
decoding, whatever is expected to gain most on this machine (ours)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field

from draftwell.serving.artifacts.acceptance_table import AcceptanceTable
from draftwell.serving.artifacts.datastore import Datastore
from draftwell.serving.artifacts.eagle3_head import Eagle3Head
from draftwell.serving.artifacts.hardware_profile import HardwareProfile
from draftwell.serving.runtime.acceptance.exact import Exact
from draftwell.serving.runtime.acceptance.tree import ExactTree
from draftwell.serving.runtime.commands import Role, Step
from draftwell.serving.runtime.drafting.best_drafter import (
    BestDrafter,
    Candidate,
    Experience,
    Shared,
)
from draftwell.serving.runtime.drafting.counts_kept import below, counts_learnt, of, resume_counts
from draftwell.serving.runtime.drafting.draft_model import DraftModel
from draftwell.serving.runtime.drafting.expected_gain import RoundCosts
from draftwell.serving.runtime.drafting.head import HeadChain
from draftwell.serving.runtime.model import Model
from draftwell.serving.runtime.models.eagle3_model import head_of
from draftwell.serving.runtime.requests import Sampling
from draftwell.serving.runtime.schedules.serial import serial_with_alternatives
from draftwell.serving.runtime.session.session import UNLIMITED, Session
from draftwell.serving.runtime.strategies.base import Strategy, StrategyConfig, StrategyResources

HEAD_SHARE = 0.1
"""A head's step, in target passes, where no profile has measured it."""


class Hybrid(Strategy):
    """Nothing is drafted that is not expected to gain, the reading of the prompt by a model
    included: at worst it is plain decoding, but for the rounds that try a model again."""

    name = "hybrid"
    lossless = True
    paper = (
        "none: the drafter with the largest expected gain, from counted acceptance and "
        "measured times"
    )
    roles = ("target",)
    artifacts = ("hardware_profile",)
    optional_artifacts = ("eagle3_head", "acceptance_table", "datastore")
    length_field = "max_draft"

    class Config(StrategyConfig):
        drafter: Literal["auto", "head", "draft", "none"] = Field(
            "auto",
            description="besides what followed the text's end before: head and draft model, as "
            "far as "
            "there are any; or one of "
            "them, or none",
        )
        max_draft: int = Field(8, ge=1, le=32, description="longest draft, alternatives included")
        alternatives: int = Field(
            2,
            ge=0,
            le=8,
            description="tokens that may be verified beside each one of a head's draft; 0: chains "
            "alone",
        )

    def __init__(self, config: StrategyConfig, resources: StrategyResources):
        super().__init__(config, resources)
        # it weighs drafts by what passes of one request cost, so beside others it drafts nothing
        self.draft_length_by_batch = {1: self.config.max_draft, 2: 0}
        self.seen: dict[str, Shared] = {}
        table = self.optional_artifact(AcceptanceTable)
        # other strategies of a server count into theirs
        self._table = AcceptanceTable.empty() if table is None else table.copy()

    def choose_models(self, models: Mapping[Role, Model]) -> dict[Role, Model]:
        wanted, chosen = self.config.drafter, {"target": models["target"]}
        if "head" in models and wanted in ("auto", "head"):
            chosen["head"] = models["head"]
        elif wanted == "head" or (
            wanted == "auto"
            and self.optional_artifact(Eagle3Head)
            and models["target"].keeps_states
        ):
            # says what is missing
            chosen["head"] = head_of(models["target"], self.artifact(Eagle3Head))
        if "draft" in models and wanted in ("auto", "draft"):
            chosen["draft"] = models["draft"]
        return chosen  # type: ignore[return-value]  # the roles are literals

    def run(self, session: Session) -> Step[None]:
        # a model that a text has outgrown is left out: look-ups and other models go on
        session.draft_context = UNLIMITED
        profile, longest, seen = (
            self.artifact(HardwareProfile),
            self.config.max_draft,
            self._shared(session.sampling),
        )
        plain = RoundCosts.of(profile, 0.0, longest)
        steps: dict[Role, float] = {
            "head": profile.t_head or HEAD_SHARE * profile.verify_seconds(1),
            "draft": profile.t_draft or 0.0,
        }
        makers: dict[str, Any] = {"head": HeadChain, "draft": DraftModel}
        models = [
            Candidate(
                makers[role],
                RoundCosts.of(profile, step, longest, role),
                seen.models[role],
                longest,
                role,
                alone=self.resources.deterministic,
                alternatives=self.config.alternatives if role == "head" else 0,
            )
            for role, step in steps.items()
            if role in session.lanes
        ]
        drafter = BestDrafter(
            plain, seen.lookup, models, longest, self.optional_artifact(Datastore), seen.stored
        )
        yield from serial_with_alternatives(session, drafter, Exact(), ExactTree())

    def learnt(self) -> dict[str, float]:
        return {
            name: value
            for kind, shared in self.seen.copy().items()
            for name, value in below(kind, counts_learnt(shared)).items()
        }

    def resume(self, learnt: Mapping[str, float]) -> None:
        for kind in ("greedy", "sampled", "coupled"):
            if known := of(kind, learnt):
                resume_counts(self._counted(kind), known)
        if self.learnt() != dict(learnt):
            raise ValueError("it holds other numbers than hybrid counts")

    def _shared(self, sampling: Sampling) -> Shared:
        """What was learnt of requests of this kind; its beginning where each request shall decide
        for itself."""
        kind = "coupled" if sampling.coupled else "greedy" if sampling.greedy else "sampled"
        return self._beginning(kind) if self.resources.deterministic else self._counted(kind)

    def _counted(self, kind: str) -> Shared:
        """What requests of a kind count, from the bundle's acceptance table on."""
        if kind not in self.seen:
            self.seen[kind] = self._beginning(kind)
        return self.seen[kind]

    def _beginning(self, kind: str) -> Shared:
        """What the bundle's acceptance table says before any request: nothing of coupled ones,
        whose confidence is another (`WorthDrafting`)."""
        known = AcceptanceTable.empty()
        if kind != "coupled":
            known = self._table.at(0.0 if kind == "greedy" else 1.0).copy()
        return Shared(AcceptanceTable.empty(), {"head": Experience(), "draft": Experience(known)})
