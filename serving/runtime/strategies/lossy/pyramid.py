"""PyramidSD: draft, qualifier and target, each judging the one below (PyramidSD, sections 3.2 and
3.4)."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import Literal

from pydantic import Field, model_validator

from draftwell.serving.runtime.acceptance.divergence import DivergenceName, check_support
from draftwell.serving.runtime.acceptance.relaxed import Fuzzy, RatioOrOwn, SampleAndMatch
from draftwell.serving.runtime.commands import Role, Step
from draftwell.serving.runtime.drafting.draft_model import DraftModel
from draftwell.serving.runtime.drafting.stopping import FixedLength
from draftwell.serving.runtime.model import Model
from draftwell.serving.runtime.protocols import AcceptanceRule
from draftwell.serving.runtime.schedules.pyramid import pyramid
from draftwell.serving.runtime.session.session import Session
from draftwell.serving.runtime.strategies.base import Strategy, StrategyConfig


class PyramidConfig(StrategyConfig):
    """What both variants share."""

    num_draft_tokens: int = Field(
        5,
        ge=1,
        le=32,
        description="l_D: draft tokens per inner round; of the paper's settings 5 of 20 and 3 of "
        "25 are the fastest",
    )
    num_speculative_tokens: int = Field(
        10, ge=1, le=32, description="l_Q: qualified tokens that the target judges at once"
    )
    divergence: DivergenceName = Field(
        "js", description="of the raw distributions; the paper's thresholds mean fsd_js"
    )
    tau_target: float = Field(
        0.3, ge=0, description="tau_T: largest divergence of target and qualifier that is kept"
    )


class Pyramid(Strategy):
    """The schedule with a fuzzy target; variants differ in what the qualifier does."""

    lossless = False
    roles = ("target", "draft", "qualifier")
    length_field = "num_speculative_tokens"

    def choose_models(self, models: Mapping[Role, Model]) -> dict[Role, Model]:
        chosen = super().choose_models(models)
        check_support(self.config.divergence, chosen["qualifier"])
        return chosen

    @abstractmethod
    def qualifies(self) -> AcceptanceRule:
        """The qualifier's rule."""

    def run(self, session: Session) -> Step[None]:
        drafter = DraftModel(FixedLength(self.config.num_draft_tokens))
        accepts = Fuzzy(self.config.divergence, self.config.tau_target)
        yield from pyramid(
            session, drafter, self.qualifies(), accepts, self.config.num_speculative_tokens
        )


class PyramidAssisted(Pyramid):
    """PSD_A: the qualifier falls back on its own distribution."""

    name = "pyramid_assisted"
    paper = "PyramidSD, section 3.4 (PSD_A)"

    class Config(PyramidConfig):
        qualifier_rule: Literal["match", "ratio"] = Field(
            "match",
            description="when the qualifier keeps a token: match, if it draws the same, so that "
            "its text is its own; ratio, with probability min(1, p/q)",
        )

    def qualifies(self) -> AcceptanceRule:
        return SampleAndMatch() if self.config.qualifier_rule == "match" else RatioOrOwn()


class PyramidFuzzy(Pyramid):
    """PSD_F: fuzzy at both stages."""

    name = "pyramid_fuzzy"
    paper = "PyramidSD, section 3.2 (PSD_F)"

    class Config(PyramidConfig):
        tau_qualifier: float = Field(
            0.2, ge=0, description="tau_Q: largest divergence of qualifier and draft that is kept"
        )

        @model_validator(mode="after")
        def _ordered(self) -> PyramidFuzzy.Config:
            if self.tau_qualifier > self.tau_target:
                raise ValueError(
                    f"tau_qualifier {self.tau_qualifier} must not exceed tau_target "
                    f"{self.tau_target}: "
                    "the qualifier filters before the target does"
                )
            return self

    def choose_models(self, models: Mapping[Role, Model]) -> dict[Role, Model]:
        chosen = super().choose_models(models)
        check_support(self.config.divergence, chosen["draft"])
        return chosen

    def qualifies(self) -> AcceptanceRule:
        return Fuzzy(self.config.divergence, self.config.tau_qualifier)
