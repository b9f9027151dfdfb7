"""Tables of a bench for the terminal and for Markdown, and the line that names what the metrics
depend on."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from draftwell.components.bench.schema import BenchEntry, BenchReport, Curve, Machine
from draftwell.components.report.tables import first_turns, markdown, number, rich_table

if TYPE_CHECKING:
    from rich.table import Table

BENCH_COLUMNS = (
    "strategy",
    "tokens/s",
    "speedup",
    "acceptance rate",
    "MAT",
    "cost ratio",
    "outputs identical?",
)
HEADLINE_COLUMNS = ("ratio", "times as fast", "cost ratio", "contender", "against")


def entries_of(report: BenchReport) -> list[tuple[str, BenchEntry]]:
    """Label and entry of all that were measured: strategies, the cost reference where it is none of
    them, peers."""
    entries = [
        (label_with_parameters(label, entry.parameters), entry)
        for label, entry in report.strategies.items()
    ]
    reference = report.cost_reference
    if reference and all(reference.per_prompt != entry.per_prompt for _, entry in entries):
        entries.append(
            (f"vanilla_sd(num_speculative_tokens={reference.num_speculative_tokens})", reference)
        )
    for peer, group in report.peers.items():
        named = f"{peer} ({group.version})" if group.version else peer
        entries += [(f"{named}: {name}", entry) for name, entry in group.entries.items()]
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
    """One row of text for each strategy and peer, in `BENCH_COLUMNS`; what was not measured is a
    dash."""
    total = report.prompts
    return [
        [
            label,
            number(entry.tokens_per_second, ".1f"),
            interval(entry),
            number(entry.acceptance_rate, ".2f"),
            number(entry.mat, ".2f"),
            number(entry.cost_ratio, ".2f"),
            identity(entry, total),
        ]
        for label, entry in entries_of(report)
    ]


def time_columns(report: BenchReport) -> dict[str, str]:
    """Part of the wall time → its column; the qualifier's only where one worked."""
    qualified = any(
        entry.time_share and entry.time_share.get("qualifier") for _, entry in entries_of(report)
    )
    parts = ["target", "draft", *(["qualifier"] if qualified else []), "overlap", "prefill"]
    return {part: part for part in parts} | {"rest": "overhead"}


def time_table(report: BenchReport) -> str:
    """Where the time and the memory went, as Markdown; parts are shares of the wall time."""
    columns = time_columns(report)
    rows = []
    for label, entry in entries_of(report):
        split = entry.time_share or {}
        rows.append(
            [
                label,
                number(entry.ttft_ms, ".0f"),
                number(entry.prefill_ms, ".0f"),
                number(entry.decode_tokens_per_second, ".1f"),
                *(number(split.get(part), ".1%") for part in columns),
                number(entry.peak_memory_mb, ".0f"),
            ]
        )
    return markdown(
        ("strategy", "TTFT ms", "prefill ms", "decode tokens/s", *columns.values(), "peak MB"), rows
    )


def rouge_l_column(report: BenchReport) -> str:
    """The column of ROUGE-L, with the number of references that it is computed on."""
    references = report.references
    return "ROUGE-L" + (
        f" ({references} reference{'s' if references != 1 else ''})" if references else ""
    )


def quality_table(report: BenchReport) -> str:
    """What lossy strategies gave up, as Markdown; empty where none was measured."""
    floors = {True: "held", False: "not held", None: "–"}
    rows = []
    for label, entry in report.strategies.items():
        if not entry.lossless:
            over = entry.over_vanilla
            rows.append(
                [
                    label_with_parameters(label, entry.parameters),
                    ratio_with_interval(over.ratio, over.low, over.high) if over else "–",
                    number(entry.target_argmax_share, ".1%"),
                    number(entry.kl, ".3f"),
                    number(entry.rouge_l, ".1f"),
                    number(entry.rouge_l_difference, "+.1f"),
                    number(entry.rescued_share, ".1%"),
                    floors[entry.holds_floor],
                ]
            )
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
    rows = []
    for label, entry in report.strategies.items():
        for task, found in entry.tasks.items():
            change = (
                "–"
                if found.difference is None
                else ratio_with_interval(found.difference, found.low, found.high)
            )
            rows.append(
                [
                    label_with_parameters(label, entry.parameters),
                    task,
                    str(found.count),
                    number(found.accuracy, ".1%"),
                    change,
                    found.note or "",
                ]
            )
    return (
        markdown(("lossy strategy", "task", "prompts", "right", "± autoregressive", "note"), rows)
        if rows
        else ""
    )


def headline_rows(report: BenchReport) -> list[list[str]]:
    """The ratios of the bench, in `HEADLINE_COLUMNS`."""
    names = {
        label: label_with_parameters(label, entry.parameters)
        for label, entry in report.strategies.items()
    }
    return [
        [
            row.name,
            ratio_with_interval(row.ratio, row.low, row.high),
            number(row.cost_ratio, ".2f"),
            names.get(row.contender, row.contender),
            names.get(row.against, row.against),
        ]
        for row in report.headlines
    ]


