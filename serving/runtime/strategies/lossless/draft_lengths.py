"""Speculative decoding with the pair's draft model: strategies that differ in one thing, the rule
that ends a draft.

| strategy | a draft ends | source |
|---|---|---|
| `vanilla_sd` | after gamma tokens | Leviathan 2023, Algorithm 1; Chen 2023 |
| `svip` | after a token of high entropy | Zhang 2024, 2411.18462 |
| `draft_verify` | after an unlikely token, by a threshold that adapts | Zhang 2023, 2309.08168 |
| `adaedl` | before a token whose acceptance has a low bound | Agrawal 2024, 2410.18351 |
| `hf_dynamic` | after an unlikely token, as in transformers | Mamou 2024, 2405.04304 |
| `specdec_pp` | where a trained head predicts a rejection | Huang 2024, 2405.19715 |
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping

from pydantic import Field, model_validator

from draftwell.serving.artifacts.acceptance_head import AcceptanceHead
from draftwell.serving.runtime.acceptance.exact import Exact
from draftwell.serving.runtime.commands import Role, Step
from draftwell.serving.runtime.drafting.adaptive import AdaptiveThreshold, HeuristicLength
from draftwell.serving.runtime.drafting.draft_model import DraftModel
from draftwell.serving.runtime.drafting.stopping import (
    FixedLength,
    HighEntropy,
    LowAcceptanceBound,
    PredictedRejection,
    UnlikelyToken,
)
from draftwell.serving.runtime.model import Model
from draftwell.serving.runtime.requests import Sampling
from draftwell.serving.runtime.schedules.serial import serial
from draftwell.serving.runtime.session.session import Session
from draftwell.serving.runtime.strategies.base import (
    DrafterRole,
    Strategy,
    StrategyConfig,
    StrategyResources,
    drafting_with,
)
from draftwell.serving.runtime.types import Draft, StopPolicy, Verdict

GREEDY_THRESHOLD, SAMPLED_THRESHOLD = 0.8, 0.5
"""Draft & Verify's first thresholds."""
FIRST_LENGTH = 5
"""Of the heuristic of transformers."""

Learn = Callable[[Draft, Verdict], None]


class DraftLengthStrategy(Strategy):
    """Draft until the stop rule says so, verify, and keep what the exact rule keeps."""

    lossless = True
    length_field = "max_draft"

    @abstractmethod
    def stop_rule(self, sampling: Sampling) -> tuple[StopPolicy, Learn | None]:
        """The rule for one request, and what it learns from each verdict, if anything."""

    def run(self, session: Session) -> Step[None]:
        stop, learn = self.stop_rule(session.sampling)
        yield from serial(session, DraftModel(stop), Exact(), learn)


class VanillaSD(Strategy):
    name = "vanilla_sd"
    lossless = True
    paper = "Leviathan 2023 (2211.17192), Algorithm 1"
    length_field = "num_speculative_tokens"
    not_in_traces = (("drafter", "qualifier"), ("draft_first", True))

    class Config(StrategyConfig):
        num_speculative_tokens: int = Field(
            5, ge=1, le=32, description="gamma: draft tokens per round"
        )
        draft_first: bool = Field(
            False,
            description="draft before the target has read the prompt, as the papers' loops do: a "
            "longer time "
            "to the first token, and one target call less",
        )
        drafter: DrafterRole = Field(
            "draft", description="the model that drafts; qualifier: as PyramidSD's baselines do"
        )

    def choose_models(self, models: Mapping[Role, Model]) -> dict[Role, Model]:
        return super().choose_models(drafting_with(self.config.drafter, models))

    def run(self, session: Session) -> Step[None]:
        drafter = DraftModel(FixedLength(self.config.num_speculative_tokens))
        yield from serial(session, drafter, Exact(), draft_first=self.config.draft_first)


class SVIP(DraftLengthStrategy):
    """The draft model's entropy says when to stop."""

    name = "svip"
    paper = "Zhang 2024 (2411.18462), self-verification length policy"

    class Config(StrategyConfig):
        threshold: float = Field(
            0.3,
            ge=0,
            le=2,
            description="stop after a token whose sqrt(entropy_scale·H) exceeds this",
        )
        entropy_scale: float = Field(
            0.15, gt=0, le=1, description="what the entropy is multiplied by in the paper's bound"
        )
        max_draft: int = Field(40, ge=1, le=64, description="longest draft")

    def stop_rule(self, sampling: Sampling) -> tuple[StopPolicy, Learn | None]:
        config = self.config
        return HighEntropy(config.threshold, config.max_draft, config.entropy_scale), None


class DraftVerify(DraftLengthStrategy):
    """The paper drafts with the target's own layers; here the pair's draft does, and only the rule
    is the paper's."""

    name = "draft_verify"
    paper = "Draft & Verify (2309.08168), section 3.3"
    sampled_defaults = (("threshold", SAMPLED_THRESHOLD),)

    class Config(StrategyConfig):
        threshold: float | None = Field(
            None,
            ge=0,
            le=1,
            description="first threshold of a request; None: .8 greedy, .5 sampled",
        )
        max_draft: int = Field(8, ge=1, le=64, description="longest draft")

    def stop_rule(self, sampling: Sampling) -> tuple[StopPolicy, Learn | None]:
        first = self.config.threshold
        if first is None:
            first = GREEDY_THRESHOLD if sampling.greedy else SAMPLED_THRESHOLD
        adaptive = AdaptiveThreshold(first, self.config.max_draft)
        stop = UnlikelyToken(adaptive.value, self.config.max_draft)
        return stop, moves_threshold(stop, adaptive)


