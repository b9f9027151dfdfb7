"""Prompts of any source: JSONL, a spool (folder of recorded requests), Parquet, CSV, or a data set
of the Hugging Face hub.

In tables the first known column that holds prompts is taken. Only the rows asked for are read or
downloaded.
"""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

from draftwell.components.prompts.prompt import IDS, Prompt, numbered_lines, prompt_of, read_prompts
from draftwell.serving.artifacts.pair_files import draftwell_home
from draftwell.serving.errors import DraftwellError

COLUMNS = ("turns", "prompt", "messages", "conversations", "instruction", "question", "text")
"""Columns that may hold prompts, in this order; `instruction` is followed by the row's `input`."""
JSONL = (".jsonl", ".jsonl.gz")
HUB = re.compile(r"[\w.-]+/[\w.-]+(:[\w.-]+)?")
PLAIN = (str, int, float, bool, list, dict, type(None))
Row = Mapping[str, Any]


def load_prompts(
    source: str | Path,
    *,
    limit: int | None = None,
    skip: int = 0,
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
        skip: leave out this many at the start.
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
    if name.endswith(JSONL) or (path.is_file() and path.suffix not in (".parquet", ".csv")):
        if column is not None:
            raise DraftwellError(
                (
                    f"{name} is JSONL, whose rows name their prompts `prompt`, `turns` or "
                    "`messages`: leave --column out"
                ),
                code="column_of_jsonl",
            )
        return read_prompts(path, limit, skip)
    _check_range(limit, skip)
    found = (
        _spooled(path)
        if path.is_dir() and jsonl_files(path)
        else _in_rows(name, _rows(path, name, split), column)
    )
    prompts = list(islice(found, None if limit is None else skip + limit))
    if len(prompts) <= skip:
        raise DraftwellError(
            f"{name} holds only {len(prompts)} prompts, of which {skip} are skipped: skip fewer"
            if prompts
            else f"{name} holds no prompts: name a source that does",
            code="no_prompts",
        )
    _check_ids(name, prompts)
    return prompts[skip:]


def _check_range(limit: int | None, skip: int) -> None:
    """Refuse numbers of prompts that mean nothing."""
    if limit is not None and limit < 1:
        raise DraftwellError(
            f"the number of prompts must be at least 1, not {limit}", code="bad_limit"
        )
    if skip < 0:
        raise DraftwellError(
            f"the number of prompts to skip must be at least 0, not {skip}", code="bad_limit"
        )


def _check_ids(name: str, prompts: Iterable[Prompt]) -> None:
    """Refuse ids that come twice."""
    seen: set[str] = set()
    for prompt in prompts:
        if prompt.id in seen:
            raise DraftwellError(
                f"{name}: id {prompt.id!r} comes twice: make it unique", code="duplicate_prompt_id"
            )
        seen.add(prompt.id)


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
    written."""
    where = f"{path} line {number}"
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        if not line.endswith("\n"):
            return None
        raise DraftwellError(
            f"{where}: not valid JSON: write one request body a line", code="bad_prompt"
        ) from error
    if not isinstance(row, dict):
        raise DraftwellError(
            f"{where}: not a JSON object: write one request body a line", code="bad_prompt"
        )
    prompt = prompt_of(
        row, f"{path.name.removesuffix('.gz').removesuffix('.jsonl')}/{number}", _wrong(where)
    )
    return prompt if row.get("prompt") is None else _completion(prompt, where)


def _completion(prompt: Prompt, where: str) -> Prompt:
    """The prompt of a completion request, which a server gives to the model as it is."""
    if len(prompt.turns) > 1:
        raise DraftwellError(
            f"{where}: it asks for several completions: write one request for each prompt",
            code="bad_prompt",
        )
    return replace(prompt, raw=True)


def _wrong(where: str) -> Any:
    return lambda what: DraftwellError(f"{where}: {what}", code="bad_prompt")


def _rows(path: Path, name: str, split: str) -> Iterator[Row]:
    """Rows of a table in any format."""
    if path.suffix == ".csv" and path.is_file():
        return _csv_rows(path)
    if path.suffix == ".parquet" and path.is_file():
        return _parquet_rows([path])
    if path.is_dir():
        if any((path / marker).is_file() for marker in ("state.json", "dataset_dict.json")):
            return _saved_rows(path, split)
        if files := sorted(path.glob("*.parquet")):
            return _parquet_rows(files)
        raise DraftwellError(
            (
                f"{name} is a folder without .jsonl or .parquet files or a saved data set: "
                "name another"
            ),
            code="no_such_source",
        )
    if path.suffix in (".parquet", ".csv"):
        raise DraftwellError(
            f"there is no prompt file {name}: check the path", code="no_such_source"
        )
    if HUB.fullmatch(name) and not name.startswith("."):
        return _hub_rows(name, split)
    raise DraftwellError(
        (
            f"{name} is neither a file, nor a folder, nor ORG/NAME of a data set on the hub: "
            "check its name"
        ),
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
        raise DraftwellError(
            "this source needs the package datasets: pip install 'draftwell[pipeline]'",
            code="missing_package",
        ) from error
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
        yield prompt_of(
            {**others, "turns": content}, f"{short}/{index}", _wrong(f"{name} row {index}")
        )
