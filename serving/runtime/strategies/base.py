"""What a strategy is: a name, a config, the models and artifacts it needs, and a generator that
decodes one request."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, TypeVar

from pydantic import BaseModel, ConfigDict

from draftwell.serving.artifacts.base import Artifact
from draftwell.serving.artifacts.kinds import KINDS
from draftwell.serving.errors import DraftwellError
from draftwell.serving.runtime.commands import Role, Step
from draftwell.serving.runtime.output import Model
from draftwell.serving.runtime.session.session import Session
from draftwell.serving.runtime.strategies.search_space import Space
from draftwell.serving.runtime.strategies.speculation import Speculation

A = TypeVar("A", bound=Artifact)


class StrategyConfig(BaseModel):
    """Base of all strategy configs: unknown keys are refused, every field has bounds and a
    description."""

    model_config = ConfigDict(extra="forbid", frozen=True)


@dataclass(frozen=True)
class StrategyResources:
    """What strategies of a pair work with.

    Args:
        artifacts: kind → artifact.
        special_tokens: ids with a meaning of their own (end of turn, padding …).
        deterministic: online state is copied for every request, so that a result never depends on
            earlier requests.
    """

    artifacts: Mapping[str, Artifact] = field(default_factory=dict)
    special_tokens: frozenset[int] = frozenset()
    deterministic: bool = False

    def at(self, temperature: float) -> StrategyResources:
        """The same with what each artifact holds for requests of a temperature."""
        return replace(
            self,
            artifacts={kind: artifact.at(temperature) for kind, artifact in self.artifacts.items()},
        )

    def private(self) -> StrategyResources:
        """The same with copies of the artifacts that requests write to: what is learnt here changes
        nothing elsewhere."""
        copies = {
            kind: artifact.copy() if hasattr(artifact, "copy") else artifact
            for kind, artifact in self.artifacts.items()
        }
        return replace(self, artifacts=copies)


class Strategy(ABC):
    """Base of all strategies. Class attributes describe it to people (`draftwell strategies`)."""

    name: ClassVar[str]
    """Key in `STRATEGIES`, as users write it: lower case with underscores."""
    lossless: ClassVar[bool]
    """Whether outputs follow the target's distribution exactly; at temperature 0: whether they
    equal plain decoding's."""
    paper: ClassVar[str]
    """Source in one line: author, year, arXiv number, algorithm or section; an unpublished rule:
    "none: " and what it is."""
    roles: ClassVar[tuple[Role, ...]] = ("target", "draft")
    """Models that it runs: a pair without one of them is refused."""
    prefers_onnx: ClassVar[bool] = False
    """Whether the draft in ONNX Runtime takes the draft's place where the pair was loaded with
    it."""
    artifacts: ClassVar[tuple[str, ...]] = ()
    """Kinds of the artifacts that it needs (keys of `KINDS`); `artifact` returns one of them."""
    bench_only: ClassVar[tuple[str, ...]] = ()
    """Parameters that requests to a server may not change: with them a strategy has state of its
    own, which every object starts with."""
    optional_artifacts: ClassVar[tuple[str, ...]] = ()
    """Kinds that it uses where they are there, and runs without; `optional_artifact` returns one of
    them."""
    overlaps: ClassVar[bool] = False
    """Whether draft and target run at once: the engine then gives each model cores of its own."""
    drafts_alone: ClassVar[bool] = False
    """Whether it weighs each draft by what passes of one request cost: a server with several
    requests lets it draft nothing. (Not: whether it drafts without a draft model.)"""
    draft_share: ClassVar[float] = 0.0
    """Of a strategy that drafts with something else than the draft model: seconds of a draft step
    over those of a target pass over as many rows; a busy server's price of its drafts."""
    Config: ClassVar[type[StrategyConfig]]
    """Its parameters, each with bounds and a description; one without a default must be given by
    the user."""
    search_space: ClassVar[Space] = {}
    """Parameter → values that a tuner may try; empty: the strategy is not tuned."""
    replayable: ClassVar[bool] = False
    """Whether replay over a trace predicts the strategy exactly; else a tuner measures it.

    True only for a lossless strategy that reads nothing but what a trace holds:
    docs/add_a_strategy.md, "Replayable".
    """

    def __init__(self, config: StrategyConfig, resources: StrategyResources):
        self.config: Any = config
        self.resources = resources

    @abstractmethod
    def run(self, session: Session) -> Step[None]:
        """Decode one request."""

    @classmethod
    def reads(cls) -> tuple[str, ...]:
        """Kinds of all artifacts that it may use: those that it needs, then the optional ones."""
        return (*cls.artifacts, *cls.optional_artifacts)

    @classmethod
    def completed(cls, parameters: Mapping[str, Any]) -> dict[str, Any]:
        """A point of the search space as parameters: with those that follow from others, and those
        without effect at their default."""
        return dict(parameters)

    def rollout_needed(self) -> int:
        """Length of trace rollout within which a draft always lies, whatever its first wrong token;
        0: drafts have no fixed length.

        Drafts that confidence ends have no such bound: where one is longer than a rollout, its
        replay reports that it is not exact.
        """
        return 0

    @classmethod
    def speculation(cls, config: Any) -> Speculation | None:
        """What another engine can do of it, for `draftwell export`; None: nothing sensible would
        remain.

        Args:
            config: of this class's `Config`.
        """
        return None

    @classmethod
    def head_speculation(cls, config: Any) -> Speculation | None:
        """The same for an engine that loads EAGLE-3 heads, where a head is at hand that the
        strategy can do without; None: it drafts from none."""
        return None

    @property
    def longest_draft(self) -> int | None:
        """Tokens that the target verifies at once at most, as far as the config says; None: it does
        not say."""
        for field_name in ("num_speculative_tokens", "max_draft"):
            if isinstance(longest := getattr(self.config, field_name, None), int):
                return longest
        return None

    def learnt(self) -> dict[str, float]:
        """What this object itself has learnt in addition to its artifacts, at one moment, from any
        thread; empty for most."""
        return {}

    def resume(self, learnt: Mapping[str, float]) -> None:
        """Continue from what `learnt` returned.

        Raises:
            ValueError: it is not what a strategy of these settings can have learnt.
        """
        if learnt:
            raise ValueError(f"strategy {self.name} learns nothing outside its artifacts")

    def artifact(self, kind: type[A]) -> A:
        """The artifact of a kind that this strategy needs."""
        found = self.resources.artifacts.get(kind.kind)
        if not isinstance(found, kind):
            raise DraftwellError(
                f"strategy {self.name} needs the artifact {kind.kind}: make one with "
                f"`{KINDS[kind.kind].made_by}`, or take it "
                "from a release",
                code="artifact_missing",
            )
        return found

    def optional_artifact(self, kind: type[A]) -> A | None:
        """The artifact of a kind of `optional_artifacts`; None where there is none."""
        return self.artifact(kind) if kind.kind in self.resources.artifacts else None

    def choose_models(self, models: Mapping[Role, Model]) -> dict[Role, Model]:
        """The models this strategy uses, by role."""
        missing = [role for role in self.roles if role not in models]
        if missing:
            raise DraftwellError(
                f"strategy {self.name} needs a {missing[0]} model, which this pair does not have",
                code="model_missing",
            )
        chosen = {role: models[role] for role in self.roles}
        if self.prefers_onnx and "draft_onnx" in models:
            chosen["draft"] = models["draft_onnx"]
        return chosen
