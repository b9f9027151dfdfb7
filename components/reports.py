"""Tables of benches and verdicts, for the terminal, for Markdown and for CI. Plots are in `plots`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any
from xml.etree import ElementTree

from components.gate import GateVerdict
from components.plots import acceptance_plot, bench_plots, verifier_plots
from serving.runtime.artifacts.base import write_atomically

if TYPE_CHECKING:
    from rich.table import Table

__all__ = ["acceptance_plot", "bench_plots", "bench_table", "caption", "markdown_table", "verdict_junit", "verdict_markdown",
           "verdict_table", "verifier_plots", "write_json", "write_text"]

BENCH_COLUMNS = ("strategy", "tokens/s", "speedup", "acceptance rate", "MAT", "cost ratio", "outputs identical?")
VERDICT_COLUMNS = ("check", "value", "threshold", "result", "detail")


def bench_rows(report: Mapping[str, Any]) -> list[list[str]]:
    """One row of words for each strategy and peer, in `BENCH_COLUMNS`; what was not measured is a dash."""
    total = report["prompts"]
    entries = list(report["strategies"].items())
    reference = report.get("cost_reference")
    if reference and all(reference["per_prompt"] != entry["per_prompt"] for _, entry in entries):
        entries.append((f"vanilla_sd(num_speculative_tokens={reference['num_speculative_tokens']})", reference))
    for peer, group in report.get("peers", {}).items():
        entries += [(f"{peer}: {name}", entry) for name, entry in group.items() if name != "notes"]
    return [[label, number(entry["tokens_per_second"], ".1f"), interval(entry), number(entry.get("acceptance_rate"), ".2f"),
             number(entry.get("mat"), ".2f"), number(entry.get("cost_ratio"), ".2f"), identity(entry, total)]
            for label, entry in entries]


def number(value: float | None, form: str) -> str:
    """A figure, or a dash where there is none."""
    return "–" if value is None else format(value, form)


def interval(entry: Mapping[str, Any]) -> str:
    """`1.31 [1.25, 1.38]`."""
    if entry.get("speedup") is None:
        return "–"
    return f"{entry['speedup']:.2f} [{entry['speedup_low']:.2f}, {entry['speedup_high']:.2f}]"


def identity(entry: Mapping[str, Any], total: int) -> str:
    """`15 of 16 (1 near-tie)`; sampled outputs cannot be compared, lossy ones say that they are."""
    same, ties = entry.get("identical_outputs"), entry.get("near_ties") or 0
    if same is None:
        return "– (sampled)"
    words = [f"{ties} near-tie{'s' if ties != 1 else ''}"] if ties else []
    words += ["lossy"] if not entry["lossless"] else []
    return f"{same} of {total}" + (f" ({', '.join(words)})" if words else "")


def caption(report: Mapping[str, Any]) -> str:
    """What the figures depend on, in one line."""
    machine, settings = report["machine"], report["settings"]
    how = "greedy" if settings["temperature"] == 0 else f"temperature {settings['temperature']}"
    return (f"{report['pair']}, {machine['dtype']}, {report['prompts']} prompts of up to {settings['max_tokens']} tokens, {how}, "
            f"{settings['runs']} run{'s' if settings['runs'] != 1 else ''}, {machine['cpu']}, {machine['threads']} of "
            f"{machine['cores']} cores")


def bench_table(report: Mapping[str, Any]) -> Table:
    """A bench as a table for the terminal."""
    return rich_table(BENCH_COLUMNS, bench_rows(report), caption(report))


def markdown_table(report: Mapping[str, Any]) -> str:
    """A bench as a Markdown table with a line about the machine below."""
    return f"{markdown(BENCH_COLUMNS, bench_rows(report))}\n{caption(report)}\n"


def verdict_rows(verdict: GateVerdict) -> list[list[str]]:
    """One row of words for each check, in `VERDICT_COLUMNS`."""
    return [[c.name, f"{c.value:.4g}", f"{c.threshold:.4g}", "passed" if c.passed else "FAILED", c.detail] for c in verdict.checks]


def verdict_table(verdict: GateVerdict, title: str | None = None) -> Table:
    """A verdict as a table for the terminal."""
    result = "gate passed" if verdict.passed else "gate FAILED"
    return rich_table(VERDICT_COLUMNS, verdict_rows(verdict), "; ".join([result, *verdict.notes]), title)


def verdict_markdown(verdict: GateVerdict) -> str:
    """A verdict as Markdown, for a pull request or a run's description."""
    notes = "".join(f"- {note}\n" for note in verdict.notes)
    title = "Gate passed" if verdict.passed else "Gate failed"
    return f"**{title}**\n\n{markdown(VERDICT_COLUMNS, verdict_rows(verdict))}\n{notes}"


def verdict_junit(verdict: GateVerdict, name: str = "gate") -> str:
    """A verdict as JUnit XML: a test case for each check, skipped ones for the notes."""
    failed = sum(not check.passed for check in verdict.checks)
    suite = ElementTree.Element("testsuite", name=name, tests=str(len(verdict.checks) + len(verdict.notes)),
                                failures=str(failed), errors="0", skipped=str(len(verdict.notes)))
    for check in verdict.checks:
        case = ElementTree.SubElement(suite, "testcase", classname=name, name=check.name)
        if not check.passed:
            ElementTree.SubElement(case, "failure", message=check.detail)
    for note in verdict.notes:
        case = ElementTree.SubElement(suite, "testcase", classname=name, name=note)
        ElementTree.SubElement(case, "skipped", message=note)
    return ElementTree.tostring(suite, encoding="unicode", xml_declaration=True) + "\n"


def write_json(path: Path, report: Mapping[str, Any]) -> Path:
    """Write a report atomically; NaN, which JSON lacks, is an error of the caller."""
    write_atomically(path, (json.dumps(report, indent=2, allow_nan=False) + "\n").encode())
    return path


def write_text(path: Path, text: str) -> Path:
    """Write a text atomically."""
    write_atomically(path, text.encode())
    return path


def rich_table(columns: tuple[str, ...], rows: list[list[str]], note: str, title: str | None = None) -> Table:
    """A table with the first column on the left and figures on the right."""
    from rich.table import Table
    from rich.text import Text

    table = Table(title=None if title is None else Text(title), caption=Text(note), caption_justify="left")
    for i, name in enumerate(columns):
        table.add_column(name, justify="left" if i == 0 or name in ("detail", "outputs identical?") else "right")
    for row in rows:
        table.add_row(*map(Text, row))  # plain text: brackets of an interval are no markup
    return table


def markdown(columns: tuple[str, ...], rows: list[list[str]]) -> str:
    """A Markdown table."""
    lines = [columns, tuple("---" if i == 0 else "--:" for i in range(len(columns))), *rows]
    return "".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |\n" for line in lines)
