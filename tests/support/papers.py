"""Cells of papers, measured in a blink on a tiny pair."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from draftwell.components.papers import runner
from draftwell.components.papers.cell_file import CellFile
from draftwell.components.papers.cells import Cell, Scale, sized
from draftwell.components.papers.plan import Run
from draftwell.components.papers.results import Result, results
from draftwell.components.papers.tables import Paper, Published


def write_sets(folder: Path, texts: Mapping[str, Sequence[str]]) -> Path:
    """Data sets of prompts that fit a tiny pair's context: file → its prompts."""
    for name, prompts in texts.items():
        rows = "".join(json.dumps({"prompt": text}) + "\n" for text in prompts).encode()
        (folder / name).write_bytes(gzip.compress(rows) if name.endswith(".gz") else rows)
    return folder


def tiny_cell(scale: Scale, name: str, **settings: Any) -> Cell:
    """A cell of a run of this size; its target is padded only if it says so."""
    return sized(scale, name, {"pad_target": None, **settings})


def changed(cell: Cell, **changes: Any) -> Cell:
    """A cell with other settings, checked."""
    return Cell.model_validate({**cell.model_dump(), **changes})


def measured_cell(cell: Cell, run: Run, opened: Callable[[Sequence[Cell]], Any]) -> CellFile:
    """What a run finds in a cell."""
    assert runner.run_cells([cell], run, opened) == {}
    return runner.measured_cells([cell], run)[cell.name]


def paper_of(rows: Sequence[dict[str, Any]], cell: str = "tiny-code", **more: Any) -> Paper:
    """A paper whose one table has these rows of one cell; its values are `tiny.a` and `tiny.b`."""
    fields: dict[str, Any] = {
        "name": "tiny",
        "title": "Tiny paper",
        "citation": "Tiny (Nobody et al.)",
        "claims": {"fast": {"claim": "it is fast", "regime": "none", "why": "Because."}},
        "reasons": {"other": "It is another."},
        "published": {
            "tiny": Published(
                source="Table 1", section="1", setting="", unit="", values={"a": 1.5, "b": 1.2}
            )
        },
        "cells": {cell: {"pair": "tiny", "data": "code", "contenders": {}}},
    }
    table = {"title": "Table 1: tiny", "each": [{"cell": cell, "label": "tiny"}], "rows": [*rows]}
    return Paper(**{**fields, "tables": [table | more.pop("table", {})], **more})


def compared(paper: Paper, file: CellFile) -> list[Result]:
    """The rows of its first table."""
    return results(paper, {file.cell.name: file})[0][1]


def with_entry(file: CellFile, label: str, **changes: Any) -> CellFile:
    """A file in which one contender did otherwise."""
    entries = file.report.strategies
    other = {**entries, label: entries[label].model_copy(update=changes)}
    return file.model_copy(update={"report": file.report.model_copy(update={"strategies": other})})


def with_costs(file: CellFile, **changes: Any) -> CellFile:
    """A file with other times of passes."""
    assert file.costs is not None
    return file.model_copy(update={"costs": file.costs.model_copy(update=changes)})
