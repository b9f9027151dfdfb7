"""The tables and figures of a tuning's report, in words, from its evidence."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from components.report.tables import number
from components.tune.report.reading import (
    REFERENCE,
    Entry,
    confirmation_of,
    describe_config,
    front_of,
    is_choice,
    key,
    measured_of,
    prediction_error,
    rollout_words,
    source_of,
    trials_of,
)

MEASURED_COLUMNS = ("config", "tokens/s", "times as fast", "ms per token", "predicted ms", "error", "target calls per token")
LIMIT_COLUMNS = ("config", "quality lost", "ROUGE-L points lost", "cost ratio", "objection")
TRIAL_COLUMNS = ("config", "ms per token", "target calls per token", "divergence", "how known")
SHOWN_TRIALS = 200
"""Trials in the report, the fastest; the evidence has all."""
FACTS = {"device_class": "machine class", "machine": "machine", "padded_to": "target padded to parameters", "prompts": "prompts measured",
         "max_tokens": "tokens per prompt, measured", "replayed_tokens": "tokens per text, replayed", "seed": "seed",
         "constraints": "constraints", "champion": "champion",
         "fingerprint": "pair fingerprint", "trace_digest": "traces", "artifacts": "artifacts", "prompts_digest": "prompts' digest"}
"""Key of the evidence → its words."""
MACHINE = ("device_name", "cores", "threads", "dtype", "device", "commit")


@dataclass(frozen=True)
class Section:
    """A table of words with its heading.

    Args:
        note: a sentence below it.
        folded: closed until the reader opens it.
    """

    title: str
    columns: tuple[str, ...]
    rows: list[list[str]]
    note: str = ""
    folded: bool = False


def choice_figures(evidence: Entry) -> list[tuple[str, str]]:
    """Name and value of what was measured of the choice; what was not is left out."""
    figure = next((figure for figure in measured_of(evidence) if is_choice(evidence, figure)), None)
    if figure is None:
        return []
    found = [("times as fast as plain decoding", ratio(figure)), ("tokens per second", f"{1 / figure['seconds_per_token']:.1f}"),
             ("ms per token", milliseconds(figure, "seconds_per_token")),
             ("ms per token, median of prompts", milliseconds(figure, "median_seconds_per_token")),
             ("ms per token, predicted", milliseconds(figure, "predicted_seconds_per_token")),
             ("prediction error", number(prediction_error(figure), ".1%")),
             ("target calls per token", number(figure.get("target_calls_per_token"), ".3f")),
             ("cost ratio", number(figure.get("cost_ratio"), ".2f")), ("quality lost", number(figure.get("quality_loss"), ".1%"))]
    return [(name, value) for name, value in found if value != "–"]


def tuning_tables(evidence: Entry) -> list[Section]:
    """The tables that the evidence has rows for."""
    sections = [confirmation(evidence), limits(evidence), halving(evidence), measured(evidence), pareto(evidence), left_out(evidence),
                tried(evidence)]
    return [section for section in sections if section.rows]


def confirmation(evidence: Entry) -> Section:
    """The last, fresh measurement."""
    deciding = {key(figure) for figure in confirmation_of(evidence)}
    tail = (evidence.get("confirmation") or {}).get("tail")
    ends = f"; each end of the brackets leaves out {tail:.1%}" if tail is not None else ""
    return Section("Confirmation", MEASURED_COLUMNS, measured_rows(evidence, [f for f in measured_of(evidence) if key(f) in deciding]),
                   f"Measured afresh on all prompts, interleaved: only this decided{ends} (bootstrap over prompts).")


def limits(evidence: Entry) -> Section:
    """How the confirmed configs keep to the constraints."""
    rows = [[describe_config(figure), number(figure.get("quality_loss"), ".1%"), number(figure.get("rouge_l_lost"), "+.1f"),
             number(figure.get("cost_ratio"), ".2f"), str(figure.get("objection") or "none")] for figure in confirmation_of(evidence)]
    return Section("Constraints", LIMIT_COLUMNS, rows)


def halving(evidence: Entry) -> Section:
    """Who went in which rung, and why."""
    rows = []
    for i, rung in enumerate(evidence.get("rungs") or (), 1):
        gone = [f"{describe_config(entry)}: {entry.get('why', '')}" for entry in rung.get("dropped") or ()]
        rows.append([str(i), plain(rung.get("prompts") or ()), str(len(rung.get("figures") or ())), "; ".join(gone) or "nobody"])
    return Section("Halving", ("rung", "new prompts", "measured", "dropped"), rows)


def measured(evidence: Entry) -> Section:
    """Everything that was measured at length, each config by its last figures."""
    return Section("Measured", MEASURED_COLUMNS, measured_rows(evidence, measured_of(evidence)),
                   "The last figures of every config: those that were dropped early rest on fewer prompts.")


def pareto(evidence: Entry) -> Section:
    """The tried configs that no other beats in one respect without losing in another."""
    return Section("Pareto front", TRIAL_COLUMNS, trial_rows(front_of(evidence)))


def left_out(evidence: Entry) -> Section:
    """What was not tried, and why."""
    return Section("Left out", ("strategy", "why"), [[name, str(why)] for name, why in (evidence.get("left_out") or {}).items()])


def tried(evidence: Entry) -> Section:
    """All that was tried, the fastest first."""
    trials = sorted(trials_of(evidence), key=lambda trial: trial["predicted_seconds_per_token"])
    shown = f"The fastest {SHOWN_TRIALS} of {len(trials)}." if len(trials) > SHOWN_TRIALS else ""
    note = f"{shown} {rollout_words(evidence)}".strip()
    return Section(f"Tried ({len(trials)})", TRIAL_COLUMNS, trial_rows(trials[:SHOWN_TRIALS]), note, folded=True)


def measured_rows(evidence: Entry, figures: Iterable[Entry]) -> list[list[str]]:
    """Measured configs in `MEASURED_COLUMNS`."""
    return [[describe_config(figure) + (" ← chosen" if is_choice(evidence, figure) else ""), f"{1 / figure['seconds_per_token']:.1f}",
             ratio(figure), milliseconds(figure, "seconds_per_token"), milliseconds(figure, "predicted_seconds_per_token"),
             number(prediction_error(figure), ".1%"), number(figure.get("target_calls_per_token"), ".3f")] for figure in figures]


def trial_rows(trials: Iterable[Entry]) -> list[list[str]]:
    """Tried configs in `TRIAL_COLUMNS`."""
    return [[describe_config(trial), milliseconds(trial, "predicted_seconds_per_token"), number(trial.get("target_calls_per_token"), ".3f"),
             number(trial.get("divergence"), ".4f"), how_known(trial)] for trial in trials]


def how_known(trial: Entry) -> str:
    """Where a trial's values come from; replay is an estimate where drafts ran on behind what the trace holds."""
    source = source_of(trial)
    return f"{source}, estimate" if source == "replayed" and not trial.get("exact", True) else source


