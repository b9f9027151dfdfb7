"""Results of `vllm bench serve --save-result`, `--append-result` and `--save-detailed`.

Files of vLLM 0.32 name no version of it. Without `--save-detailed` they keep the requests' seconds
and not their tokens.
"""

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
    Share,
    at_once,
    bad,
    checked,
    per_second,
)

TOOL = "vllm bench serve"
DETAILS = "--save-detailed"
KEYS = {"backend", "max_concurrency", "request_throughput", "total_output_tokens"}
SAME = ("backend", "num_prompts", "total_input_tokens", "burstiness", "ramp_up_strategy", "dtype")
"""What comparable results share; `dtype` is there where `--metadata dtype=...` names it."""


class Result(Part):
    """One line of a file of results."""

    date: str
    model_id: str
    num_prompts: Count
    request_rate: Seconds | Literal["inf"]
    max_concurrency: int | None
    duration: Seconds
    completed: Count
    failed: Count = 0
    total_output_tokens: Count
    input_lens: list[Count] | None = None
    output_lens: list[Count] | None = None
    ttfts: list[float] | None = None
    itls: list[list[float]] | None = None
    latencies: list[float] | None = None
    errors: list[str] | None = None
    spec_decode_num_drafts: Count = 0
    spec_decode_draft_tokens: Count = 0
    spec_decode_accepted_tokens: Count = 0
    spec_decode_per_position_acceptance_rates: list[Share] = Field(default_factory=list)


def is_ours(document: Any) -> bool:
    """Whether a document is such a result."""
    return isinstance(document, dict) and document.keys() >= KEYS


def read_runs(documents: list[tuple[Path, Any]]) -> list[BenchmarkRun]:
    """One run for each result.

    Raises:
        DraftwellError: a value is wrong, or lists of requests have different lengths
            (`bad_evidence`).
    """
    return [run_of(file, document) for file, document in documents if is_ours(document)]


def run_of(file: Path, document: dict[str, Any]) -> BenchmarkRun:
    """The run of one result."""
    result = checked(Result, document, file)
    if result.request_rate == "inf":
        load = at_once(result.max_concurrency or result.num_prompts)
    else:
        load = per_second(result.request_rate)
        if result.max_concurrency is not None:
            load += f", {at_once(result.max_concurrency)} at most"
    drafts = result.spec_decode_num_drafts
    run = {
        "tool": TOOL,
        "when": result.date,
        "model": result.model_id,
        "load": load,
        "conditions": {name: document[name] for name in SAME if name in document},
        "completed": result.completed,
        "failed": result.failed,
        "requests": tuple(requests_of(file, result)),
        "details": DETAILS,
        "seconds": result.duration,
        "tokens": float(result.total_output_tokens),
        "acceptance": Acceptance(
            rounds=drafts,
            drafted=result.spec_decode_draft_tokens,
            accepted=result.spec_decode_accepted_tokens,
            accepted_at=tuple(
                round(rate * drafts) for rate in result.spec_decode_per_position_acceptance_rates
            ),
        ),
    }
    return checked(BenchmarkRun, run, file)


def requests_of(file: Path, result: Result) -> list[Request]:
    """The answered requests, in the order of the data set; none without `--save-detailed`."""
    tokens, lengths, first = result.output_lens, result.input_lens, result.ttfts
    if tokens is None or lengths is None or first is None:
        return []
    errors = result.errors or [""] * len(tokens)
    seconds = result.latencies
    if seconds is None:  # as of vLLM before 0.11
        seconds = [one + sum(rest) for one, rest in zip(first, result.itls or [], strict=False)]
    if len({len(one) for one in (tokens, lengths, first, errors, seconds)}) > 1:
        raise bad(file, "its lists of requests have different lengths")
    return [
        checked(
            Request,
            {
                # the file names no prompts: place and length stand for them
                "prompt": f"{place}, {length} tokens",
                "seconds": took,
                "tokens": count,
                "first_token_seconds": ttft,
            },
            file,
        )
        for place, (count, length, ttft, error, took) in enumerate(
            zip(tokens, lengths, first, errors, seconds, strict=True)
        )
        if not error
    ]
