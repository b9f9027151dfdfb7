"""The evidence of a tuning: what was tried, what was measured, and why the choice was made, as
typed models.

On disk it is JSON: in the artifact `decoding_config` and in `<device>/reports/tuning.json`. A field
that was never set is not written, and a field that an older version lacks reads as its default.
Evidence without `schema_version` is version 0.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import (
    BaseModel,
    ConfigDict,
    PlainSerializer,
    PlainValidator,
    ValidationError,
    field_serializer,
)

from draftwell.components.tune.settings import Constraints
from draftwell.serving.errors import DraftwellError
from draftwell.serving.runtime.strategies.choice import PLAIN, StrategyChoice

EVIDENCE_VERSION = 2


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
        predicted_seconds_per_token: by replay, by an estimate, or by a first short measurement: see
            `source`.
        exact: False where a draft was longer than the trace's rollouts, so that the replay is an
            estimate.
        target_calls_per_token: None of an estimate for PyramidSD.
        divergence: 0..1; None of an estimate for PyramidSD.
        least_divergence: the least that the few prompts of a short measurement leave possible
            (lower bound, 5 %); else None.
    """

    predicted_seconds_per_token: float
    exact: bool = True
    target_calls_per_token: float | None = None
    divergence: float | None = None
    least_divergence: float | None = None
    source: Literal["replayed", "measured", "estimated"] = "replayed"

    @property
    def values(self) -> tuple[float, float, float]:
        """The objectives, all to be small: `search.search` defines them."""
        assert self.target_calls_per_token is not None
        assert self.divergence is not None
        return self.predicted_seconds_per_token, self.target_calls_per_token, self.divergence


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
    median_seconds_per_token: float | None = None
    prompts: int | None = None
    target_calls_per_token: float | None = None
    speedup: float | None = None
    speedup_low: float | None = None
    speedup_high: float | None = None
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
    def prediction_error(self) -> float | None:
        """|predicted − measured| / measured seconds per token; None where one of them is
        missing."""
        if not usable(self.predicted_seconds_per_token) or not usable(self.seconds_per_token):
            return None
        assert self.predicted_seconds_per_token is not None
        return abs(self.predicted_seconds_per_token / self.seconds_per_token - 1)

    def filled_from(self, other: Metrics) -> Metrics:
        """With the fields that only `other` has."""
        return self.model_copy(
            update={
                name: getattr(other, name)
                for name in other.model_fields_set - self.model_fields_set
            }
        )


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


class PredictionErrorRow(Row):
    """Seconds per token of a replayed configuration: predicted, measured, and predicted / measured
    − 1."""

    predicted: float
    measured: float
    error: float


class PredictionErrors(_Part):
    """How far replay was from what was measured; `median` is of the absolute errors."""

    median: float | None = None
    configs: list[PredictionErrorRow] = []


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
        return " ".join([*found, "Use a longer `collect --rollout`."]) if found else ""