def facts(evidence: Entry) -> list[tuple[str, str]]:
    """What the figures depend on."""
    shown = dict(evidence)
    if isinstance(shown.get("machine"), Mapping):
        shown["machine"] = {name: shown["machine"].get(name) for name in MACHINE}
    if isinstance(shown.get("champion"), Mapping):
        shown["champion"] = describe_config(shown["champion"])
    return [(name, plain(shown[what])) for what, name in FACTS.items() if shown.get(what) not in (None, {}, [])]


def plain(value: Any) -> str:
    """A value of the evidence in words."""
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {plain(inner)}" for name, inner in value.items() if inner is not None)
    if isinstance(value, Sequence) and not isinstance(value, str):
        return ", ".join(map(plain, value))
    return str(value)


def ratio(figure: Entry) -> str:
    """`1.31 [1.25, 1.38]`; plain decoding is the measure itself."""
    if figure.get("speedup") is None:
        return "–"
    if figure["strategy"] == REFERENCE:
        return f"{figure['speedup']:.2f}"
    return f"{figure['speedup']:.2f} [{number(figure.get('speedup_low'), '.2f')}, {number(figure.get('speedup_high'), '.2f')}]"


def milliseconds(entry: Entry, name: str) -> str:
    """Seconds as milliseconds; a dash where there are none."""
    seconds = entry.get(name)
    return number(None if seconds is None else seconds * 1e3, ".2f")
