"""A bench's tables and plots."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console

from draftwell.components.bench.report.plots import bench_plots
from draftwell.components.bench.report.tables import (
    bench_markdown,
    bench_table,
    markdown_table,
    rouge_l_column,
)
from draftwell.components.bench.schema import BenchReport
from tests.support.bench_reports import ENTRY, PLAIN, REPORT


def read(report) -> BenchReport:
    return BenchReport.model_validate(report)


def test_the_table_shows_strategies_peers_and_intervals():
    console = Console(file=io.StringIO(), width=200)
    console.print(bench_table(read(REPORT)))
    text = console.file.getvalue()
    for words in (
        "1.30 [1.20, 1.40]",
        "15 of 16 (1 near-tie)",
        "15 of 16 (lossy)",
        "transformers: assisted",
        "9.0",
        "3 runs",
        "greedy",
    ):
        assert words in text
    line = next(line for line in text.splitlines() if "autoregressive" in line)
    assert line.count("–") == 3  # acceptance, MAT and cost ratio: not measured, not zero


def test_markdown_has_a_cell_for_every_column():
    lines = [line for line in markdown_table(read(REPORT)).splitlines() if line.startswith("|")]
    assert len({line.count("|") for line in lines}) == 1
    assert len(lines) == 2 + 4


def test_sampled_runs_claim_no_identity():
    sampled = {
        **REPORT,
        "strategies": {"vanilla_sd": {**ENTRY, "identical_outputs": None, "near_ties": None}},
        "peers": {},
    }
    assert "sampled" in markdown_table(read(sampled))


def test_the_caption_says_that_later_turns_were_left_out():
    assert "turns" not in markdown_table(read(REPORT))
    said = "16 prompts (of 3 with several turns the first only) of up to 64 tokens"
    assert said in markdown_table(read({**REPORT, "several_turns": 3}))


def test_the_caption_says_that_other_processes_disturbed():
    quiet, loud = (
        markdown_table(read({**REPORT, "machine": {**REPORT["machine"], "others": others}}))
        for others in (0.1, 1.2)
    )
    assert "other processes" not in quiet
    assert "other processes used 1.2 of its cores" in loud


def header_of(text, heading):
    """The columns of the first table behind a heading."""
    return next(line for line in text.partition(heading)[2].splitlines() if line.startswith("|"))


def test_the_qualifier_has_a_column_only_where_one_worked():
    report = {**REPORT, "machine": {**REPORT["machine"], "commit": None}, "headlines": []}
    assert "qualifier" not in header_of(bench_markdown(read(report)), "### Time and memory")
    split = {**ENTRY["time_share"], "target": 0.5, "qualifier": 0.125}
    pyramid = {**ENTRY, "lossless": False, "time_share": split}
    text = bench_markdown(
        read({**report, "strategies": {**report["strategies"], "pyramid_fuzzy": pyramid}})
    )
    assert "| draft | qualifier | overlap |" in header_of(text, "### Time and memory")
    rows = [
        line
        for line in text.partition("### Time and memory")[2].partition("###")[0].splitlines()
        if line.startswith("|")
    ]
    assert len({row.count("|") for row in rows}) == 1
    assert next(row for row in rows if "pyramid_fuzzy" in row).split(" | ")[4:7] == [
        "50.0%",
        "20.0%",
        "12.5%",
    ]


def test_rouge_l_says_how_many_references_are_behind_it():
    text = bench_markdown(read({**REPORT, "references": 5, "headlines": []}))
    assert "| ROUGE-L (5 references) |" in header_of(text, "### Quality")


@pytest.mark.parametrize(
    ("references", "column"),
    [(12, "ROUGE-L (12 references)"), (1, "ROUGE-L (1 reference)"), (None, "ROUGE-L")],
)
def test_the_column_of_rouge_l(references, column):
    assert rouge_l_column(read({**REPORT, "references": references})) == column


def test_what_sampled_outputs_have_is_not_called_a_divergence():
    greedy = {**REPORT, "headlines": []}
    sampled = {**greedy, "settings": {**REPORT["settings"], "temperature": 0.7}}
    assert "| KL, nats |" in header_of(bench_markdown(read(greedy)), "### Quality")
    assert "| excess surprisal, nats |" in header_of(bench_markdown(read(sampled)), "### Quality")
    assert "KL" not in header_of(bench_markdown(read(sampled)), "### Quality")


def test_plots_are_png_files(tmp_path: Path) -> None:
    paths = bench_plots(read(REPORT), tmp_path)
    assert len(set(paths)) == 3
    for path in paths:
        assert path.read_bytes().startswith(b"\x89PNG")


def test_plots_of_nothing_are_still_plots(tmp_path: Path) -> None:
    empty = {**REPORT, "strategies": {"autoregressive": {**PLAIN, "time_share": None}}}
    assert all(path.is_file() for path in bench_plots(read(empty), tmp_path))