class TuningEvidence(_Part):
    """A tuning's choice and all that it rests on.

    Args:
        trials: every configuration that was replayed or explored.
        front: indices into `trials` of the Pareto front. Values of replayed and of measured trials
            come from different prompts: `source` distinguishes them.
        measured: the last metrics of every configuration that was measured, plain decoding's first.
        left_out: strategy → why it was not tried; "champion" → why the champion was not measured.
        artifacts: kind → digest of what was tuned with.
        max_tokens, replayed_tokens: tokens per prompt as measured and as predicted.
        temperature: of the requests that the choice is for; None of older evidence, which is
            greedy.
        training_prompts: hashes of the prompts of its traces and measurements
            (`draftwell.components.prompts.overlap`); None of older evidence.
        unknown_prompts: what it was tuned with whose prompts are not recorded, so that
            `training_prompts` lacks them.
    """

    schema_version: int = 0
    choice: Choice
    reason: str = ""
    trials: list[Trial] = []
    front: list[int] = []
    rungs: list[Rung] = []
    confirmation: Confirmation | None = None
    measured: list[Metrics] = []
    prediction_error: PredictionErrors | None = None
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
        """The evidence that JSON holds, of this version or an older one.

        Args:
            value: evidence, or a `tuning.json`, which has `strategy` and `parameters` at its top,
                too.
            where: what holds it, for the error.
        Raises:
            DraftwellError: a newer version, or values that cannot be read (`evidence_too_new`,
                `evidence_unreadable`).
        """
        version = value.get("schema_version", 0)
        if isinstance(version, int) and version > EVIDENCE_VERSION:
            raise DraftwellError(
                f"{where} has schema version {version}, and this release reads up to "
                f"{EVIDENCE_VERSION}: upgrade "
                "Draftwell, or run `draftwell tune` again",
                code="evidence_too_new",
            )
        try:
            return cls.model_validate(
                {"choice": value, **value} if "choice" not in value else dict(value)
            )
        except ValidationError as error:
            first = error.errors()[0]
            name = ".".join(map(str, first["loc"]))
            raise DraftwellError(
                f"{where} cannot be read, {name}: {first['msg']}: run `draftwell tune` again",
                code="evidence_unreadable",
            ) from error

    def to_json(self) -> dict[str, Any]:
        """Plain JSON, with the fields that are set; an infinite parameter is the string "Infinity",
        which reads as one."""
        written: dict[str, Any] = json.loads(self.model_dump_json(exclude_unset=True))
        return written

    def with_choice(self, choice: StrategyChoice, reason: str) -> TuningEvidence:
        """The same evidence for another choice."""
        return self.model_copy(update={"choice": choice, "reason": reason})

    @property
    def timed_trials(self) -> list[Trial]:
        """The trials that have a time."""
        return [trial for trial in self.trials if usable(trial.predicted_seconds_per_token)]

    @property
    def front_trials(self) -> list[Trial]:
        """The trials on the Pareto front."""
        return [self.trials[i] for i in self.front]

    @property
    def confirmed(self) -> list[Metrics]:
        """The metrics that decided; none where an older tuner had no confirmation."""
        return self.confirmation.figures if self.confirmation is not None else []

    def latest_metrics(self) -> list[Metrics]:
        """What was measured of every configuration, plain decoding first: of the confirmation, else
        of its last rung.

        Each has what its trial knew, too: target calls, divergence, and the predicted time where
        that was predicted, not measured.
        """
        found: dict[StrategyChoice, Metrics] = {}
        for metrics in self._measurements():
            if usable(metrics.seconds_per_token):
                found[metrics.choice] = (
                    found[metrics.choice].filled_from(metrics)
                    if metrics.choice in found
                    else metrics
                )
        trials = {trial.choice: trial for trial in self.trials}
        filled = [_with_trial(metrics, trials.get(choice)) for choice, metrics in found.items()]
        return sorted(filled, key=lambda metrics: metrics.strategy != PLAIN.name)

    def _measurements(self) -> Iterator[Metrics]:
        """All metrics, those that count most first."""
        yield from self.confirmed
        yield from self.measured
        for rung in reversed(self.rungs):
            yield from rung.figures


def _with_trial(metrics: Metrics, trial: Trial | None) -> Metrics:
    """Metrics with what the trial of the same choice predicted."""
    known: dict[str, Any] = {}
    if trial is not None:
        names = {"predicted_seconds_per_token", "target_calls_per_token", "divergence"}
        known = {name: getattr(trial, name) for name in names - metrics.model_fields_set}
        if trial.source == "measured":
            known["predicted_seconds_per_token"] = None
    if metrics.quality_loss is not None:  # the same measure, of more text than the trial's
        known["divergence"] = metrics.quality_loss
    return metrics.model_copy(update=known)


def usable(value: float | None) -> bool:
    """Whether a time is there and is a positive, finite number."""
    return value is not None and math.isfinite(value) and value > 0