class AdaEDL(DraftLengthStrategy):
    """Its threshold is shared by all requests, or starts again with each in deterministic mode
    (docs/methods.md)."""

    name = "adaedl"
    paper = "AdaEDL, Agrawal 2024 (2410.18351)"

    class Config(StrategyConfig):
        threshold: float = Field(
            ge=0,
            le=1,
            description="lambda at first: stop before a token with 1 − sqrt(entropy_scale·H) "
            "below it; "
            "not published, so there is no default",
        )
        max_draft: int = Field(
            ge=1, le=64, description="longest draft; not published, so there is no default"
        )
        entropy_scale: float = Field(
            0.2, gt=0, le=1, description="what the entropy is multiplied by in the paper's bound"
        )

    def __init__(self, config: StrategyConfig, resources: StrategyResources):
        super().__init__(config, resources)
        self.shared = self.first_threshold()

    def stop_rule(self, sampling: Sampling) -> tuple[StopPolicy, Learn | None]:
        adaptive = self.first_threshold() if self.resources.deterministic else self.shared
        stop = LowAcceptanceBound(adaptive.value, self.config.max_draft, self.config.entropy_scale)
        return stop, moves_threshold(stop, adaptive)

    def learnt(self) -> dict[str, float]:
        return self.shared.learnt()

    def resume(self, learnt: Mapping[str, float]) -> None:
        self.shared.resume(learnt)

    def first_threshold(self) -> AdaptiveThreshold:
        """The threshold before anything was learnt."""
        return AdaptiveThreshold(self.config.threshold, self.config.max_draft)


class HFDynamic(DraftLengthStrategy):
    """The heuristic length is shared by all requests, or starts again with each in deterministic
    mode (docs/methods.md)."""

    name = "hf_dynamic"
    paper = "Mamou 2024 (2405.04304); transformers' assisted generation"

    class Config(StrategyConfig):
        threshold: float = Field(
            0.4, ge=0, le=1, description="stop after a token of lower draft probability"
        )
        max_draft: int = Field(20, ge=1, le=64, description="longest draft")
        heuristic: bool = Field(
            False,
            description=(
                "the length limit starts at 5, two more when all match, else one fewer; off: "
                "constant"
            ),
        )

    def __init__(self, config: StrategyConfig, resources: StrategyResources):
        super().__init__(config, resources)
        self.shared = self.first_length()

    def stop_rule(self, sampling: Sampling) -> tuple[StopPolicy, Learn | None]:
        stop = UnlikelyToken(self.config.threshold, self.config.max_draft)
        if not self.config.heuristic:
            return stop, None
        length = self.first_length() if self.resources.deterministic else self.shared
        stop.max_draft = length.value

        def learn(draft: Draft, verdict: Verdict) -> None:
            length.learn(draft, verdict)
            stop.max_draft = length.value

        return stop, learn

    def learnt(self) -> dict[str, float]:
        return self.shared.learnt() if self.config.heuristic else {}

    def resume(self, learnt: Mapping[str, float]) -> None:
        self.shared.resume(learnt)

    def first_length(self) -> HeuristicLength:
        """The length before anything was learnt."""
        return HeuristicLength(FIRST_LENGTH, self.config.max_draft)


class SpecDecPP(DraftLengthStrategy):
    """A trained head predicts when a rejection is likely, and drafting stops there."""

    name = "specdec_pp"
    paper = "SpecDec++ (2405.19715), section 4"
    artifacts = ("acceptance_head",)

    class Config(StrategyConfig):
        threshold: float = Field(
            0.3,
            ge=0,
            le=1,
            description="stop when the predicted chance of any rejection exceeds this",
        )
        min_draft: int = Field(2, ge=1, le=64, description="shortest draft")
        max_draft: int = Field(20, ge=1, le=64, description="longest draft")

        @model_validator(mode="after")
        def _in_order(self) -> SpecDecPP.Config:
            if self.min_draft > self.max_draft:
                raise ValueError("min_draft cannot exceed max_draft")
            return self

    def stop_rule(self, sampling: Sampling) -> tuple[StopPolicy, Learn | None]:
        config, head = self.config, self.artifact(AcceptanceHead)
        return PredictedRejection(head, config.threshold, config.min_draft, config.max_draft), None


def moves_threshold(stop: UnlikelyToken | LowAcceptanceBound, adaptive: AdaptiveThreshold) -> Learn:
    """Lets a rule's threshold follow what was accepted."""

    def learn(draft: Draft, verdict: Verdict) -> None:
        adaptive.learn(draft, verdict)
        stop.threshold = adaptive.value

    return learn
