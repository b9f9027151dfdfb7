"""Results of specdec_bench (NVIDIA's Model-Optimizer, the client of SPEED-Bench): the folder of its
`--save_dir`, with `configuration.json`, `timing.json` and the acceptance.

It keeps the sums of a run and no request: further runs into the same folder are appended.
"""

from __future__ import annotations

from pathlib import Path, PurePath
from typing import Any

from pydantic import Field

from draftwell.components.engines.port import Acceptance
from draftwell.components.gate.evidence_files.run import (
    BenchmarkRun,
    Count,
    Part,
    Seconds,
    at_once,
    bad,
    checked,
)

TOOL = "specdec_bench"
DETAILS = "no option: it keeps the sums of a run alone, so run it again into the same --save_dir"
SAME = ("dataset", "mtbench", "specbench", "random_isl", "num_requests", "output_length")
SAME_TOO = ("ignore_eos", "temperature", "tp_size", "ep_size", "gpu")

MOST_TIMES_AS_FAST = 3
"""Of the runs in a folder: its configuration is that of the last, and the others may be at another
load."""


class Configuration(Part):
    """What the last run into a folder was asked for."""

    specdec_bench_version: str
    engine: str
    engine_version: str | None = None
    model_dir: str
    concurrency: int
    timestamp: str


class Mean(Part):
    """Statistics over requests; the tool writes numbers as text."""

    mean: float = Field(gt=0, allow_inf_nan=False)


class Timing(Part):
    """One run of `timing.json`."""

    speed: Seconds = Field(alias="Output TPS")
    tokens: Mean = Field(alias="Number of Output Tokens")


class Lengths(Part):
    """One run of `acceptance_rate.json`."""

    each: dict[str, Any] = Field(alias="Request_AL", min_length=1)
    histogram: dict[int, Count] = Field(alias="Acceptance_Length_Histogram")


def is_configuration(document: Any) -> bool:
    """Whether a document is the configuration of a folder."""
    return isinstance(document, dict) and "specdec_bench_version" in document


def entries_of(documents: list[tuple[Path, Any]], key: str) -> list[tuple[Path, Any]]:
    """The runs in the list that a file appends to, by a key of theirs."""
    return [
        (file, one)
        for file, document in documents
        if isinstance(document, list)
        for one in document
        if isinstance(one, dict) and key in one
    ]


def read_runs(documents: list[tuple[Path, Any]]) -> list[BenchmarkRun]:
    """The runs of a folder.

    Raises:
        DraftwellError: a part is missing or a value is wrong (`bad_evidence`).
    """
    configured = [one for one in documents if is_configuration(one[1])]
    timings = entries_of(documents, "Output TPS")
    lengths = entries_of(documents, "Acceptance_Length_Histogram")
    if not configured and not timings:
        return []
    if len(configured) != 1 or len(timings) != len(lengths) or not timings:
        where = (configured or timings)[0][0]
        raise bad(where, "name the folder of --save_dir, with one configuration and all its runs")
    file, document = configured[0]
    configuration = checked(Configuration, document, file)
    timed = [(at, checked(Timing, one, at)) for at, one in timings]
    speeds = [timing.speed for _, timing in timed]
    if max(speeds) > MOST_TIMES_AS_FAST * min(speeds):
        raise bad(file, "speeds differ as those of several loads, and it tells the last one alone")
    return [
        run_of(configuration, document, timing, checked(Lengths, two, of))
        for timing, (of, two) in zip(timed, lengths, strict=True)
    ]


def run_of(
    configuration: Configuration,
    document: dict[str, Any],
    timed: tuple[Path, Timing],
    lengths: Lengths,
) -> BenchmarkRun:
    """One run into a folder."""
    file, timing = timed
    tokens = timing.tokens.mean * turns_of(lengths)
    run = {
        "tool": TOOL,
        "version": configuration.specdec_bench_version,
        "when": configuration.timestamp,
        "engine": configuration.engine.lower(),
        "engine_version": configuration.engine_version,
        "model": PurePath(configuration.model_dir).name,
        "load": at_once(configuration.concurrency),
        "conditions": {name: document.get(name) for name in (*SAME, *SAME_TOO)},
        "completed": turns_of(lengths),
        "failed": 0,
        "details": DETAILS,
        "seconds": tokens / timing.speed,
        "tokens": tokens,
        "acceptance": Acceptance.of_histogram(
            {length - 1: count for length, count in lengths.histogram.items()}
        ),
    }
    return checked(BenchmarkRun, run, file)


def turns_of(lengths: Lengths) -> int:
    """Requests of a run: the turns of each sample, or the sample where they are not apart."""
    return sum(len(one) if isinstance(one, dict) else 1 for one in lengths.each.values())
