"""Hybrid: each round n-grams, a head or draft model, or plain decoding, whatever is expected to gain most on this machine (ours)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field

from serving.artifacts.acceptance_table import AcceptanceTable
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
    """Nothing is drafted that is not expected to gain: at worst it is plain decoding, but for the rounds that try a model anew."""

    name = "hybrid"
    lossless = True
    paper = "none: the drafter with the largest expected gain, from counted acceptance and measured times"
    roles = ("target",)
    artifacts = ("hardware_profile",)
    optional_artifacts = ("eagle3_head", "acceptance_table")
    search_space = space(drafter=("auto", "none"), max_draft=(4, 8), max_matching_ngram_size=(3, 5))

    class Config(StrategyConfig):
        drafter: Literal["auto", "head", "draft", "none"] = Field(
            "auto", description="besides n-grams: the head where there is one, else the draft model; or one of them, or none")
        max_draft: int = Field(8, ge=1, le=32, description="longest draft")
        max_matching_ngram_size: int = Field(4, ge=1, le=8, description="longest n-gram looked up, tried down to 1")

    def __init__(self, config: StrategyConfig, resources: StrategyResources):
        super().__init__(config, resources)
        self.seen: dict[str, Experience] = {}

    @classmethod
    def speculation(cls, config: Any) -> Speculation:
        return Speculation("ngram", config.max_draft, ngram=config.max_matching_ngram_size,
                           notes=("Only its n-grams are left: no other engine chooses the drafter by round.",))

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
                              self.config.max_matching_ngram_size)
        yield from serial(session, drafter, Exact(), drafter.learn)

    def _experience(self, model: str | None, temperature: float) -> Experience:
        """What was learnt of requests of this class of temperatures; its beginning where each request shall decide for itself."""
        kind = "greedy" if temperature == 0.0 else "sampled"
        if kind not in self.seen:
            table = self.resources.artifacts.get("acceptance_table")
            known = table.at(temperature).copy() if model == "draft" and isinstance(table, AcceptanceTable) else AcceptanceTable.empty()
            self.seen[kind] = Experience(model=known)
        return self.seen[kind].copy() if self.resources.deterministic else self.seen[kind]
