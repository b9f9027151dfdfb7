"""Tables of a bench for the terminal and for Markdown, and the line that names what the metrics
depend on."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from draftwell.components.bench.schema import BenchEntry, BenchReport
from draftwell.components.report.tables import (
    beside,
    first_turns,
    markdown,
    number,
    plural,
    rich_table,
)

if TYPE_CHECKING:
    from rich.table import Table

    from draftwell.components.bench.engines.figures import Figure

BENCH_COLUMNS: dict[str, Callable[[BenchEntry, BenchReport], str]] = {
    "tokens/s": lambda entry, _: number(entry.tokens_per_second, ".1f"),
    "speedup": lambda entry, _: with_interval(entry.speedup, entry.speedup_low, entry.speedup_high),
    "acceptance rate": lambda entry, _: number(entry.acceptance_rate, ".2f"),
    "MAT": lambda entry, _: number(entry.mat, ".2f"),
    "cost ratio": lambda entry, _: number(entry.cost_ratio, ".2f"),
    "outputs identical?": lambda entry, report: identity(entry, report.prompts),
}
"""Title and cell of every column behind the strategy's name."""
HEADLINE_COLUMNS = ("ratio", "times as fast", "cost ratio", "contender", "against")
HEADLINE_NOTE = (
    "the fastest of this run where a row says best; brackets: bootstrap over prompts, 5 % and 95 %"
)
FLOORS = {True: "held", False: "not held", None: "–"}
CATEGORY_COLUMNS = ("contender", "category", "prompts", "times as fast", "acceptance length")
CATEGORY_NOTE = (
    "every category weighs the same in the macro average; brackets: Student's t over prompts, 5 % "
    "and 95 %; acceptance length is over rounds that drafted"
)
TASK_COLUMNS = ("lossy strategy", "task", "prompts", "right", "± autoregressive", "note")


def named_strategies(report: BenchReport) -> list[tuple[str, BenchEntry]]:
    """Label, with parameters, and entry of every strategy."""
    return [
        (label_with_parameters(label, entry.parameters), entry)
        for label, entry in report.strategies.items()
    ]


def entries_of(report: BenchReport) -> list[tuple[str, BenchEntry]]:
    """Label and entry of all that were measured: strategies, then peers."""
    entries = named_strategies(report)
    for peer, group in report.peers.items():
        version = report.peer_versions.get(peer)
        named = f"{peer} ({version})" if version else peer
        entries += [(f"{named}: {name}", entry) for name, entry in group.items()]
    return entries


def label_with_parameters(label: str, parameters: Mapping[str, Any]) -> str:
    """A label with the parameters that were set, which it leaves out where a strategy was measured
    once.

    >>> [
    ...     label_with_parameters(*row)
    ...     for row in (("sprinter", {"tau": 0.9}), ("spide(tau=0.5)", {"tau": 0.5}), ("x", {}))
    ... ]
    ['sprinter(tau=0.9)', 'spide(tau=0.5)', 'x']
    """
    settings = ", ".join(f"{key}={value}" for key, value in sorted(parameters.items()))
    return f"{label}({settings})" if settings and "(" not in label else label


def bench_rows(report: BenchReport) -> list[list[str]]:
    """The name of each strategy and peer with its `BENCH_COLUMNS`; what was not measured is a
    dash."""
    return [
        [label, *(cell(entry, report) for cell in BENCH_COLUMNS.values())]
        for label, entry in entries_of(report)
    ]


def time_table(report: BenchReport) -> str:
    """Where the time and the memory went, as Markdown; parts are shares of the wall time, the
    qualifier's only where one worked."""
    entries = entries_of(report)
    qualified = any((entry.time_share or {}).get("qualifier") for _, entry in entries)
    parts = ["target", "draft", *(["qualifier"] if qualified else []), "overlap", "prefill", "rest"]
    rows = [
        [
            label,
            number(entry.ttft_ms, ".0f"),
            number(entry.prefill_ms, ".0f"),
            number(entry.decode_tokens_per_second, ".1f"),
            *(number((entry.time_share or {}).get(part), ".1%") for part in parts),
            number(entry.peak_memory_mb, ".0f"),
        ]
        for label, entry in entries
    ]
    shown = [*parts[:-1], "overhead"]
    return markdown(
        ("strategy", "TTFT ms", "prefill ms", "decode tokens/s", *shown, "peak MB"), rows
    )


def rouge_l_column(report: BenchReport) -> str:
    """The column of ROUGE-L, with the number of references that it is computed on."""
    return "ROUGE-L" + (f" ({plural(report.references, 'reference')})" if report.references else "")


def quality_table(report: BenchReport) -> str:
    """What lossy strategies gave up, as Markdown; empty where none was measured."""
    rows = [
        [
            label,
            with_interval(over.ratio, over.low, over.high) if (over := entry.over_vanilla) else "–",
            number(entry.target_argmax_share, ".1%"),
            number(entry.kl, ".3f"),
            number(entry.rouge_l, ".1f"),
            number(entry.rouge_l_difference, "+.1f"),
            number(entry.rescued_share, ".1%"),
            FLOORS[entry.holds_floor],
        ]
        for label, entry in named_strategies(report)
        if not entry.lossless
    ]
    # Of samples it is KL(π ‖ p) + H(π) − H(p), which is no divergence
    # (`target_agreement.agreement`): it may be negative.
    divergence = "KL, nats" if report.settings.temperature == 0 else "excess surprisal, nats"
    columns = (
        "lossy strategy",
        "over vanilla_sd",
        "argmax share",
        divergence,
        rouge_l_column(report),
        "± vanilla",
        "rescued",
        "floor",
    )
    return markdown(columns, rows) if rows else ""


