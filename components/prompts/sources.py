"""Prompts of any source: files and folders (`files`) of any known layout (`layouts`), saved data
sets, and data sets of the Hugging Face hub.

A row that holds no prompt is left out and counted; only a source without any is refused. No more
rows are read or downloaded than are asked for.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from draftwell.components.prompts.files import (
    CELLS,
    JSONL,
    SUFFIXES,
    Row,
    files_in,
    rows_of,
    suffix_of,
)
from draftwell.components.prompts.layouts import UNKNOWN
from draftwell.components.prompts.messages import NoPrompt
from draftwell.components.prompts.prompt import (
    IDS,
    Prompt,
    bad_prompt,
    check_limit,
    ids_of,
    prompts_of_row,
)
from draftwell.components.prompts.redact import redacted
from draftwell.serving.artifacts.pair_files import draftwell_home
from draftwell.serving.errors import DraftwellError, missing_package
from draftwell.serving.recording.tenants import PROMPT_ID

if TYPE_CHECKING:
    from draftwell.serving.runtime.pair import LoadedPair

SAVED = ("state.json", "dataset_dict.json")
SHIPPED = {
    f"shipped:{name}": Path(__file__).parent / "data" / f"{name}.jsonl"
    for name in ("categories", "lengths")
}
"""Names that stand for small files of our own, laid out as SPEED-Bench's qualitative split and its
throughput splits are."""
NamedRow = tuple[str, Row | NoPrompt | DraftwellError, str, dict[str, Any]]
"""Where it stands, the row or what is wrong there, its id, and how it is laid out."""
HUB = re.compile(r"[\w.-]+/[\w.-]+(:[\w.-]+)?")
MOST_REASONS = 6
"""Kinds of reasons that are named for rows that were left out."""


@dataclass
class LeftOut:
    """Rows without a prompt that could be read: how many, for each reason, and the first of each.

    >>> left = LeftOut()
    >>> left.add("a.jsonl line 2", "its prompt is empty")
    >>> left.add("a.jsonl line 7", "its prompt is empty")
    >>> print(left)
    2 rows left out: its prompt is empty (2, first a.jsonl line 2)
    """

    reasons: Counter[str] = field(default_factory=Counter)
    first: dict[str, str] = field(default_factory=dict)
    broken: DraftwellError | None = None
    """Why a file could not be read, or not to its end."""

    def add(self, place: str, reason: str) -> None:
        """A row was left out."""
        self.reasons[reason] += 1
        self.first.setdefault(reason, place)

    def __bool__(self) -> bool:
        return bool(self.reasons)

    def __str__(self) -> str:
        count = self.reasons.total()
        told = [
            f"{reason} ({number}, first {self.first[reason]})"
            for reason, number in self.reasons.most_common(MOST_REASONS)
        ]
        if len(self.reasons) > MOST_REASONS:
            told.append(f"{len(self.reasons) - MOST_REASONS} further reasons")
        return f"{count} row{'s' if count > 1 else ''} left out: {'; '.join(told)}"


def load_prompts(
    source: str | Path,
    *,
    limit: int | None = None,
    split: str = "train",
    column: str | None = None,
    redact: bool = False,
    left_out: LeftOut | None = None,
) -> list[Prompt]:
    """Prompts of a source.

    Args:
        source: a name of `SHIPPED`, or a file or a folder of files (`files.SUFFIXES`, also .gz)
            whose rows are of any layout of `layouts`; a folder of `Dataset.save_to_disk`; else
            `ORG/NAME` or `ORG/NAME:CONFIG` on the Hugging Face hub, of which no more is downloaded
            than is read.
            JSONL files in a folder are bodies of requests, as a server records them: a `prompt`
            in them is taken raw.
        limit: read at most this many, None reads all.
        split: of a data set that has several.
        column: that holds the prompts: text, several turns, or messages. None takes the first one
            of `layouts.KEYS` that a row has.
        redact: mask e-mails, phone numbers, keys and the like (`redact`).
        left_out: is told of each row that holds no prompt.
    Returns:
        prompts with ids `<name>/<index>` or `line-<n>`, or their own.
    Raises:
        DraftwellError: no such source, or nothing in it that can be used; one line.
    """
    check_limit(limit)
    left = LeftOut() if left_out is None else left_out
    found = list(islice(_prompts(source, split, column, left, redact=redact), limit))
    if found:
        return found
    if left.broken:
        raise left.broken
    told = f" that can be read: {left}" if left else "s: name a source that does"
    unknown = left and all(reason.startswith(UNKNOWN) for reason in left.reasons)
    if unknown:
        told += ": name the key or column that holds it with --set column=…"
    code = "no_such_column" if unknown else "no_prompts"
    raise DraftwellError(f"{source} holds no prompt{told}", code=code)


def _prompts(
    source: str | Path, split: str, column: str | None, left: LeftOut, *, redact: bool
) -> Iterator[Prompt]:
    """The prompts of all rows, with different ids."""
    taken = Counter[str]()
    for place, row, name, layout in _rows(source, split):
        try:
            if isinstance(row, Exception):
                raise row
            for prompt in prompts_of_row(row, name, column=column, **layout):
                own = redacted(prompt) if redact else prompt
                yield replace(own, id=free_id(own.id, taken))
        except NoPrompt as error:
            left.add(place, str(error))
        except DraftwellError as error:
            left.add(place, str(error))
            left.broken = error


def free_id(name: str, taken: Counter[str]) -> str:
    """An id that no earlier prompt has, counted on; it is taken then.

    >>> taken = Counter[str]()
    >>> [free_id(name, taken) for name in ("a", "a", "a (2)", "a")]
    ['a', 'a (2)', 'a (2) (2)', 'a (3)']
    """
    new = name
    while taken[new]:
        taken[name] += 1
        new = f"{name} ({taken[name]})"
    taken[new] += 1
    return new


def readable_by(
    pair: LoadedPair, prompts: Iterable[Prompt], left_out: LeftOut, longest: int | None = None
) -> list[Prompt]:
    """The prompts that a pair can read; it needs no models for that.

    Args:
        left_out: is told of those that the chat template refuses, that have tokens which the pair
            lacks, or more than `longest` of them.
    Raises:
        DraftwellError: none is left (`no_prompts`).
    """
    found = []
    for prompt in prompts:
        try:
            ids = ids_of(pair, prompt)
            if prompt.tokens and not 0 <= min(ids) <= max(ids) < len(pair.tokenizer):
                raise NoPrompt("it has token ids that this model lacks")
            if longest is not None and len(ids) > longest:
                raise NoPrompt(f"it has more than the {longest} tokens that there is room for")
            found.append(prompt)
        except (NoPrompt, DraftwellError) as error:
            left_out.add(f"prompt {prompt.id}", str(error))
    if not found:
        raise DraftwellError(f"no prompt can be read: {left_out}", code="no_prompts")
    return found


def jsonl_files(folder: Path) -> list[Path]:
    """Files of request bodies in a folder, in order."""
    return sorted(path for path in folder.iterdir() if suffix_of(path) in JSONL)


def readable_requests(files: Iterable[Path]) -> tuple[list[Prompt], list[DraftwellError]]:
    """Recorded requests that hold a prompt, file by file, and what is wrong with the others.

    One odd request must not keep all others from being used. A file that cannot be read to its end
    counts as one error, and the requests before that are returned.
    """
    found: list[Prompt] = []
    wrong: list[DraftwellError] = []
    for place, row, name, layout in _file_rows(files, None):
        try:
            if isinstance(row, Exception):
                raise row
            found += prompts_of_row(row, name, **layout)
        except NoPrompt as error:
            wrong.append(bad_prompt(place, str(error)))
        except DraftwellError as error:
            wrong.append(error)
    return found, wrong


def _rows(source: str | Path, split: str) -> Iterator[NamedRow]:
    """The rows of a source in any format."""
    path, name = SHIPPED.get(str(source), Path(source)), str(source)
    if path.is_dir() and any((path / marker).is_file() for marker in SAVED):
        return _named(name, path.name, _saved_rows(path, split))
    if path.is_dir() and (files := files_in(path, split)):
        return _file_rows(files, None if suffix_of(files[0]) in JSONL else path.name)
    if path.is_file() or (suffix_of(path) in SUFFIXES and not path.is_dir()):
        lines = suffix_of(path) in JSONL or suffix_of(path) not in SUFFIXES
        return _file_rows([path], "" if lines else path.name.split(".")[0])
    if not path.exists() and HUB.fullmatch(name) and not name.startswith("."):
        return _named(name, name, _hub_rows(name, split))
    raise DraftwellError(
        f"{name} is neither a file ({', '.join(SUFFIXES)}), nor a folder with such files or a "
        "saved data set, nor ORG/NAME of a data set on the hub: check its name",
        code="no_such_source",
    )


def _named(place: str, name: str, rows: Iterator[Row]) -> Iterator[NamedRow]:
    """Rows of a data set."""
    for index, row in enumerate(rows):
        yield f"{place} row {index}", without_ids(row), f"{name}/{index}", {"cells": True}


def _file_rows(files: Iterable[Path], name: str | None) -> Iterator[NamedRow]:
    """Rows of files; one that cannot be read to its end gives its error last.

    Args:
        name: before the index of a row in its id; empty: rows are named by their lines; None: the
            files hold bodies of requests, whose rows are named by file and line.
    """
    index = 0
    for path in files:
        table = suffix_of(path) in CELLS
        try:
            for place, row in rows_of(path, growing=name is None):
                own = f"{name}/{index}"
                if not name:
                    stem = path.name.split(".jsonl")[0]
                    own = f"{stem}/{place.split()[-1]}" if name is None else place.replace(" ", "-")
                row = without_ids(row) if table and not isinstance(row, NoPrompt) else row
                yield f"{path} {place}", row, own, {"cells": table, "bodies": name is None}
                index += 1
        except DraftwellError as error:
            yield str(path), error, "", {}


def without_ids(row: Row) -> Row:
    """A row of a table, which is named by its place: ids in tables need not differ. Those that name
    a tenant stay."""
    return {k: one for k, one in row.items() if k not in IDS or PROMPT_ID.match(str(one))}


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
