"""Results of llama.cpp's client, `tools/server/bench/speed-bench/speed_bench.py --output`.

Its files name neither llama.cpp's version nor when they were made, and list requests in the order
in which they were complete. `llama-bench` cannot draft: its files are recognised to say so.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from draftwell.components.engines.port import Acceptance
from draftwell.components.gate.evidence_files.run import (
    BenchmarkRun,
    Count,
    Milliseconds,
    Part,
    Request,
    Seconds,
    at_once,
    checked,
)
from draftwell.serving.errors import DraftwellError

TOOL = "llama.cpp speed_bench"
DETAILS = "--output"
SAME = ("bench", "category", "osl", "extra_inputs")


class Config(Part):
    """What a run was asked for."""

    model: str | None = None
    concurrency: int


class Result(Part):
    """One sample, of one or several turns."""

    id: str
    ok: bool
    latency_s: Seconds
    completion_tokens: Count
    prompt_ms: Milliseconds | None = None
    draft_n: Count
    draft_n_accepted: Count
    turns: int


class Output(Part):
    """A file of results."""

    config: Config
    results: list[dict[str, Any]]


def is_ours(document: Any) -> bool:
    """Whether a document is such a file.

    Raises:
        DraftwellError: it is one of `llama-bench` (`evidence_without_drafts`).
    """
    first = document[0] if isinstance(document, list) and document else None
    if isinstance(first, dict) and first.keys() >= {"build_commit", "samples_ts"}:
        raise DraftwellError(
            "llama-bench decodes without drafts, so its results say nothing of them: measure "
            "llama-server with llama.cpp's tools/server/bench/speed-bench",
            code="evidence_without_drafts",
        )
    return isinstance(document, dict) and document.keys() >= {"selected_samples", "results"}


def read_runs(documents: list[tuple[Path, Any]]) -> list[BenchmarkRun]:
    """One run for each file.

    Raises:
        DraftwellError: a value is wrong (`bad_evidence`).
    """
    return [run_of(file, document) for file, document in documents if is_ours(document)]


def run_of(file: Path, document: dict[str, Any]) -> BenchmarkRun:
    """The run of one file."""
    output = checked(Output, document, file)
    answered = [checked(Result, one, file) for one in output.results if one.get("ok")]
    requests = tuple(request_of(file, one) for one in answered)
    run = {
        "tool": TOOL,
        "model": output.config.model,
        "load": at_once(output.config.concurrency),
        "conditions": {name: document["config"].get(name) for name in SAME},
        "completed": len(answered),
        "failed": len(output.results) - len(answered),
        "requests": requests,
        "details": DETAILS,
        "seconds": sum(one.seconds for one in requests) / max(1, output.config.concurrency),
        "tokens": float(sum(one.tokens for one in requests)),
        # the server says how many tokens were drafted, and not in how many rounds
        "acceptance": Acceptance(
            drafted=sum(one.draft_n for one in answered),
            accepted=sum(one.draft_n_accepted for one in answered),
        ),
    }
    return checked(BenchmarkRun, run, file)


def request_of(file: Path, result: Result) -> Request:
    """A sample as one request; the time to its first token is that of reading the prompt."""
    first = None if result.turns > 1 or result.prompt_ms is None else result.prompt_ms / 1000
    request = {
        "prompt": result.id,
        "seconds": result.latency_s,
        "tokens": result.completion_tokens,
        "first_token_seconds": first,
    }
    return checked(Request, request, file)
