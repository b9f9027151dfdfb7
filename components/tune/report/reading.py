"""Reading a tuning's evidence, whose form is that of `tuning.tune`; what it lacks (an older one, a tuning cut short) is left out."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from typing import Any

REFERENCE = "autoregressive"
VALUES = ("predicted_seconds_per_token", "target_calls_per_token", "divergence")
"""What a trial says of a config: the objectives of the search."""

Entry = Mapping[str, Any]
"""A trial, or the figures of a measured config: `strategy`, `parameters` and more."""


def trials_of(evidence: Entry) -> list[Entry]:
    """The configurations that were tried by replay, by an estimate or by a first short measurement, and have a time."""
    return [trial for trial in evidence.get("trials") or () if usable(trial.get("predicted_seconds_per_token"))]


def measured_of(evidence: Entry) -> list[Entry]:
    """What was measured of every config, plain decoding first: the confirmation's figures, else those of its last rung.

    Each has what its trial knew, too: target calls, divergence, and the predicted time where that was predicted, not measured.
    """
    trials = {key(trial): trial for trial in evidence.get("trials") or ()}
    found: dict[str, dict[str, Any]] = {}
    for figure in measurements(evidence):
        if usable(figure.get("seconds_per_token")):
            found[key(figure)] = {**figure, **found.get(key(figure), {})}
    for name, figure in found.items():
        trial = trials.get(name, {})
        for value in VALUES:
            figure.setdefault(value, trial.get(value))
        if source_of(trial) == "measured":
            figure["predicted_seconds_per_token"] = None
        if figure.get("quality_loss") is not None:  # the same measure, of more text than the trial's
            figure["divergence"] = figure["quality_loss"]
    return sorted(found.values(), key=lambda figure: figure["strategy"] != REFERENCE)


def measurements(evidence: Entry) -> Iterator[Entry]:
    """All measured figures, those that count most first."""
    yield from confirmation_of(evidence)
    yield from evidence.get("measured") or ()
    for rung in reversed(evidence.get("rungs") or ()):
        yield from rung.get("figures") or ()


def confirmation_of(evidence: Entry) -> list[Entry]:
    """The figures of the last measurement, which decided; none in evidence of an older tuning."""
    return list((evidence.get("confirmation") or {}).get("figures") or ())


def front_of(evidence: Entry) -> list[Entry]:
    """The trials on the Pareto front."""
    trials = evidence.get("trials") or ()
    return [trials[i] for i in evidence.get("front") or ()]


def rollout_words(evidence: Entry) -> str:
    """A sentence or two on what the trace's rollouts were too short for; nothing where they sufficed, or in older evidence.

    >>> rollout_words({"rollouts": {"length": 16, "beyond": {"pearl": 2}, "inexact": 0, "replayed": 60}})
    'Not tried, as too long for rollouts of 16 tokens: 2 of pearl. A longer `collect --rollout` mends that.'
    """
    rollouts = evidence.get("rollouts") or {}
    said = []
    if rollouts.get("inexact"):
        said.append(f"{rollouts['inexact']} of {rollouts['replayed']} replays are estimates: drafts ran on behind the rollouts of "
                    f"{rollouts['length']} tokens.")
    if rollouts.get("beyond"):
        those = ", ".join(f"{count} of {name}" for name, count in rollouts["beyond"].items())
        said.append(f"Not tried, as too long for rollouts of {rollouts['length']} tokens: {those}.")
    return " ".join([*said, "A longer `collect --rollout` mends that."]) if said else ""


def source_of(trial: Entry) -> str:
    """Where a trial's values come from: replayed, estimated, or measured."""
    return str(trial.get("source", "replayed"))


def is_choice(evidence: Entry, entry: Entry) -> bool:
    """Whether this is the configuration that was chosen."""
    return key(entry) == key(evidence["choice"])


def key(entry: Entry) -> str:
    """A config as text, whatever the order of its parameters."""
    return json.dumps([entry["strategy"], entry["parameters"]], sort_keys=True)


def describe_config(entry: Entry) -> str:
    """A config for people.

    >>> describe_config({"strategy": "spide", "parameters": {"tau": 0.5}}), describe_config({"strategy": "svip", "parameters": {}})
    ('spide(tau=0.5)', 'svip')
    """
    settings = ", ".join(f"{name}={value}" for name, value in entry["parameters"].items())
    return f"{entry['strategy']}({settings})" if settings else str(entry["strategy"])


def prediction_error(figure: Entry) -> float | None:
    """|predicted − measured| / measured seconds per token; None where one of them is missing."""
    if not usable(figure.get("predicted_seconds_per_token")) or not usable(figure.get("seconds_per_token")):
        return None
    return float(abs(figure["predicted_seconds_per_token"] / figure["seconds_per_token"] - 1))


def usable(value: Any) -> bool:
    """Whether a figure is there and is a positive number."""
    return is_number(value) and value > 0


def is_number(value: Any) -> bool:
    """Whether a value has a place on an axis: no text, no flag, nothing infinite."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
