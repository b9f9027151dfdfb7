"""What `draftwell gate` does when it is called."""

from __future__ import annotations

import json
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from draftwell.components.gate.baseline_counts import CountsReport
from draftwell.components.gate.settings import GateSettings
from draftwell.components.gate.verdict_report import (
    error_junit,
    error_markdown,
    verdict_table,
    verdicts_junit,
    verdicts_markdown,
)
from draftwell.components.prompts.prompt import demo_prompts
from draftwell.flows.cli.options import (
    EXIT_FAILED,
    EXIT_UNDECIDED,
    check_output,
    pick_device,
    progress,
    prompts_from,
    readable,
    say,
    wide_console,
)
from draftwell.flows.failures import disk_full_as_error
from draftwell.flows.loading import open_pair
from draftwell.flows.steps.gate import gate_imported, gate_release
from draftwell.flows.steps.gate_parts.checks import count_checkout, judge_baseline
from draftwell.flows.steps.gate_parts.elsewhere import measurement_file
from draftwell.flows.workspace import Workspace
from draftwell.registry import gates
from draftwell.registry.connection import registry_exists
from draftwell.registry.gates import load_baseline
from draftwell.registry.pairs import find_pair
from draftwell.registry.releases import (
    aliases_by_device,
    no_release_hint,
    resolve_release,
)
from draftwell.registry.store import Store
from draftwell.serving.device import cuda_available
from draftwell.serving.errors import DraftwellError
from draftwell.serving.files import write_json, write_text

if TYPE_CHECKING:
    from draftwell.serving.bundle.verdict import GateVerdict


def verdicts_json(verdicts: Sequence[tuple[str, GateVerdict]]) -> str:
    """Titles, results and checks as JSON."""
    rows = [
        {
            "title": title,
            "result": verdict.result,
            "checks": [asdict(one) for one in verdict.checks],
        }
        for title, verdict in verdicts
    ]
    return json.dumps({"verdicts": rows}, indent=2, default=str) + "\n"


def error_json(line: str) -> str:
    """What kept the gate from a verdict."""
    return json.dumps({"error": line}) + "\n"


WRITERS: Mapping[str, tuple[Callable[..., str], Callable[[str], str]]] = {
    ".md": (verdicts_markdown, error_markdown),
    ".xml": (verdicts_junit, error_junit),
    ".json": (verdicts_json, error_json),
}
"""Ending of a report → what writes verdicts, and what writes an error."""


def exit_code(verdicts: Sequence[GateVerdict]) -> int:
    """0 where all passed, else 1 where any failed, else 3."""
    if all(verdict.passed for verdict in verdicts):
        return 0
    return (
        EXIT_FAILED if any(verdict.result == "failed" for verdict in verdicts) else EXIT_UNDECIDED
    )


def check_reports(files: Sequence[Path]) -> None:
    """Refuse, before any work, reports that cannot be written; earlier ones go, for a gate that
    breaks off leaves no earlier verdict."""
    for file in files:
        if file.suffix not in WRITERS:
            raise DraftwellError(
                f"--report {file}: its ending is none of {', '.join(WRITERS)}",
                code="unknown_ending",
            )
        check_output(file)
        file.unlink(missing_ok=True)


@contextmanager
def errors_are_reported(files: Sequence[Path]) -> Iterator[None]:
    """Whatever keeps the gate from a verdict is no failed gate: it has exit code 2, and CI reads of
    it in the same files."""
    try:
        with disk_full_as_error():
            yield
    except Exception as error:
        line = " ".join(str(error).split()) or type(error).__name__
        for file in files:
            write_text(file, WRITERS[file.suffix][1](line))
        if isinstance(error, DraftwellError) or getattr(error, "filename", None) is not None:
            raise
        traceback.print_exc()  # a fault of ours: Python's own exit code would say 1
        raise typer.Exit(2) from error


def baseline_verdicts(pair: str, name: str, *, needed: bool) -> list[tuple[str, GateVerdict]]:
    """The deterministic part, where a baseline is recorded; one that is `needed` and missing is an
    error."""

    if not needed and load_baseline(name, CountsReport) is None:
        say(f"pair {name} has no recorded baseline: the release alone is judged")
        return []
    with progress("deterministic counts") as bar:
        return [("deterministic counts, float32", judge_baseline(pair, say, bar))]


