"""What a strategy is: a name, a config, the models and artifacts it needs, and a generator that
decodes one request."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal, TypeVar

from pydantic import BaseModel, ConfigDict

from draftwell.serving.artifacts.base import Artifact
from draftwell.serving.artifacts.kinds import KINDS
from draftwell.serving.errors import DraftwellError
from draftwell.serving.runtime.commands import Role, Step
from draftwell.serving.runtime.model import Model
from draftwell.serving.runtime.requests import Sampling
from draftwell.serving.runtime.session.session import UNLIMITED, Session

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
    """Base of all strategies. Class attributes describe it to people (`draftwell list
    strategies`)."""

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
    length_field: ClassVar[str | None] = None
    """The parameter that says how long a draft is at most (`longest_draft`)."""
    regret_field: ClassVar[str | None] = None
    """Of a lossy strategy: the parameter that says how many nats a greedy text may be less likely
    than the target's choices after the same prefixes, which the gate reads the text for."""
    not_in_traces: ClassVar[tuple[tuple[str, Any], ...]] = ()
    """Parameters, each with the value that makes it read what no trace holds: a replay refuses
    it."""
    sampled_defaults: ClassVar[tuple[tuple[str, Any], ...]] = ()
    """Parameters whose default depends on the temperature, each with that of sampled requests. A
    replay's own requests are greedy, whatever its trace."""
    search_space: ClassVar[Mapping[str, Sequence[Any]]] = {}
    """Of a plug-in's strategy: parameter → the values that the tuner may try, by measuring them.
    Our own stand in `components/tune/search/space.py`."""
    overlaps: ClassVar[bool] = False
    """Whether draft and target run at once: the engine then gives each model cores of its own."""
    Config: ClassVar[type[StrategyConfig]]
    """Its parameters, each with bounds and a description; one without a default must be given by
    the user."""

    def __init__(self, config: StrategyConfig, resources: StrategyResources):
        self.config: Any = config
        self.resources = resources
        self.draft_length_by_batch: Mapping[int, int] = {}
        """Requests in a batch → the longest draft of each; 0: none. A tuned choice brings the one
        that was measured (`DecodingConfig`); empty: as long as the config says."""

    @abstractmethod
    def run(self, session: Session) -> Step[None]:
        """Decode one request."""

    @classmethod
    def reads(cls) -> tuple[str, ...]:
        """Kinds of all artifacts that it may use: those that it needs, then the optional ones."""
        return (*cls.artifacts, *cls.optional_artifacts)

    @property
    def longest_draft(self) -> int | None:
        """Tokens that the target verifies at once at most, as far as the config says; None: it does
        not say."""
        return None if self.length_field is None else getattr(self.config, self.length_field)

    def draft_limit(self, running: int) -> int:
        """Longest draft of one of `running` requests: that of the next larger batch size in the
        table, beyond it that of the last; `UNLIMITED` where that is as long as the config allows.

        >>> from draftwell.serving.runtime.strategies import build_strategy
        >>> strategy = build_strategy("vanilla_sd", {"num_speculative_tokens": 4})
        >>> strategy.draft_length_by_batch = {1: 4, 2: 3, 8: 0}
        >>> [strategy.draft_limit(running) for running in (2, 3, 9)]
        [3, 0, 0]
        >>> strategy.draft_limit(1) == UNLIMITED
        True
        """
        table = self.draft_length_by_batch
        if not table:
            return UNLIMITED
        length = table[min((size for size in table if size >= running), default=max(table))]
        return length if length < (self.longest_draft or UNLIMITED) else UNLIMITED

    def couples(self, sampling: Sampling, target: Model) -> bool:
        """Whether a sampled request is coupled (`Sampling`): its answer is then plain decoding's.
        Lossy rules count on the exact test, which a coupled request does not make."""
        return self.lossless and sampling.repeatable

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
        for role in self.roles:
            if role not in models:
                raise model_missing(f"strategy {self.name}", role, models)
        chosen = {role: models[role] for role in self.roles}
        if self.prefers_onnx and "draft_onnx" in models:
            chosen["draft"] = models["draft_onnx"]
        return chosen


def model_missing(what: str, role: Role, models: Mapping[Role, Model]) -> DraftwellError:
    """The error where something needs a model that the pair lacks, or that was left out of it."""
    mend = (
        "`draftwell step distil` makes one from the target"
        if role == "draft"
        else "leave it out, or take a pair that `draftwell list pairs` shows with one"
    )
    left_out = models["target"].left_out if "target" in models else {}
    why = f"and {left_out[role]}" if role in left_out else f"which this pair does not have: {mend}"
    return DraftwellError(f"{what} needs a {role} model, {why}", code="model_missing")


DrafterRole = Literal["draft", "qualifier"]


def drafting_with(drafter: DrafterRole, models: Mapping[Role, Model]) -> dict[Role, Model]:
    """A pair's models with the drafter as its draft.

    Raises:
        DraftwellError: the pair has no such model.
    """
    if drafter not in models:
        raise model_missing(f"drafter={drafter}", drafter, models)
    return {**models, "draft": models[drafter]}
