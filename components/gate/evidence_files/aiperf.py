"""Results of AIPerf: the folder of its `--output-artifact-dir`, with the summary
(`profile_export_aiperf.json`) and a line for every request (`profile_export.jsonl`), as of 0.13."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from draftwell.components.engines.port import Acceptance
from draftwell.components.gate.evidence_files.run import (
    BenchmarkRun,
    Count,
    Part,
    Request,
    Seconds,
    at_once,
    bad,
    checked,
    per_second,
)

TOOL = "AIPerf"
DETAILS = "--export-level records, the default, and the whole folder named"
IN_SECONDS = {"ns": 1e-9, "us": 1e-6, "ms": 1e-3, "sec": 1.0, "s": 1.0}


class Endpoint(Part):
    """What requests were sent to."""

    type: str | None = None
    streaming: bool | None = None
    extra: dict[str, Any] = Field(default_factory=dict)


class Phase(Part):
    """How requests were sent."""

    type: str
    rate: Seconds | None = None
    concurrency: int | None = None
    exclude_from_results: bool = False


class Model(Part):
    """A model that was asked for."""

    name: str


class Models(Part):
    """All of them."""

    items: list[Model]


class InputConfig(Part):
    """What a run was asked for."""

    models: Models
    endpoint: Endpoint
    phases: list[Phase]


class Total(Part):
    """A figure over all requests."""

    avg: float = Field(ge=0, allow_inf_nan=False)


class Summary(Part):
    """The summary of a run."""

    aiperf_version: str
    input_config: InputConfig
    start_time: str | None = None
    is_complete: bool = True
    was_cancelled: bool = False
    request_count: Total = Total(avg=0)
    error_request_count: Total = Total(avg=0)
    benchmark_duration: Total | None = None
    total_output_tokens: Total | None = None


class Labels(Part):
    """Which request a line is of."""

    session_num: int
    conversation_id: str | None = None
    turn_index: int | None = None
    request_start_ns: int
    benchmark_phase: str


class Value(Part):
    """A figure of a request."""

    value: float = Field(allow_inf_nan=False)
    unit: Literal["ns", "us", "ms", "sec", "s", "tokens"]


class Drafts(Part):
    """How the drafts of a request fared, where the server says."""

    num_draft_tokens: Count
    acceptance_histogram: dict[int, Count]


class Record(Part):
    """A line about a request."""

    metadata: Labels
    metrics: dict[str, Any]
    spec_decode_acceptance: Drafts | None = None
    error: Any = None


def is_summary(document: Any) -> bool:
    """Whether a document is a summary."""
    return isinstance(document, dict) and document.keys() >= {"aiperf_version", "input_config"}


def is_record(document: Any) -> bool:
    """Whether a document is a line about a request."""
    return (
        isinstance(document, dict)
        and document.keys() >= {"metadata", "metrics"}
        and isinstance(document["metadata"], dict)
        and "benchmark_phase" in document["metadata"]
    )


def read_runs(documents: list[tuple[Path, Any]]) -> list[BenchmarkRun]:
    """The run of a folder.

    Raises:
        DraftwellError: the summary is missing, or a value is wrong (`bad_evidence`).
    """
    summaries = [one for one in documents if is_summary(one[1])]
    rows = [one for one in documents if is_record(one[1])]
    if not summaries and not rows:
        return []
    if len(summaries) != 1:
        raise bad((rows or summaries)[0][0], "name the folder of one run, which has the load too")
    file, document = summaries[0]
    records = [(of, checked(Record, row, of)) for of, row in rows]
    return [run_of(file, checked(Summary, document, file), records)]


def run_of(file: Path, summary: Summary, records: list[tuple[Path, Record]]) -> BenchmarkRun:
    """The run of a folder; requests of the warm-up are left out."""
    config = summary.input_config
    if summary.was_cancelled or not summary.is_complete:
        raise bad(file, "the run was cut short")
    measured = [one for one in records if one[1].metadata.benchmark_phase == "profiling"]
    measured.sort(key=lambda one: one[1].metadata.request_start_ns)
    answered = [(of, one) for of, one in measured if one.error is None]
    requests = tuple(request_of(of, one) for of, one in answered)
    duration, tokens = summary.benchmark_duration, summary.total_output_tokens
    run = {
        "tool": TOOL,
        "version": summary.aiperf_version,
        "when": summary.start_time,
        "model": ", ".join(model.name for model in config.models.items),
        "load": load_of(file, config.phases),
        "conditions": config.endpoint.model_dump(),
        "completed": len(answered) if records else round(summary.request_count.avg),
        "failed": max(len(measured) - len(answered), round(summary.error_request_count.avg)),
        "requests": requests,
        "details": DETAILS,
        "seconds": duration.avg if duration else 0.0,
        "tokens": tokens.avg if tokens else float(sum(one.tokens for one in requests)),
        "acceptance": Acceptance.total(
            Acceptance.of_histogram(said.acceptance_histogram, said.num_draft_tokens)
            for _, one in answered
            if (said := one.spec_decode_acceptance)
        ),
    }
    return checked(BenchmarkRun, run, file)


def load_of(file: Path, phases: list[Phase]) -> str:
    """How requests were sent, in words."""
    measured = [phase for phase in phases if not phase.exclude_from_results]
    if len(measured) != 1:
        raise bad(file, "it has several phases: measure one load a run")
    [phase] = measured
    if phase.rate is not None:
        return f"{per_second(phase.rate)}, {phase.type}"
    return at_once(phase.concurrency or 1) if phase.type == "concurrency" else phase.type


def request_of(file: Path, record: Record) -> Request:
    """A request that was answered."""
    labels = record.metadata
    length = figure(file, record, "input_sequence_length")
    request = {
        "prompt": f"{labels.conversation_id or labels.session_num}, turn {labels.turn_index or 0}, "
        f"{'?' if length is None else round(length)} tokens",
        "seconds": figure(file, record, "request_latency") or 0.0,
        "tokens": round(figure(file, record, "output_sequence_length") or 0),
        "first_token_seconds": figure(file, record, "time_to_first_token"),
    }
    return checked(Request, request, file)


def figure(file: Path, record: Record, name: str) -> float | None:
    """A figure of a request, times in seconds; None where it has none."""
    if name not in record.metrics:
        return None
    found = checked(Value, record.metrics[name], file)
    return found.value * IN_SECONDS.get(found.unit, 1.0)
