"""Hybrid: each round a continuation of the text, a head's or a draft model's draft, or plain decoding, whatever is expected to gain most on
this machine (ours)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field

from serving.artifacts.acceptance_table import AcceptanceTable
from serving.artifacts.datastore import Datastore
from serving.artifacts.eagle3_head import Eagle3Head
from serving.artifacts.hardware_profile import HardwareProfile
from serving.runtime.acceptance.exact import Exact
from serving.runtime.commands import Role, Step
from serving.runtime.drafting.best_drafter import BestDrafter, Experience
from serving.runtime.drafting.expected_gain import RoundCosts
from serving.runtime.models.eagle3_model import head_of
from serving.runtime.output import Model
from serving.runtime.schedules.serial import serial
from serving.runtime.session.session import Session
from serving.runtime.strategies.base import Strategy, StrategyConfig, StrategyResources
from serving.runtime.strategies.search_space import space
from serving.runtime.strategies.speculation import Speculation

HEAD_SHARE = 0.1
"""A head's step, in target passes, where no profile has measured it."""


class Hybrid(Strategy):
    """Nothing is drafted that is not expected to gain: at worst it is plain decoding, but for the rounds that try a model again."""

    name = "hybrid"
    lossless = True
    paper = "none: the drafter with the largest expected gain, from counted acceptance and measured times"
    roles = ("target",)
    artifacts = ("hardware_profile",)
    optional_artifacts = ("eagle3_head", "acceptance_table", "datastore")
    search_space = space(drafter=("auto", "none"), max_draft=(3, 8))

    class Config(StrategyConfig):
        drafter: Literal["auto", "head", "draft", "none"] = Field(
            "auto", description="besides what followed the text's end before: the head where there is one, else the draft model; or one "
            "of them, or none")
        max_draft: int = Field(8, ge=1, le=32, description="longest draft")

    def __init__(self, config: StrategyConfig, resources: StrategyResources):
        super().__init__(config, resources)
        self.seen: dict[str, Experience] = {}

    @classmethod
    def speculation(cls, config: Any) -> Speculation:
        return Speculation("ngram", config.max_draft, ngram=3,
                           notes=("Only n-grams of the text are left: no other engine chooses the drafter by round.",))

    def choose_models(self, models: Mapping[Role, Model]) -> dict[Role, Model]:
        chosen: dict[Role, Model] = {"target": models["target"]}
        wanted, head = self.config.drafter, self.resources.artifacts.get("eagle3_head")
        if wanted in ("auto", "head") and ("head" in models or isinstance(head, Eagle3Head)):
            chosen["head"] = models["head"] if "head" in models else head_of(models["target"], self.artifact(Eagle3Head))
        elif wanted == "head":
            chosen["head"] = head_of(models["target"], self.artifact(Eagle3Head))  # says what is missing
        elif wanted in ("auto", "draft") and "draft" in models:
            chosen["draft"] = models["draft"]
        return chosen

    def run(self, session: Session) -> Step[None]:
        model: Literal["head", "draft"] | None = "head" if "head" in session.lanes else "draft" if "draft" in session.lanes else None
        profile = self.artifact(HardwareProfile)
        seconds = profile.t_draft if model == "draft" else profile.t_head or HEAD_SHARE * profile.verify_seconds(1)
        costs = RoundCosts.of(profile, seconds, self.config.max_draft)
        drafter = BestDrafter(costs, self._experience(model, session.sampling.temperature), model, self.config.max_draft,
                              self.optional_artifact(Datastore))
        yield from serial(session, drafter, Exact(), drafter.learn)

    def _experience(self, model: str | None, temperature: float) -> Experience:
        """What was learnt of requests of this class of temperatures; its beginning where each request shall decide for itself."""
        kind = "greedy" if temperature == 0.0 else "sampled"
        if kind not in self.seen:
            table = self.resources.artifacts.get("acceptance_table")
            known = table.at(temperature).copy() if model == "draft" and isinstance(table, AcceptanceTable) else AcceptanceTable.empty()
            self.seen[kind] = Experience(model=known)
        return self.seen[kind].copy() if self.resources.deterministic else self.seen[kind]