def release_verdict(
    pair: str,
    dtype: str | None,
    prompts: Path | None,
    wanted: int,
    settings: GateSettings,
    device: str,
    beside: Sequence[GateVerdict] = (),
) -> tuple[str, GateVerdict]:
    """The measured part: a release compared with the champion. Its record says that it failed, too,
    where a verdict `beside` did.

    For CUDA where there is none, by what was measured on a card and imported. Else the first
    `settings.limit` prompts are taken that the release was not made from; of the shipped
    ones the last, because the first are the first to be learnt from.
    """

    if device == "cuda" and not cuda_available():
        space = Workspace(pair, dtype, say, device)
        result = gate_imported(space, settings, alias=wanted, beside=beside)
        return f"release {result['release']}", result["verdict"]
    rows = prompts_from(prompts) if prompts else demo_prompts()[::-1]
    opened = open_pair(pair, dtype, device=device, say=say)
    rows = readable(opened.pair, rows, prompts, settings.max_tokens)
    with progress("gate") as bar:
        step = type(opened)(opened.workspace, opened.pair, bar)
        file = prompts.name if prompts else None
        result = gate_release(step, rows, settings, alias=wanted, beside=beside, file=file)
    return f"release {result['release']}", result["verdict"]


def gated_on(pair: str, dtype: str | None, device: str | None) -> str:
    """The device to judge for: one that is here, or CUDA where a measurement of it was imported."""
    if device == "cuda" and not cuda_available():
        space = Workspace(pair, dtype, say, device)
        if measurement_file(space, device).is_file():
            return device
    return pick_device(device)


def own_verdicts(
    pair: str,
    dtype: str | None,
    prompts: Path | None,
    wanted: int | None,
    settings: GateSettings,
    device: str,
) -> list[tuple[str, GateVerdict]]:
    """Titles and verdicts of our own engine: this checkout's counts, and the release `wanted`, if
    any, whose record says that it failed where the counts did."""
    verdicts = baseline_verdicts(pair, find_pair(pair).name, needed=wanted is None)
    if wanted is None:
        return verdicts
    beside = [verdict for _, verdict in verdicts]
    return [*verdicts, release_verdict(pair, dtype, prompts, wanted, settings, device, beside)]


def show(verdicts: Sequence[tuple[str, GateVerdict]], files: Sequence[Path]) -> None:
    """Verdicts as tables, and in files where they were asked for."""

    for title, verdict in verdicts:
        wide_console().print(verdict_table(verdict, title=title))
    for file in files:
        write_text(file, WRITERS[file.suffix][0](verdicts))


def record_baseline(pair: str) -> None:
    """Write the pair's file of counts, in registry/baselines or a folder of one's own."""

    name = find_pair(pair).name
    with progress("deterministic counts") as bar:
        report, _ = count_checkout(pair, say, bar)
    path = gates.baseline_file(name)
    write_json(path, report.model_dump())
    typer.echo(f"recorded {path.name}")


def release_to_judge(pair: str, device: str, release: str | None, expected: bool) -> int | None:
    """Number of the release that was named, or else of the candidate; None where the pair has no
    release at all and none is expected.

    Args:
        expected: the device was named, so that judging the counts alone would be a false success.
    Raises:
        DraftwellError: there is no such release, or no candidate for the device where one is
            expected or the pair has releases.
    """

    if release is not None:
        return resolve_release(Store(), pair, device, release).version
    known = aliases_by_device(Store(), pair) if registry_exists() else {}
    if (candidate := known.get(device, {}).get("candidate")) is not None:
        return candidate
    if expected or known:
        raise DraftwellError(
            f"no release was judged: release.{pair}.{device} has no "
            f"candidate{no_release_hint(known, device)}, "
            f"`draftwell step choose --pair {pair} --device {device}` makes one, or --set "
            f"counts_only=true "
            "judges the counts alone",
            code="no_candidate",
        )
    say(f"pair {pair} has no release: this checkout's counts alone are judged")
    return None
