"""The evidence of a tuning: what was tried, what was measured, and why the choice was made, as
typed models.

On disk it is JSON: in the artifact `decoding_config` and in `<device>/reports/tuning.json`. A field
that was never set is not written.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import (
    BaseModel,
    ConfigDict,
    PlainSerializer,
    PlainValidator,
    ValidationError,
    field_serializer,
)

from draftwell.components.bench.engines.figures import Figure
from draftwell.components.tune.levels import Level, table_of
from draftwell.components.tune.settings import Constraints
from draftwell.serving.errors import DraftwellError, first_wrong
from draftwell.serving.runtime.strategies.choice import StrategyChoice

EVIDENCE_VERSION = 3


def _as_choice(value: Any) -> StrategyChoice:
    if isinstance(value, StrategyChoice):
        return value
    if isinstance(value, Mapping) and "strategy" in value:
        return StrategyChoice.from_json(value)
    raise ValueError("a choice needs strategy and parameters")


Choice = Annotated[
    StrategyChoice, PlainValidator(_as_choice), PlainSerializer(StrategyChoice.to_json)
]
"""A `StrategyChoice` that is `{"strategy": …, "parameters": …}` in JSON."""


class _Part(BaseModel):
    """Frozen; fields of other versions are ignored."""

    model_config = ConfigDict(extra="ignore", frozen=True, ser_json_inf_nan="strings")


class Row(_Part):
    """What is known of one strategy choice."""

    strategy: str
    parameters: dict[str, Any]

    @classmethod
    def of(cls, choice: StrategyChoice, **values: Any) -> Self:
        """A row about a choice."""
        return cls(**choice.to_json(), **values)

    @property
    def choice(self) -> StrategyChoice:
        """Which choice the row is about."""
        return StrategyChoice(self.strategy, self.parameters)


class Trial(Row):
    """A configuration that was tried, and its three objectives (`search.search` defines them).

    Args:
        predicted_seconds_per_token: by replay, or by a first short measurement: see `source`.
        exact: False where a draft was longer than the trace's rollouts, so that the replay is an
            estimate.
        divergence: 0..1.
    """

    predicted_seconds_per_token: float
    exact: bool = True
    target_calls_per_token: float
    divergence: float = 0.0
    source: Literal["replayed", "measured"] = "replayed"

    @property
    def seconds(self) -> float:
        """Seconds per token."""
        return self.predicted_seconds_per_token

    @property
    def was_measured(self) -> bool:
        """Whether these are measured."""
        return self.source == "measured"


class Metrics(Row):
    """What was measured of one configuration; speedups are over plain decoding on the same prompts.

    Args:
        prompts: how many it was measured on.
        speedup_low, speedup_high: ends of the interval.
        lossless, quality_loss, rouge_l_lost, surprisal_shift, cost_ratio, objection: of the
        confirmation: see
            `ConstraintChecker.metrics`, and which constraint is broken.
        predicted_seconds_per_token, divergence: what its trial predicted.
        confirmed: whether this is from the confirmation.
    """

    seconds_per_token: float
    prompts: int
    target_calls_per_token: float
    speedup: float
    speedup_low: float
    speedup_high: float
    lossless: bool | None = None
    quality_loss: float | None = None
    rouge_l_lost: float | None = None
    surprisal_shift: float | None = None
    cost_ratio: float | None = None
    objection: str | None = None
    predicted_seconds_per_token: float | None = None
    divergence: float | None = None
    confirmed: bool | None = None

    @property
    def seconds(self) -> float:
        """Seconds per token."""
        return self.seconds_per_token

    @property
    def was_measured(self) -> bool:
        """Whether these are measured."""
        return True

    @property
    def prediction_error(self) -> float | None:
        """|predicted − measured| / measured seconds per token; None where nothing was
        predicted."""
        if self.predicted_seconds_per_token is None:
            return None
        return abs(self.predicted_seconds_per_token / self.seconds_per_token - 1)


class Dropped(Row):
    """A configuration that left successive halving, and why."""

    why: str = ""


class Rung(_Part):
    """One round of measurement.

    Args:
        prompts: ids of the prompts that were new here.
        figures: of every configuration that was measured, over all prompts so far; plain decoding's
            first.
    """

    prompts: list[str] = []
    figures: list[Metrics] = []
    dropped: list[Dropped] = []


class Confirmation(_Part):
    """The last measurement, with fresh times: only this decides.

    Args:
        tail: probability left out at each end of its intervals.
        figures: plain decoding's first, then the champion's where there is one.
    """

    tail: float | None = None
    figures: list[Metrics] = []


class Rollouts(_Part):
    """What the length of a trace's rollouts meant for the search.

    Args:
        beyond: strategy → how many of its configurations were not tried, because their drafts of
            fixed length are longer.
        inexact: replays that are estimates, because drafts ended by confidence were longer than a
            rollout.
        replayed: all replays.

    >>> Rollouts(length=16, beyond={"pearl": 2}, inexact=0, replayed=60).summary[:71]
    'Not tried, because rollouts of 16 tokens are too short: 2 of pearl. Use'
    """

    length: int
    beyond: dict[str, int] = {}
    inexact: int = 0
    replayed: int = 0

    @property
    def summary(self) -> str:
        """A sentence or two on what the rollouts were too short for; empty where they sufficed."""
        found = []
        if self.inexact:
            found.append(
                f"{self.inexact} of {self.replayed} replays are estimates: drafts were "
                "longer than the rollouts of "
                f"{self.length} tokens."
            )
        if self.beyond:
            those = ", ".join(f"{count} of {name}" for name, count in self.beyond.items())
            found.append(
                f"Not tried, because rollouts of {self.length} tokens are too short: {those}."
            )
        return " ".join([*found, "Use a longer `step collect --set rollout=…`."]) if found else ""


class OwnDevice(_Part):
    """What a device of its own for the draft, as fast as this one, would give by formula
    (`draftwell.components.regimes`). Nothing of it is measured.

    Args:
        c: seconds of a draft pass over those of plain decoding's token.
        acceptance: chance that speculative decoding keeps a draft token, by replay.
        method: the fastest there.
        speedup, in_turn: times plain decoding with that device, and with both models on one.

    >>> OwnDevice(c=0.1, acceptance=0.9, method="SPIDE", speedup=4.21, in_turn=3.44).words
    'with a device of its own the draft would give about 4.2 times plain decoding (SPIDE), in \
turn about 3.4; by formula, not measured'
    """

    c: float
    acceptance: float
    method: str
    speedup: float
    in_turn: float

    @property
    def words(self) -> str:
        """As a clause."""
        own, in_turn = f"{self.speedup:.1f}", f"{self.in_turn:.1f}"
        if own == in_turn:
            found = f"the draft would give about {own} times plain decoding, as much as in turn"
        else:
            found = (
                f"the draft would give about {own} times plain decoding ({self.method}), in turn "
                f"about {in_turn}"
            )
        return f"with a device of its own {found}; by formula, not measured"


class TuningEvidence(_Part):
    """A tuning's choice and all that it rests on.

    Args:
        trials: every configuration that was replayed or explored.
        measured: the last metrics of every configuration that was measured, plain decoding's first:
            of the confirmation, else of its last rung.
        levels: draft lengths of the choice by the number of requests that are decoded together;
            empty where only single requests were measured.
        loads: what the levels were chosen by.
        own_device: what the draft would give on a device of its own, by formula.
        left_out: strategy → why it was not tried; "champion" → why the champion was not measured.
        artifacts: kind → digest of what was tuned with.
        max_tokens, replayed_tokens: tokens per prompt as measured and as predicted.
        temperature: of the requests that the choice is for.
        training_prompts: hashes of the prompts of its traces and measurements
            (`draftwell.components.prompts.overlap`).
        unknown_prompts: what it was tuned with whose prompts are not recorded, so that
            `training_prompts` lacks them.
    """

    schema_version: int = 0
    choice: Choice
    reason: str = ""
    trials: list[Trial] = []
    rungs: list[Rung] = []
    confirmation: Confirmation | None = None
    measured: list[Metrics] = []
    levels: list[Level] = []
    loads: list[Figure] = []
    own_device: OwnDevice | None = None
    champion: Choice | None = None
    constraints: Constraints | None = None
    left_out: dict[str, str] = {}
    rollouts: Rollouts | None = None
    trace_digest: str | None = None
    artifacts: dict[str, str] = {}
    fingerprint: str | None = None
    padded_to: int | None = None
    training_prompts: tuple[str, ...] | None = None
    unknown_prompts: tuple[str, ...] = ()
    device_class: str | None = None
    machine: dict[str, Any] = {}
    prompts: int | None = None
    prompts_digest: str | None = None
    max_tokens: int | None = None
    replayed_tokens: int | None = None
    temperature: float | None = None
    seed: int | None = None

    @field_serializer("constraints")
    def _all_limits(self, constraints: Constraints | None) -> dict[str, Any] | None:
        """Limits are written in full, the defaults too; that on samples only where it applies."""
        return (
            None
            if constraints is None
            else constraints.model_dump(
                exclude=set() if self.temperature else {"max_surprisal_shift"}
            )
        )

    @classmethod
    def read(cls, value: Mapping[str, Any], where: str = "the tuning evidence") -> TuningEvidence:
        """The evidence that JSON holds.

        Args:
            value: evidence, or a `tuning.json`, which has `strategy` and `parameters` at its top,
                too.
            where: what holds it, for the error.
        Raises:
            DraftwellError: values that cannot be read (`evidence_unreadable`).
        """
        try:
            return cls.model_validate(
                {"choice": value, **value} if "choice" not in value else dict(value)
            )
        except ValidationError as error:
            raise DraftwellError(
                f"{where} cannot be read, {first_wrong(error)}: run `draftwell step choose` again",
                code="evidence_unreadable",
            ) from error

    def to_json(self) -> dict[str, Any]:
        """Plain JSON, with the fields that are set; an infinite parameter is the string "Infinity",
        which reads as one."""
        written: dict[str, Any] = json.loads(self.model_dump_json(exclude_unset=True))
        return written

    def with_choice(self, choice: StrategyChoice, reason: str) -> TuningEvidence:
        """The same evidence for another choice, whose lengths under load nothing is known of."""
        return self.model_copy(
            update={"choice": choice, "reason": reason, "levels": [], "loads": []}
        )

    @property
    def draft_length_by_batch(self) -> dict[int, int]:
        """As the decoding config has it."""
        return table_of(self.levels)

    @property
    def confirmed(self) -> list[Metrics]:
        """The metrics that decided; none where an older tuner had no confirmation."""
        return self.confirmation.figures if self.confirmation is not None else []