def task_table(report: BenchReport) -> str:
    """Right answers of lossy strategies, as Markdown; empty where no prompt has an answer to
    compare with."""
    rows = [
        [
            label,
            task,
            str(found.count),
            number(found.accuracy, ".1%"),
            with_interval(found.difference, found.low, found.high),
            found.note or "",
        ]
        for label, entry in named_strategies(report)
        for task, found in entry.tasks.items()
    ]
    return markdown(TASK_COLUMNS, rows) if rows else ""


def category_rows(
    contenders: Iterable[tuple[str, BenchEntry | Figure]],
) -> list[list[str]]:
    """A row for each contender that drafts and each category, in `CATEGORY_COLUMNS`; none where all
    prompts are of one."""
    return [
        [
            label,
            one.category,
            str(one.prompts),
            with_interval(one.speedup, one.speedup_low, one.speedup_high),
            with_interval(one.acceptance_length, one.acceptance_low, one.acceptance_high),
        ]
        for label, contender in contenders
        if any(one.acceptance_length for one in contender.categories)
        for one in contender.categories
    ]


def category_table(contenders: Iterable[tuple[str, BenchEntry | Figure]]) -> Table | None:
    """`category_rows` for the terminal; None where there are none."""
    rows = category_rows(contenders)
    return rich_table(CATEGORY_COLUMNS, rows, CATEGORY_NOTE) if rows else None


def headline_rows(report: BenchReport) -> list[list[str]]:
    """The ratios of the bench, in `HEADLINE_COLUMNS`."""
    names = {
        label: label_with_parameters(label, entry.parameters)
        for label, entry in report.strategies.items()
    }
    return [
        [
            row.name,
            with_interval(row.ratio, row.low, row.high),
            number(row.cost_ratio, ".2f"),
            names.get(row.contender, row.contender),
            names.get(row.against, row.against),
        ]
        for row in report.headlines
    ]


def with_interval(ratio: float | None, low: float | None, high: float | None) -> str:
    """`1.31 [1.25, 1.38]`; without an interval that is not known, and a dash where nothing is."""
    if ratio is None or low is None:
        return number(ratio, ".2f")
    return f"{number(ratio, '.2f')} [{number(low, '.2f')}, {number(high, '.2f')}]"


def identity(entry: BenchEntry, total: int) -> str:
    """`15 of 16 (1 near-tie)`; sampled outputs cannot be compared, lossy ones are marked."""
    if entry.identical_outputs is None:
        return "– (sampled)"
    notes = [plural(entry.near_ties, "near-tie")] if entry.near_ties else []
    notes += ["lossy"] if not entry.lossless else []
    same = f"{entry.identical_outputs} of {total}"
    return f"{same} ({', '.join(notes)})" if notes else same


def caption(report: BenchReport) -> str:
    """What the metrics depend on, in one line."""
    machine, settings = report.machine, report.settings
    padded, longest = report.padded_to, settings.max_prompt_tokens
    name = machine.device_name or machine.cpu
    device = machine.cpu if name == machine.cpu else f"{name} and {machine.cpu}"
    parts = [
        report.pair,
        machine.dtype,
        f"target padded with zeros to {padded / 1e9:.2f} B parameters" if padded else "",
        f"{report.prompts} prompts{first_turns(report.several_turns)} of up to "
        f"{settings.max_tokens} tokens"
        + (f" (prompts of at most {longest} tokens)" if longest else ""),
        "greedy" if settings.temperature == 0 else f"temperature {settings.temperature}",
        plural(settings.runs, "run"),
        device,
        f"draft on {machine.draft_device}" if machine.draft_device else "",
        machine.device_class or "",
        f"{machine.threads} of {machine.cores} cores",
        beside(machine.others),
    ]
    return ", ".join(part for part in parts if part)


def bench_table(report: BenchReport) -> Table:
    """A bench as a table for the terminal."""
    return rich_table(("strategy", *BENCH_COLUMNS), bench_rows(report), caption(report))


def headline_table(report: BenchReport) -> Table:
    """The ratios as a table for the terminal."""
    return rich_table(HEADLINE_COLUMNS, headline_rows(report), HEADLINE_NOTE)


def markdown_table(report: BenchReport) -> str:
    """A bench as a Markdown table with a line about the machine below."""
    return f"{markdown(('strategy', *BENCH_COLUMNS), bench_rows(report))}\n{caption(report)}\n"


def bench_markdown(report: BenchReport) -> str:
    """All tables of a bench as Markdown: speed, ratios, time and memory, quality of lossy
    strategies."""
    return "\n".join([*sections(report), "".join(f"- {note}\n" for note in notes_of(report))])


def sections(report: BenchReport) -> Iterator[str]:
    """The tables, each under its heading."""
    yield f"## Bench of {report.pair}\n\n{markdown_table(report)}"
    yield f"### Ratios\n\n{markdown(HEADLINE_COLUMNS, headline_rows(report))}"
    yield (
        "### Time and memory\n\nShares of the wall time; TTFT and prefill are medians over "
        f"prompts; memory is over weights and caches.\n\n{time_table(report)}"
    )
    if categories := category_rows(entries_of(report)):
        yield f"### By category\n\n{CATEGORY_NOTE}.\n\n{markdown(CATEGORY_COLUMNS, categories)}"
    if quality := quality_table(report):
        yield f"### Quality\n\n{quality}"
    if tasks := task_table(report):
        yield f"### Right answers\n\nShares of prompts; brackets: 5 % and 95 %.\n\n{tasks}"


def notes_of(report: BenchReport) -> list[str]:
    """How peers were run, who is left out, and the commit."""
    left_out = [f"{label} is left out: {reason}" for label, reason in report.left_out.items()]
    commit = report.machine.commit
    return [*report.peer_notes, *left_out, *([f"commit {commit}"] if commit else [])]
