"""The figures of a tuning's report, as text, from its evidence. A table is a list of rows, each a
dict of column → cell."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from draftwell.components.bench.engines.figures import Figure
from draftwell.components.report.tables import number
from draftwell.components.tune.evidence import Metrics, Trial, TuningEvidence
from draftwell.serving.runtime.strategies import PLAIN

Table = list[dict[str, str]]
SHOWN_TRIALS = 200
"""Trials in the report, the fastest; the evidence has all."""
FACTS = (
    "own_device",
    "device_class",
    "machine",
    "padded_to",
    "prompts",
    "max_tokens",
    "replayed_tokens",
    "seed",
    "temperature",
    "constraints",
    "champion",
    "fingerprint",
    "trace_digest",
    "artifacts",
    "prompts_digest",
)
"""Fields of the evidence that its figures depend on."""
MACHINE = ("device_name", "cores", "threads", "dtype", "device", "commit")


def tuning_tables(evidence: TuningEvidence) -> dict[str, Table]:
    """Title → table; the template has what stands around them."""
    trials = sorted(evidence.trials, key=lambda trial: trial.seconds)
    return {
        "Measured": measured(evidence),
        "Constraints": [limits_row(figure) for figure in evidence.confirmed],
        "Several requests at once": [load_row(figure) for figure in evidence.loads],
        "Successive halving": halving(evidence),
        "Left out": [{"strategy": name, "why": why} for name, why in evidence.left_out.items()],
        "Tried": [trial_row(trial) for trial in trials[:SHOWN_TRIALS]],
    }


def measured(evidence: TuningEvidence) -> Table:
    """Everything that was measured at length, each configuration by its last figures."""
    rows = []
    for figure in evidence.measured:
        row = measured_row(figure)
        if figure.choice == evidence.choice:
            row["config"] += " ← chosen"
        rows.append(row)
    return rows


def load_row(figure: Figure) -> dict[str, str]:
    """A draft length that was measured with several requests at once."""
    return {
        "requests": str(figure.at_once),
        "draft length": figure.label,
        "times plain decoding": f"{figure.ratio:.2f} ({figure.low:.2f} to {figure.high:.2f})",
        "tokens/s": f"{figure.tokens_per_second:.1f}",
    }


def choice_figures(evidence: TuningEvidence) -> dict[str, str]:
    """Name → value of what was measured of the choice; what was not is left out."""
    found = next((figure for figure in evidence.measured if figure.choice == evidence.choice), None)
    if found is None:
        return {}
    values = measured_row(found) | limits_row(found)
    for name in ("config", "confirmed", "objection"):
        del values[name]
    return {name: value for name, value in values.items() if value != "–"}


def measured_row(figure: Metrics) -> dict[str, str]:
    """What was measured of a configuration; plain decoding's speedup has no interval."""
    faster = f"{figure.speedup:.2f}"
    if figure.choice != PLAIN:
        faster += f" [{figure.speedup_low:.2f}, {figure.speedup_high:.2f}]"
    return {
        "config": str(figure.choice),
        "confirmed": "yes" if figure.confirmed else "",
        "tokens/s": f"{1 / figure.seconds:.1f}",
        "times as fast": faster,
        "ms per token": milliseconds(figure.seconds),
        "predicted ms": milliseconds(figure.predicted_seconds_per_token),
        "error": number(figure.prediction_error, ".1%"),
        "target calls per token": number(figure.target_calls_per_token, ".3f"),
    }


def limits_row(figure: Metrics) -> dict[str, str]:
    """How far a configuration keeps to the constraints."""
    return {
        "config": str(figure.choice),
        "quality lost": number(figure.quality_loss, ".1%"),
        "ROUGE-L points lost": number(figure.rouge_l_lost, "+.1f"),
        "shift, nats a token": number(figure.surprisal_shift, ".3f"),
        "cost ratio": number(figure.cost_ratio, ".2f"),
        "objection": figure.objection or "none",
    }


def halving(evidence: TuningEvidence) -> Table:
    """What left in which rung, and why."""
    return [
        {
            "rung": str(i),
            "new prompts": plain(rung.prompts),
            "measured": str(len(rung.figures)),
            "dropped": "; ".join(f"{row.choice}: {row.why}" for row in rung.dropped) or "none",
        }
        for i, rung in enumerate(evidence.rungs, 1)
    ]


def trial_row(trial: Trial) -> dict[str, str]:
    """What is known of a trial; a replay is an estimate where drafts were longer than what the
    trace holds."""
    estimate = ", estimate" if not trial.was_measured and not trial.exact else ""
    return {
        "config": str(trial.choice),
        "ms per token": milliseconds(trial.seconds),
        "target calls per token": number(trial.target_calls_per_token, ".3f"),
        "divergence": number(trial.divergence, ".4f"),
        "how known": f"{trial.source}{estimate}",
    }


def facts(evidence: TuningEvidence) -> dict[str, str]:
    """What the figures depend on, by name."""
    known = {name: getattr(evidence, name) for name in FACTS}
    known["machine"] = {
        name: evidence.machine[name] for name in MACHINE if name in evidence.machine
    }
    known["own_device"] = evidence.own_device and evidence.own_device.words
    known["constraints"] = evidence.constraints.model_dump() if evidence.constraints else None
    return {
        name.replace("_", " "): plain(value)
        for name, value in known.items()
        if value not in (None, {}, [])
    }


def plain(value: Any) -> str:
    """A value of the evidence as text."""
    if isinstance(value, Mapping):
        return ", ".join(
            f"{name} {plain(inner)}" for name, inner in value.items() if inner is not None
        )
    if isinstance(value, Sequence) and not isinstance(value, str):
        return ", ".join(map(plain, value))
    return str(value)


def milliseconds(seconds: float | None) -> str:
    """Seconds as milliseconds; a dash where there are none."""
    return number(None if seconds is None else seconds * 1e3, ".2f")
