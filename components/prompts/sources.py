"""Prompts of any source: JSONL, a spool (folder of recorded requests), Parquet, CSV, or a data set
of the Hugging Face hub.

In tables the first known column that holds prompts is taken. Only the rows asked for are read or
downloaded.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from draftwell.components.prompts.prompt import (
    IDS,
    Prompt,
    bad_prompt,
    numbered_lines,
    prompt_of,
    read_prompts,
    row_of,
    window,
)
from draftwell.serving.artifacts.pair_files import draftwell_home
from draftwell.serving.errors import DraftwellError, missing_package

COLUMNS = ("turns", "prompt", "messages", "conversations", "instruction", "question", "text")
"""Columns that may hold prompts, in this order; `instruction` is followed by the row's `input`."""
JSONL, TABLES = (".jsonl", ".jsonl.gz"), (".parquet", ".csv")
HUB = re.compile(r"[\w.-]+/[\w.-]+(:[\w.-]+)?")
PLAIN = (str, int, float, bool, list, dict, type(None))
Row = Mapping[str, Any]


def load_prompts(
    source: str | Path,
    *,
    limit: int | None = None,
    split: str = "train",
    column: str | None = None,
) -> list[Prompt]:
    """Prompts of a source.

    Args:
        source: `x.jsonl`, `x.jsonl.gz` (see `read_prompts`); a folder of such files with bodies of
            OpenAI requests, as a server records them (a chat's `messages`, or the `prompt` of a
            completion, which is taken raw); a .parquet or .csv file; a folder of Parquet files or
            of `Dataset.save_to_disk`; else `ORG/NAME` or `ORG/NAME:CONFIG` on the Hugging Face hub,
            of which no more is downloaded than is read.
        limit: read at most this many, None reads all.
        split: of a data set that has several.
        column: that holds the prompts: text, several turns, or messages. None takes the first one
            of `COLUMNS` that exists.
    Returns:
        prompts with ids `<name>/<index>`, or their own where they come as JSONL; rows without any
        text are left out.
    Raises:
        DraftwellError: no such source, nothing in it, or a row that holds no prompt; one line.
    """
    path, name = Path(source), str(source)
    if name.endswith(JSONL) or (path.is_file() and path.suffix not in TABLES):
        if column is not None:
            raise DraftwellError(
                (
                    f"{name} is JSONL, whose rows name their prompts `prompt`, `turns` or "
                    "`messages`: leave --column out"
                ),
                code="column_of_jsonl",
            )
        return read_prompts(path, limit)
    found = (
        _spooled(path)
        if path.is_dir() and jsonl_files(path)
        else _in_rows(name, _rows(path, name, split), column)
    )
    return window(name, found, limit)


def jsonl_files(folder: Path) -> list[Path]:
    """Files of request bodies in a folder, in order."""
    return sorted(path for path in folder.iterdir() if path.name.endswith(JSONL))


def readable_requests(files: Iterable[Path]) -> tuple[list[Prompt], list[DraftwellError]]:
    """Recorded requests that hold a prompt, file by file, and what is wrong with the others.

    One odd request must not keep all others from being used. A file that cannot be read to its end
    counts as one error, and the requests before that are returned.
    """
    found: list[Prompt] = []
    wrong: list[DraftwellError] = []
    for path in files:
        try:
            for number, line in numbered_lines(path, growing=True):
                try:
                    prompt = _request(path, number, line)
                except DraftwellError as error:
                    wrong.append(error)
                else:
                    found += [] if prompt is None else [prompt]
        except DraftwellError as error:
            wrong.append(error)
    return found, wrong


def _spooled(folder: Path) -> Iterator[Prompt]:
    """Requests of a folder, file by file."""
    for path in jsonl_files(folder):
        for number, line in numbered_lines(path, growing=True):
            if (prompt := _request(path, number, line)) is not None:
                yield prompt


def _request(path: Path, number: int, line: str) -> Prompt | None:
    """The prompt of a request's body; None for a last line without a newline, which is still being
    written. That of a completion goes to the model as it is, as a server gives it."""
    where = f"{path} line {number}"
    try:
        row = row_of(line, where)
    except DraftwellError:
        if not line.endswith("\n"):
            return None
        raise
    prompt = prompt_of(
        row, f"{path.name.removesuffix('.gz').removesuffix('.jsonl')}/{number}", where
    )
    if row.get("prompt") is None:
        return prompt
    if len(prompt.turns) > 1:
        raise bad_prompt(
            where, "it asks for several completions: write one request for each prompt"
        )
    return replace(prompt, raw=True)


