"""Cells of papers, measured in a blink on a tiny pair."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from draftwell.components.papers import runner
from draftwell.components.papers.cell_file import CellFile
from draftwell.components.papers.cells import Cell, Scale
from draftwell.components.papers.page import render
from draftwell.components.papers.tables import Paper, PaperTable


def write_sets(folder: Path, texts: Mapping[str, Sequence[str]]) -> Path:
    """Data sets of prompts that fit a tiny pair's context: file → its prompts."""
    for name, prompts in texts.items():
        rows = "".join(json.dumps({"prompt": text}) + "\n" for text in prompts).encode()
        (folder / name).write_bytes(gzip.compress(rows) if name.endswith(".gz") else rows)
    return folder


def changed(cell: Cell, **changes: Any) -> Cell:
    """A cell with other settings, checked."""
    return Cell.model_validate({**cell.model_dump(), **changes})


def measured_cell(cell: Cell, run: runner.Run, opened: Callable[[Sequence[Cell]], Any]) -> CellFile:
    """What a run finds in a cell."""
    assert runner.run_cells([cell], run, opened) == {}
    return runner.measured_cells([cell], run)[cell.name]


def paper_of(table: PaperTable, **more: Any) -> Paper:
    """A paper that consists of a table."""
    return Paper("tiny", "Tiny paper", lambda scale: (table,), **more)


def page_of(scale: Scale, table: PaperTable, file: CellFile) -> str:
    """The page of a measured table."""
    return render([paper_of(table)], scale, {table.cell.name: file})


def with_entry(file: CellFile, label: str, **changes: Any) -> CellFile:
    """A file in which one contender did otherwise."""
    entries = file.report.strategies
    other = {**entries, label: entries[label].model_copy(update=changes)}
    return file.model_copy(update={"report": file.report.model_copy(update={"strategies": other})})


def with_costs(file: CellFile, **changes: Any) -> CellFile:
    """A file with other times of passes."""
    assert file.costs is not None
    return file.model_copy(update={"costs": file.costs.model_copy(update=changes)})