def overhead_lines(report: BenchReport) -> str:
    """The largest overhead and the largest peak of memory among the strategies, as a Markdown
    list."""
    names = {
        label: label_with_parameters(label, entry.parameters)
        for label, entry in report.strategies.items()
    }
    forms = {
        "overhead_fraction": ("largest overhead", ".1%", ""),
        "peak_memory_mb": ("largest peak over weights and caches", ".0f", " MB"),
    }
    return "".join(
        (
            f"- {forms[key][0]}: {number(found.value, forms[key][1])}{forms[key][2]} "
            f"({names[found.label]})\n"
        )
        for key, found in report.worst.items()
        if found
    )


def curve_rows(curve: Curve) -> list[list[str]]:
    """The points of one curve, in the order of the parameter."""
    return [
        [
            f"{p.value:g}",
            number(p.speedup, ".2f"),
            number(p.over_vanilla, ".2f"),
            number(p.target_argmax_share, ".1%"),
            number(p.rouge_l, ".1f"),
            number(p.rescued_share, ".1%"),
        ]
        for p in curve.points
    ]


def interval(entry: BenchEntry) -> str:
    """`1.31 [1.25, 1.38]`."""
    if entry.speedup is None:
        return "–"
    return ratio_with_interval(entry.speedup, entry.speedup_low, entry.speedup_high)


def ratio_with_interval(ratio: float | None, low: float | None, high: float | None) -> str:
    """A ratio with its interval."""
    return f"{number(ratio, '.2f')} [{number(low, '.2f')}, {number(high, '.2f')}]"


def identity(entry: BenchEntry, total: int) -> str:
    """`15 of 16 (1 near-tie)`; sampled outputs cannot be compared, lossy ones are marked."""
    same, ties = entry.identical_outputs, entry.near_ties or 0
    if same is None:
        return "– (sampled)"
    notes = [f"{ties} near-tie{'s' if ties != 1 else ''}"] if ties else []
    notes += ["lossy"] if not entry.lossless else []
    return f"{same} of {total}" + (f" ({', '.join(notes)})" if notes else "")


def caption(report: BenchReport) -> str:
    """What the metrics depend on, in one line."""
    machine, settings = report.machine, report.settings
    how = "greedy" if settings.temperature == 0 else f"temperature {settings.temperature}"
    padded = report.padded_to
    target = f", target padded with zeros to {padded / 1e9:.2f} B parameters" if padded else ""
    longest = (
        f" (prompts of at most {settings.max_prompt_tokens} tokens)"
        if settings.max_prompt_tokens
        else ""
    )
    name = machine.device_name or machine.cpu
    device = machine.cpu if name == machine.cpu else f"{name} and {machine.cpu}"
    device += f", draft on {machine.draft_device}" if machine.draft_device else ""
    prompts = (
        f"{report.prompts} prompts{first_turns(report.several_turns)} of up to "
        f"{settings.max_tokens} tokens{longest}"
    )
    runs = f"{settings.runs} run{'s' if settings.runs != 1 else ''}"
    return (
        f"{report.pair}, {machine.dtype}{target}, {prompts}, {how}, {runs}, {device}, "
        f"{class_of(machine)}{machine.threads} of "
        f"{machine.cores} cores"
    )


def class_of(machine: Machine) -> str:
    """The machine class, where the report names it."""
    return f"{machine.device_class}, " if machine.device_class else ""


def bench_table(report: BenchReport) -> Table:
    """A bench as a table for the terminal."""
    return rich_table(BENCH_COLUMNS, bench_rows(report), caption(report))


def headline_table(report: BenchReport) -> Table:
    """The ratios as a table for the terminal."""
    note = (
        "the fastest of this run where a row says best; brackets: bootstrap over prompts, 5 % "
        "and 95 %"
    )
    return rich_table(HEADLINE_COLUMNS, headline_rows(report), note)


def markdown_table(report: BenchReport) -> str:
    """A bench as a Markdown table with a line about the machine below."""
    return f"{markdown(BENCH_COLUMNS, bench_rows(report))}\n{caption(report)}\n"


def bench_markdown(report: BenchReport) -> str:
    """All tables of a bench as Markdown: speed, ratios, time and memory, quality of lossy
    strategies, curves."""
    parts = [
        f"## Bench of {report.pair}\n\n{markdown_table(report)}",
        (
            "### "
            f"Ratios\n\n{markdown(HEADLINE_COLUMNS, headline_rows(report))}\n{overhead_lines(report)}"  # noqa: E501
        ),
        "### Time and memory\n\nShares of the wall time; TTFT and prefill are medians over "
        "prompts; memory is over weights and caches."
        f"\n\n{time_table(report)}",
    ]
    if quality := quality_table(report):
        parts.append(f"### Quality\n\n{quality}")
    if tasks := task_table(report):
        parts.append(f"### Right answers\n\nShares of prompts; brackets: 5 % and 95 %.\n\n{tasks}")
    for name, curve in report.curves.items():
        columns = (
            curve.parameter,
            "speedup",
            "over vanilla_sd",
            "argmax share",
            rouge_l_column(report),
            "rescued",
        )
        parts.append(f"### {name} over {curve.parameter}\n\n{markdown(columns, curve_rows(curve))}")
    notes = [note for group in report.peers.values() for note in group.notes]
    commit = report.machine.commit
    notes += [f"commit {commit}"] if commit else []
    return "\n".join([*parts, "".join(f"- {note}\n" for note in notes)])
