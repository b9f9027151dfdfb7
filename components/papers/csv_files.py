"""Everything that the pages leave out, as CSV: every row and every contender."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from draftwell.components.papers.cells import PLAIN
from draftwell.components.papers.committed import DIGITS
from draftwell.components.papers.estimates import pace
from draftwell.components.papers.page import Shown
from draftwell.serving.files import write_atomically

Line = dict[str, Any]


def write_csv(shown: Shown, folder: Path) -> list[Path]:
    """Write the two files; those that are there are replaced."""
    folder.mkdir(parents=True, exist_ok=True)
    made = []
    for name, lines in (("rows", rows(shown)), ("contenders", contenders(shown))):
        path = folder / f"{name}.csv"
        write_atomically(path, as_csv(list(lines)).encode())
        made.append(path)
    return made


def as_csv(lines: list[Line]) -> str:
    """With the columns of the first line, numbers rounded; empty without any."""
    text = io.StringIO()
    if lines:
        writer = csv.DictWriter(text, lines[0], lineterminator="\n")
        writer.writeheader()
        for line in lines:
            writer.writerow(
                {
                    name: round(value, DIGITS) if isinstance(value, float) else value
                    for name, value in line.items()
                }
            )
    return text.getvalue()


def rows(shown: Shown) -> Iterator[Line]:
    """Every row of every paper."""
    for paper in shown.papers:
        for table, found in shown.tables[paper.name]:
            for one in found:
                yield {
                    "paper": paper.name,
                    "table": table.title,
                    "cell": one.placed.cell,
                    "kind": one.kind,
                    "label": one.placed.label,
                    **one.placed.row.model_dump(include={"what", "metric", "role", "over", "at"}),
                    "settings": one.settings,
                    "there": one.placed.paper,
                    "source": one.placed.source,
                    **interval("here", one.ours),
                    **interval("first choices", one.lost),
                    "prompts": one.prompts or None,
                    "verdict": one.words,
                    "reason": paper.reasons.get(one.reason),
                    "trust": one.confidence if one.ours else None,
                }


def interval(name: str, found: Any) -> Line:
    """A value and its ends as three columns."""
    values = found or (None, None, None)
    return dict(zip((name, f"{name}, low", f"{name}, high"), values, strict=True))


def contenders(shown: Shown) -> Iterator[Line]:
    """Every contender of every cell that was measured."""
    for name, file in shown.files.items():
        plain, base = (pace(file.entry(role).per_prompt) for role in (PLAIN, file.base))
        for role, label in (
            (role, one) for role, some in file.cell.labels().items() for one in some
        ):
            entry = file.report.strategies[label]
            yield {
                "cell": name,
                "kind": file.cell.kind,
                "role": role,
                "contender": label,
                "decode tokens/s": entry.decode_tokens_per_second,
                "over plain": plain / pace(entry.per_prompt),
                "over SD": None if file.base == PLAIN else base / pace(entry.per_prompt),
                "ttft ms": entry.ttft_ms,
                "acceptance": entry.acceptance_rate,
                "accepted / drafted": entry.draft_efficiency,
                "texts": len(entry.per_prompt),
                "texts as plain's": entry.identical_outputs,
                "near-ties": entry.near_ties,
            }
