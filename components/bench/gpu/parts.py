"""Measuring part after part: each in a process of its own until its limit, what it wrote kept, and
what was measured for this code and card before left alone."""

from __future__ import annotations

import datetime
import json
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from draftwell.components.bench.gpu.limited import State, run_limited
from draftwell.components.bench.gpu.results import GpuResults, PartResult, write_results
from draftwell.components.report.provenance import code_digest, git_commit

LEAST_SECONDS = 5.0
"""With less time left nothing is begun."""
LOG = "log"


@dataclass(frozen=True)
class Part:
    """One thing to measure.

    Args:
        seconds: that it may take at most.
        run: measures, and writes its reports as JSON into the folder that it is given.
        lacks: says what is missing for it, in a line; "" where nothing is.
    """

    name: str
    seconds: float
    run: Callable[[Path], object]
    lacks: Callable[[], str] = lambda: ""


def measure_parts(
    parts: Sequence[Part],
    results: GpuResults,
    file: Path,
    folder: Path,
    end: float,
    say: Callable[[str], object],
) -> GpuResults:
    """Measure parts in their order, and write the results after each.

    Args:
        results: of earlier runs on this card.
        file: of the results.
        folder: for what the parts write.
        end: `time.monotonic()` at which nothing runs any more.
        say: called with a line on each part.
    """
    code = code_digest()
    for part in parts:
        if results.has(part.name, code):
            say(f"{part.name}: measured before")
            continue
        done = measured(part, folder / part.name, end - time.monotonic(), code)
        results = results.with_part(part.name, done)
        write_results(file, results)
        say(
            f"{part.name}: {done.state}{f', {done.why}' if done.why else ''} ({done.seconds:.0f} s)"
        )
    return results


def measured(part: Part, folder: Path, left: float, code: str) -> PartResult:
    """Measure one part, unless something is missing for it, or time: there are `left` seconds."""
    why = part.lacks()
    if not why and left < LEAST_SECONDS:
        why = "no time was left"
    if why:
        return result("skipped", why, 0.0, code, {})
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    start = time.monotonic()
    state, why = run_limited(partial(part.run, folder), min(left, part.seconds), folder / LOG)
    reports = reports_in(folder)
    if state == "measured" and not reports:
        state, why = "failed", "it wrote no report"
    return result(state, why, time.monotonic() - start, code, reports)


def result(
    state: State, why: str, seconds: float, code: str, reports: dict[str, Any]
) -> PartResult:
    """A part's result, now."""
    return PartResult(
        state=state,
        why=why,
        seconds=round(seconds, 1),
        code=code,
        commit=git_commit(),
        at=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        reports=reports,
    )


def reports_in(folder: Path) -> dict[str, Any]:
    """Name → contents of the JSON files in a folder."""
    return {file.stem: json.loads(file.read_text()) for file in sorted(folder.glob("*.json"))}
