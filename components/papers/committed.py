"""Cells that the project has measured and keeps in `docs/measured/`: a page shows them where a
run has none of its own.

A full run takes hours, and its files are in a folder that git ignores. Without these, the page of a
fresh clone, or of another machine, would have "open" in the place of every value.

    python -m draftwell.components.papers.committed .draftwell/papers/full/csd-*.json --remark
    "Tests ran beside its last minutes."
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Sequence
from functools import lru_cache
from pathlib import Path

from draftwell.components.papers.cell_file import CellFile, read_cell
from draftwell.components.papers.cells import Cell, padding_name
from draftwell.serving.files import write_atomically

FOLDER = Path(__file__).resolve().parents[2] / "docs" / "measured"
"""Of a checkout: an installed package has none."""
DIGITS = 6
"""Of seconds and shares: microseconds."""
read_kept = lru_cache(maxsize=64)(read_cell)
"""A file of the folder, read once."""


def committed_cells(cells: Sequence[Cell], folder: Path = FOLDER) -> dict[str, CellFile]:
    """Name → file of those cells that the project keeps; one whose settings have changed since is
    not the cell any more."""
    found = {}
    for cell in cells:
        file = read_kept(place(cell, folder))
        if file is not None and file.cell == cell:
            found[cell.name] = file
    return found


def place(cell: Cell, folder: Path = FOLDER) -> Path:
    """Where a cell is kept: those of another padding, which measure the same, in a folder of their
    own."""
    return folder / padding_name(cell.pad_target) / f"{cell.name}.json"


def compact(file: CellFile, remarks: Iterable[str] = ()) -> str:
    """A cell as JSON with rounded numbers."""
    remarked = file.model_copy(update={"remarks": (*file.remarks, *remarks)})
    text = remarked.model_dump_json(exclude_unset=True)
    value = json.loads(text, parse_float=lambda number: round(float(number), DIGITS))
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")) + "\n"


def main(arguments: Sequence[str] | None = None) -> None:
    """Keep measured cells in the project."""
    parser = argparse.ArgumentParser(
        description="Keep measured cells of `draftwell reproduce papers` in the project."
    )
    parser.add_argument(
        "files",
        nargs="+",
        type=Path,
        help="of the run's folder, such as .draftwell/papers/full/csd-code-….json",
    )
    parser.add_argument(
        "--remark",
        action="append",
        default=[],
        help="a sentence on how they were measured, for the page",
    )
    options = parser.parse_args(arguments)
    for path in options.files:
        file = read_cell(path)
        if file is None:
            raise SystemExit(f"{path} is no measured cell: name a JSON file of the run's folder")
        path = place(file.cell)
        path.parent.mkdir(exist_ok=True)
        write_atomically(path, compact(file, options.remark).encode())
        print(f"{file.cell.name}: kept")


if __name__ == "__main__":
    main()