def _rows(path: Path, name: str, split: str) -> Iterator[Row]:
    """Rows of a table in any format."""
    if path.is_file():
        return _csv_rows(path) if path.suffix == ".csv" else _parquet_rows([path])
    if path.is_dir():
        if any((path / marker).is_file() for marker in ("state.json", "dataset_dict.json")):
            return _saved_rows(path, split)
        if files := sorted(path.glob("*.parquet")):
            return _parquet_rows(files)
    elif HUB.fullmatch(name) and path.suffix not in TABLES and not name.startswith("."):
        return _hub_rows(name, split)
    raise DraftwellError(
        f"{name} is neither a .jsonl, .parquet or .csv file, nor a folder with .jsonl or .parquet "
        "files or a saved data set, nor ORG/NAME of a data set on the hub: check its name",
        code="no_such_source",
    )


def _csv_rows(path: Path) -> Iterator[Row]:
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            yield from csv.DictReader(file)
    except (UnicodeDecodeError, csv.Error) as error:
        raise DraftwellError(
            f"{path} is no CSV file in UTF-8 ({error}): save it again", code="unreadable_source"
        ) from error


def _parquet_rows(files: list[Path]) -> Iterator[Row]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    for path in files:
        try:
            for batch in pq.ParquetFile(path).iter_batches(batch_size=256):
                yield from batch.to_pylist()
        except (OSError, pa.ArrowException) as error:
            raise DraftwellError(
                f"{path} is truncated or no Parquet file: fetch or save it again",
                code="unreadable_source",
            ) from error


def _saved_rows(folder: Path, split: str) -> Iterator[Row]:
    """Rows of `Dataset.save_to_disk` or `DatasetDict.save_to_disk`."""
    library = _datasets()
    try:
        saved = library.load_from_disk(str(folder))
    except Exception as error:  # the library's errors are of many kinds
        raise DraftwellError(
            f"{folder} is not a readable data set ({type(error).__name__}): save it again",
            code="unreadable_source",
        ) from error
    if isinstance(saved, library.DatasetDict):
        if split not in saved:
            raise DraftwellError(
                f"{folder} has no split {split!r}: choose one of {', '.join(saved)}",
                code="no_such_split",
            )
        saved = saved[split]
    yield from saved


def _hub_rows(name: str, split: str) -> Iterator[Row]:
    """Rows as they are downloaded."""
    library = _datasets()
    place, _, config = name.partition(":")
    try:
        yield from library.load_dataset(
            place,
            config or None,
            split=split,
            streaming=True,
            cache_dir=str(draftwell_home() / "datasets"),
        )
    except Exception as error:  # of the library, of the hub, of HTTP, of the file formats
        reason = (str(error).strip().splitlines() or [""])[0]
        raise DraftwellError(
            f"cannot read {place} from the hub: {type(error).__name__}: {reason[:200]}: "
            "check its name, its split "
            f"({split}) and the connection, or name a local file",
            code="hub_failed",
        ) from error


def _datasets() -> Any:
    try:
        import datasets
    except ImportError as error:
        raise missing_package("this source needs", "datasets", "pipeline") from error
    datasets.disable_progress_bars()
    return datasets


def _in_rows(name: str, rows: Iterator[Row], column: str | None) -> Iterator[Prompt]:
    """A prompt for every row that holds some text."""
    short = Path(name).name.split(".")[0] if Path(name).exists() else name
    chosen = column or ""
    for index, row in enumerate(rows):
        chosen = chosen or next((known for known in COLUMNS if known in row), "")
        if chosen not in row:
            raise DraftwellError(
                f"{name} has no column {column or 'of ' + ', '.join(COLUMNS)}: name one of "
                "its own with --column "
                f"({', '.join(map(str, row))})",
                code="no_such_column",
            )
        content = row[chosen]
        if (
            chosen == "instruction"
            and isinstance(content, str)
            and isinstance(row.get("input"), str)
            and row["input"].strip()
        ):
            content = f"{content}\n\n{row['input']}"
        if content is None or not (content.strip() if isinstance(content, str) else content):
            continue
        others = {
            key: value
            for key, value in row.items()
            if key not in (chosen, "turns", "prompt", "messages", *IDS) and isinstance(value, PLAIN)
        }
        yield prompt_of({**others, "turns": content}, f"{short}/{index}", f"{name} row {index}")
