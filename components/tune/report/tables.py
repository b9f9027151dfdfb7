"""The tables and figures of a tuning's report, as text, from its evidence."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from draftwell.components.report.tables import number
from draftwell.components.tune.evidence import Metrics, Trial, TuningEvidence
from draftwell.serving.runtime.strategies import PLAIN

MEASURED_COLUMNS = (
    "config",
    "confirmed",
    "tokens/s",
    "times as fast",
    "ms per token",
    "predicted ms",
    "error",
    "target calls per token",
)
LIMIT_COLUMNS = (
    "config",
    "quality lost",
    "ROUGE-L points lost",
    "shift, nats a token",
    "cost ratio",
    "objection",
)
TRIAL_COLUMNS = ("config", "ms per token", "target calls per token", "divergence", "how known")
SHOWN_TRIALS = 200
"""Trials in the report, the fastest; the evidence has all."""
FACTS = {
    "device_class": "machine class",
    "machine": "machine",
    "padded_to": "target padded to parameters",
    "prompts": "prompts measured",
    "max_tokens": "tokens per prompt, measured",
    "replayed_tokens": "tokens per text, replayed",
    "seed": "seed",
    "temperature": "temperature of the requests",
    "constraints": "constraints",
    "champion": "champion",
    "fingerprint": "pair fingerprint",
    "trace_digest": "traces",
    "artifacts": "artifacts",
    "prompts_digest": "prompts' digest",
}
"""Field of the evidence → what the report calls it."""
MACHINE = ("device_name", "cores", "threads", "dtype", "device", "commit")


@dataclass(frozen=True)
class Section:
    """A table of text with its heading.

    Args:
        note: a sentence below it.
        folded: closed until the reader opens it.
    """

    title: str
    columns: tuple[str, ...]
    rows: list[list[str]]
    note: str = ""
    folded: bool = False


def choice_figures(evidence: TuningEvidence) -> list[tuple[str, str]]:
    """Name and value of what was measured of the choice; what was not is left out."""
    figure = next(
        (figure for figure in evidence.measured if figure.choice == evidence.choice), None
    )
    if figure is None:
        return []
    found = [
        ("times as fast as plain decoding", ratio(figure)),
        ("tokens per second", f"{1 / figure.seconds_per_token:.1f}"),
        ("ms per token", milliseconds(figure.seconds_per_token)),
        ("ms per token, predicted", milliseconds(figure.predicted_seconds_per_token)),
        ("prediction error", number(figure.prediction_error, ".1%")),
        ("target calls per token", number(figure.target_calls_per_token, ".3f")),
        ("cost ratio", number(figure.cost_ratio, ".2f")),
        ("quality lost", number(figure.quality_loss, ".1%")),
    ]
    return [(name, value) for name, value in found if value != "–"]


def tuning_tables(evidence: TuningEvidence) -> list[Section]:
    """The tables that the evidence has rows for."""
    sections = [
        measured(evidence),
        limits(evidence),
        halving(evidence),
        left_out(evidence),
        tried(evidence),
    ]
    return [section for section in sections if section.rows]


def limits(evidence: TuningEvidence) -> Section:
    """How far the confirmed configurations keep to the constraints."""
    rows = [
        [
            str(figure.choice),
            number(figure.quality_loss, ".1%"),
            number(figure.rouge_l_lost, "+.1f"),
            number(figure.surprisal_shift, ".3f"),
            number(figure.cost_ratio, ".2f"),
            figure.objection or "none",
        ]
        for figure in evidence.confirmed
    ]
    return Section("Constraints", LIMIT_COLUMNS, rows)


def halving(evidence: TuningEvidence) -> Section:
    """What left in which rung, and why."""
    rows = [
        [
            str(i),
            plain(rung.prompts),
            str(len(rung.figures)),
            "; ".join(f"{row.choice}: {row.why}" for row in rung.dropped) or "none",
        ]
        for i, rung in enumerate(evidence.rungs, 1)
    ]
    return Section("Successive halving", ("rung", "new prompts", "measured", "dropped"), rows)


def measured(evidence: TuningEvidence) -> Section:
    """Everything that was measured at length, each configuration by its last figures."""
    tail = evidence.confirmation.tail if evidence.confirmation is not None else None
    ends = f"; each end of the brackets leaves out {tail:.1%}" if tail is not None else ""
    return Section(
        "Measured",
        MEASURED_COLUMNS,
        measured_rows(evidence, evidence.measured),
        f"What is confirmed was measured again on all prompts, in turn: only this decided{ends} "
        "(bootstrap over prompts). The others are by their last figures, of fewer prompts.",
    )


def left_out(evidence: TuningEvidence) -> Section:
    """What was not tried, and why."""
    return Section(
        "Left out", ("strategy", "why"), [[name, why] for name, why in evidence.left_out.items()]
    )


def tried(evidence: TuningEvidence) -> Section:
    """All that was tried, the fastest first."""
    trials = sorted(evidence.trials, key=lambda trial: trial.predicted_seconds_per_token)
    shown = f"The fastest {SHOWN_TRIALS} of {len(trials)}." if len(trials) > SHOWN_TRIALS else ""
    note = f"{shown} {evidence.rollouts.summary if evidence.rollouts else ''}".strip()
    return Section(
        f"Tried ({len(trials)})",
        TRIAL_COLUMNS,
        trial_rows(trials[:SHOWN_TRIALS]),
        note,
        folded=True,
    )


def measured_rows(evidence: TuningEvidence, figures: Iterable[Metrics]) -> list[list[str]]:
    """Measured configs in `MEASURED_COLUMNS`."""
    return [
        [
            f"{figure.choice}{' ← chosen' if figure.choice == evidence.choice else ''}",
            "yes" if figure.confirmed else "",
            f"{1 / figure.seconds_per_token:.1f}",
            ratio(figure),
            milliseconds(figure.seconds_per_token),
            milliseconds(figure.predicted_seconds_per_token),
            number(figure.prediction_error, ".1%"),
            number(figure.target_calls_per_token, ".3f"),
        ]
        for figure in figures
    ]


def trial_rows(trials: Iterable[Trial]) -> list[list[str]]:
    """Tried configs in `TRIAL_COLUMNS`."""
    return [
        [
            str(trial.choice),
            milliseconds(trial.predicted_seconds_per_token),
            number(trial.target_calls_per_token, ".3f"),
            number(trial.divergence, ".4f"),
            how_known(trial),
        ]
        for trial in trials
    ]


def how_known(trial: Trial) -> str:
    """Where a trial's values come from; replay is an estimate where drafts were longer than what
    the trace holds."""
    return (
        f"{trial.source}, estimate"
        if trial.source == "replayed" and not trial.exact
        else trial.source
    )


def facts(evidence: TuningEvidence) -> list[tuple[str, str]]:
    """What the figures depend on."""
    known = {name: getattr(evidence, name) for name in FACTS}
    known["machine"] = {
        name: evidence.machine[name] for name in MACHINE if name in evidence.machine
    }
    known["constraints"] = evidence.constraints.model_dump() if evidence.constraints else None
    return [
        (name, plain(known[what]))
        for what, name in FACTS.items()
        if known[what] not in (None, {}, [])
    ]


def plain(value: Any) -> str:
    """A value of the evidence as text."""
    if isinstance(value, Mapping):
        return ", ".join(
            f"{name} {plain(inner)}" for name, inner in value.items() if inner is not None
        )
    if isinstance(value, Sequence) and not isinstance(value, str):
        return ", ".join(map(plain, value))
    return str(value)


def ratio(figure: Metrics) -> str:
    """`1.31 [1.25, 1.38]`; plain decoding, which speedups are relative to, has no interval."""
    if figure.choice == PLAIN:
        return f"{figure.speedup:.2f}"
    return f"{figure.speedup:.2f} [{figure.speedup_low:.2f}, {figure.speedup_high:.2f}]"


def milliseconds(seconds: float | None) -> str:
    """Seconds as milliseconds; a dash where there are none."""
    return number(None if seconds is None else seconds * 1e3, ".2f")
