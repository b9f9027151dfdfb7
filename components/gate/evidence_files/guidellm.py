"""Reports of guidellm (`guidellm run --output kind=json,path=...`), as of 0.8."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from pydantic import Field

from draftwell.components.engines.port import Acceptance
from draftwell.components.gate.evidence_files.run import (
    BenchmarkRun,
    Count,
    Milliseconds,
    Moment,
    Part,
    Request,
    Seconds,
    at_once,
    bad,
    checked,
    per_second,
)
from draftwell.serving.files import json_digest

TOOL = "guidellm"
DETAILS = "--metrics kind=generative without sample_size"


class Metadata(Part):
    """Who wrote a report."""

    guidellm_version: str


class Strategy(Part):
    """How requests were sent."""

    type_: str
    streams: int | None = None
    rate: Seconds | None = None
    max_concurrency: int | None = None


class Extras(Part):
    """What was added to every request; headers are not read, since they may hold a key."""

    body: dict[str, Any] | None = None


class Backend(Part):
    """What they were sent to."""

    model: str
    request_format: str | None = None
    max_tokens: int | None = None
    extras: Extras | None = None


class Config(Part):
    """How one benchmark was run."""

    strategy: Strategy
    backend: Backend


class Window(Part):
    """When requests were measured: between warm-up and cool-down; seconds since 1970."""

    start_time: Moment
    measure_start_time: Moment
    measure_end_time: Moment


class Speculation(Part):
    """What a vLLM with `--per-request-spec-decode-metrics` says of a request."""

    num_draft_tokens: Count
    acceptance_histogram: list[Count]


class ServerMetrics(Part):
    """What the server says of a request."""

    speculative_decoding: Speculation | None = None


class Stats(Part):
    """One request."""

    request_args: str | None = None
    request_start_time: Moment
    request_end_time: Moment
    request_latency: Seconds
    output_tokens: Count
    time_to_first_token_ms: Milliseconds | None = None
    response_metrics: ServerMetrics | None = None


class Requests(Part):
    """All requests by what became of them."""

    successful: list[Stats]
    errored: list[Any]


class Benchmark(Part):
    """One benchmark of a report: one load."""

    config: Config
    scheduler_metrics: Window
    requests: Requests


class Report(Part):
    """A report."""

    metadata: Metadata
    benchmarks: list[Benchmark] = Field(min_length=1)


def is_ours(document: Any) -> bool:
    """Whether a document is a report."""
    metadata = document.get("metadata") if isinstance(document, dict) else None
    return isinstance(metadata, dict) and "guidellm_version" in metadata


def read_runs(documents: list[tuple[Path, Any]]) -> list[BenchmarkRun]:
    """One run for each benchmark of each report.

    Raises:
        DraftwellError: a value is wrong, or nothing was measured (`bad_evidence`).
    """
    return [
        run_of(file, report.metadata.guidellm_version, benchmark)
        for file, document in documents
        if is_ours(document)
        for report in (checked(Report, document, file),)
        for benchmark in report.benchmarks
    ]


def run_of(file: Path, version: str, benchmark: Benchmark) -> BenchmarkRun:
    """The run of one benchmark. Requests that warm-up or cool-down touch are not measured ones,
    though the report lists them."""
    window, backend = benchmark.scheduler_metrics, benchmark.config.backend
    stats = sorted(
        (
            one
            for one in benchmark.requests.successful
            if one.request_start_time >= window.measure_start_time
            and one.request_end_time <= window.measure_end_time
        ),
        key=lambda one: one.request_start_time,
    )
    known = [one for one in stats if one.request_args is not None]
    run = {
        "tool": TOOL,
        "version": version,
        "when": datetime.fromtimestamp(window.start_time, UTC).isoformat(timespec="seconds"),
        "model": backend.model,
        "load": load_of(benchmark.config.strategy),
        "conditions": backend.model_dump(exclude={"model"}),
        "completed": len(stats),
        "failed": len(benchmark.requests.errored),
        "requests": tuple(request_of(file, one) for one in known) if known == stats else (),
        "details": DETAILS,
        "seconds": max(0.0, window.measure_end_time - window.measure_start_time),
        "tokens": float(sum(one.output_tokens for one in stats)),
        "acceptance": Acceptance.total(
            Acceptance.of_histogram(said.acceptance_histogram, said.num_draft_tokens)
            for one in stats
            if one.response_metrics and (said := one.response_metrics.speculative_decoding)
        ),
    }
    return checked(BenchmarkRun, run, file)


def load_of(strategy: Strategy) -> str:
    """A strategy in words."""
    if strategy.rate is not None:
        return f"{per_second(strategy.rate)}, {strategy.type_}"
    if (requests := strategy.streams or strategy.max_concurrency) is not None:
        return at_once(requests)
    return at_once(1) if strategy.type_ == "synchronous" else strategy.type_


def request_of(file: Path, stats: Stats) -> Request:
    """A request, known by all that was asked for but the served model's name."""
    try:
        asked = json.loads(str(stats.request_args))
    except ValueError as error:
        raise bad(file, "request_args is no JSON") from error
    if isinstance(asked, dict) and isinstance(asked.get("body"), dict):
        asked["body"].pop("model", None)
    first = stats.time_to_first_token_ms
    request = {
        "prompt": json_digest(asked),
        "seconds": stats.request_latency,
        "tokens": stats.output_tokens,
        "first_token_seconds": None if first is None else first / 1000,
    }
    return checked(Request, request, file)
