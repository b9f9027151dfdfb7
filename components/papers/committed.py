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
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from draftwell.components.papers.cell_file import CellFile, read_cell
from draftwell.components.papers.cells import Cell, padding_name
from draftwell.serving.files import write_atomically

FOLDER = Path(__file__).resolve().parents[2] / "docs" / "measured"
"""Of a checkout: an installed package has none."""
DIGITS = 6
"""Of seconds and shares: microseconds."""
ENTRY = (
    "strategy",
    "parameters",
    "split_cores",
    "lossless",
    "greedy",
    "dtype",
    "decode_tokens_per_second",
    "ttft_ms",
    "acceptance_rate",
    "draft_efficiency",
    "identical_outputs",
    "near_ties",
    "tasks",
    "time_share",
    "draft_calls",
    "qualifier_calls",
    "per_prompt",
)
PROMPT = (
    "prompt_id",
    "seconds",
    "tokens",
    "target_calls",
    "accepted",
    "judged",
    "ttft_ms",
    "target_argmax",
    "log_likelihood",
    "sequences",
    "rouge_1",
    "rouge_2",
    "rouge_l",
)
REPORT = (
    "schema_version",
    "pair",
    "fingerprint",
    "padded_to",
    "machine",
    "settings",
    "prompts",
    "prompt_ids",
    "prompts_digest",
)


def committed_cells(cells: Sequence[Cell], folder: Path = FOLDER) -> dict[str, CellFile]:
    """Name → file of those cells that the project keeps; one whose settings have changed since is
    not the cell any more."""
    found = {}
    for cell in cells:
        file = read_kept(place(cell.name, cell.pad_target, folder))
        if file is not None and file.cell == cell.settings():
            found[cell.name] = file
    return found


def place(name: str, padded: float | None, folder: Path = FOLDER) -> Path:
    """Where a cell is kept: those of another padding, which measure the same, in a folder of their
    own.

    >>> place("csd-code", 1.1e9, Path()), place("csd-code", 7e9, Path())
    (PosixPath('csd-code.json'), PosixPath('padded-7b/csd-code.json'))
    """
    return folder / padding_name(padded) / f"{name}.json"


@lru_cache(maxsize=64)
def read_kept(path: Path) -> CellFile | None:
    """A file of the folder, read once; None where there is none."""
    return read_cell(path)


def with_committed(
    own: Mapping[str, CellFile], cells: Sequence[Cell], folder: Path = FOLDER
) -> dict[str, CellFile]:
    """A run's own cells, and the committed ones where it has none."""
    return {**committed_cells(cells, folder), **own}


def compact(file: CellFile, remarks: Iterable[str] = ()) -> str:
    """A cell as JSON with what the page needs of it, a contender a line."""
    report = file.report.to_json()
    kept = {name: report[name] for name in REPORT if name in report}
    entries = {
        label: {
            **{name: entry[name] for name in ENTRY if name in entry},
            "per_prompt": rows_of(entry),
        }
        for label, entry in report["strategies"].items()
    }
    whole = (
        json.loads(file.model_dump_json(exclude={"report"}))
        | {"remarks": [*file.remarks, *remarks]}
        | {"report": kept}
    )
    lines = [f"{json.dumps(label)}: {dumped(entry)}" for label, entry in entries.items()]
    return dumped(whole).removesuffix("}}") + ',"strategies":{\n' + ",\n".join(lines) + "\n}}}\n"


def rows_of(entry: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Its prompts, without what is unknown of them."""
    return [
        {name: row[name] for name in PROMPT if row.get(name) is not None}
        for row in entry["per_prompt"]
    ]


def dumped(value: Any) -> str:
    """JSON with rounded numbers."""
    return json.dumps(rounded(value), ensure_ascii=False, separators=(",", ":"))


def rounded(value: Any) -> Any:
    """The same with floats of `DIGITS` digits behind the point.

    >>> rounded({"a": [0.12345678, 3]})
    {'a': [0.123457, 3]}
    """
    if isinstance(value, dict):
        return {name: rounded(part) for name, part in value.items()}
    if isinstance(value, list):
        return [rounded(part) for part in value]
    return round(value, DIGITS) if isinstance(value, float) else value


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
        name = file.cell["name"]
        path = place(name, file.cell["pad_target"])
        path.parent.mkdir(exist_ok=True)
        write_atomically(path, compact(file, options.remark).encode())
        print(f"{name}: kept")


if __name__ == "__main__":
    main()
