"""Prompts: one JSON object a line, from a user's file or from those that the project ships."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

from serving.runtime.types import DraftwellError

DEMO = Path(__file__).parent / "data" / "demo_prompts.jsonl"
EXAMPLE = 'such as {"prompt": "Hello"}'


@dataclass(frozen=True)
class Prompt:
    """What a user says, turn by turn.

    Args:
        id: unique within its file.
        task: category, or None.
        turns: the user's turns, at least one, none empty.
        reference: an answer to compare with, or None.
    """

    id: str
    task: str | None
    turns: list[str]
    reference: str | None = None

    @property
    def prompt(self) -> str:
        """The first turn."""
        return self.turns[0]


def read_prompts(path: str | Path, limit: int | None = None, skip: int = 0) -> list[Prompt]:
    """Prompts of a .jsonl or .jsonl.gz file, whose rows have `prompt` (a string) or `turns` (strings).

    Args:
        limit: read at most this many, None reads all.
        skip: leave out this many at the start.
    Raises:
        DraftwellError: a missing, empty or unreadable file, or a bad line; the message names it and the mend.
    """
    path = Path(path)
    if limit is not None and limit < 1:
        raise DraftwellError(f"the number of prompts must be at least 1, not {limit}")
    if skip < 0:
        raise DraftwellError(f"the number of prompts to skip must be at least 0, not {skip}")
    prompts: list[Prompt] = []
    seen: dict[str, int] = {}
    for number, line in numbered_lines(path):
        if limit is not None and len(prompts) == skip + limit:
            break
        prompt = _parse(path, number, line)
        if prompt.id in seen:
            first = seen[prompt.id]
            raise DraftwellError(f"{path} line {number}: id {prompt.id!r} is on line {first} too: make it unique")
        seen[prompt.id] = number
        prompts.append(prompt)
    if not prompts:
        raise DraftwellError(f"{path} holds no prompts: write one JSON object a line, {EXAMPLE}")
    if len(prompts) <= skip:
        raise DraftwellError(f"{path} holds only {len(prompts)} prompts, of which {skip} are skipped: skip fewer")
    return prompts[skip:]


def demo_prompts(limit: int | None = None, skip: int = 0) -> list[Prompt]:
    """The prompts that the project ships; the first few already cover every category."""
    return read_prompts(DEMO, limit, skip)


def mixed(prompts: Sequence[Prompt]) -> list[Prompt]:
    """The same prompts, one of every task in turn, so that the first n are an even mix; each task keeps its order.

    >>> [p.id for p in mixed([Prompt("a1", "a", ["x"]), Prompt("a2", "a", ["x"]), Prompt("b1", "b", ["x"])])]
    ['a1', 'b1', 'a2']
    """
    tasks: dict[str | None, list[Prompt]] = {}
    for prompt in prompts:
        tasks.setdefault(prompt.task, []).append(prompt)
    return [prompt for row in zip_longest(*tasks.values()) for prompt in row if prompt is not None]


def several_turns(prompts: Sequence[Prompt]) -> int:
    """How many have more than one turn."""
    return sum(len(prompt.turns) > 1 for prompt in prompts)


def numbered_lines(path: Path) -> Iterator[tuple[int, str]]:
    """Numbered lines that are not blank, decompressed and decoded."""
    try:
        with gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb") as file:
            for number, raw in enumerate(file, 1):
                try:
                    line = raw.decode("utf-8-sig" if number == 1 else "utf-8")
                except UnicodeDecodeError as error:
                    raise DraftwellError(f"{path} line {number}: not UTF-8: save the file as UTF-8") from error
                if line.strip():
                    yield number, line
    except FileNotFoundError as error:
        raise DraftwellError(f"there is no prompt file {path}: check the path") from error
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise DraftwellError(f"{path} is no complete gzip file: compress it again or give the plain .jsonl") from error
    except OSError as error:
        raise DraftwellError(f"cannot read prompt file {path}: {error.strerror}") from error


def _parse(path: Path, number: int, line: str) -> Prompt:
    """A row; everything wrong with it is said in one line."""

    def wrong(what: str) -> DraftwellError:
        return DraftwellError(f"{path} line {number}: {what}")

    try:
        row: Any = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise wrong("not valid JSON: write one object a line, " + EXAMPLE) from error
    if not isinstance(row, dict):
        raise wrong("not a JSON object: write one " + EXAMPLE)
    turns = row["turns"] if row.get("turns") is not None else row.get("prompt")
    if turns is None:
        raise wrong(f"it has neither `prompt` nor `turns` (keys: {', '.join(row) or 'none'}): name one of them so")
    turns = [turns] if isinstance(turns, str) else turns
    if not isinstance(turns, list) or not all(isinstance(turn, str) for turn in turns):
        raise wrong("`prompt` must be a string and `turns` a list of strings")
    if not turns or not all(turn.strip() for turn in turns):
        raise wrong("its prompt is empty: write something or remove the line")
    return Prompt(_text(row, "id", "question_id", "task_id") or f"line-{number}", _text(row, "task", "category"), turns,
                  _reference(row.get("reference")))


def _text(row: dict[str, Any], *keys: str) -> str | None:
    return next((str(row[key]) for key in keys if row.get(key) is not None), None)


def _reference(value: Any) -> str | None:
    """A string as it is; of a list (an answer for each turn) the first."""
    if isinstance(value, list):
        value = value[0] if value else None
    return None if value is None else str(value)
