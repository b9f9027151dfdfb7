"""Prompts: one JSON object a line, from a user's file or from those that the project ships."""

from __future__ import annotations

import gzip
import hashlib
import json
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice, zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any

from draftwell.components.prompts.answer_fields import wrong_field
from draftwell.serving.errors import DraftwellError

if TYPE_CHECKING:
    from draftwell.serving.runtime.pair import LoadedPair

DEMO = Path(__file__).parent / "data" / "demo_prompts.jsonl"
EXAMPLE = 'such as {"prompt": "Hello"}'
IDS, TASKS = ("id", "question_id", "task_id"), ("task", "category")
KNOWN = frozenset({*IDS, *TASKS, "prompt", "turns", "messages", "responses", "reference"})
"""Keys of a row that have a place of their own in `Prompt`."""
ROLES = {"human": "user", "gpt": "assistant"}
"""Role names of recorded conversations → those of chat templates."""

Message = dict[str, str]
"""`role` (system, user, assistant …) and `content`."""


@dataclass(frozen=True)
class Prompt:
    """What a user asks, turn by turn.

    Args:
        id: unique within its file.
        task: category, or None.
        turns: the user's turns, at least one, none empty.
        reference: an answer to compare with, or None.
        messages: what stands before the first turn, verbatim: a system message, earlier turns.
        answers: recorded answers to the first turns, verbatim; answers to later turns come from the
            target.
        fields: the row's other keys, which answers are graded by (`answer`, `test`, …).
        raw: the text goes to the model as it is, without a chat template, as a server's completions
            do; then it is the only turn.
        tokens: for each turn the token ids before its answer, where those are known and not the
            text (`prompts_of_trace`); `turns` and `answers` then only give their number.
    """

    id: str
    task: str | None
    turns: list[str]
    reference: str | None = None
    messages: tuple[Message, ...] = ()
    answers: tuple[str, ...] = ()
    fields: Mapping[str, Any] = field(default_factory=dict)
    raw: bool = False
    tokens: tuple[tuple[int, ...], ...] = ()

    @property
    def prompt(self) -> str:
        """The first turn."""
        return self.turns[0]


def read_prompts(path: str | Path, limit: int | None = None) -> list[Prompt]:
    """Prompts of a .jsonl or .jsonl.gz file, whose rows have `prompt` (a string), `turns` (strings)
    or `messages`.

    With `"raw": true` a `prompt` or single turn goes to the model as it is.

    Args:
        limit: read at most this many, None reads all.
    Raises:
        DraftwellError: a missing, empty or unreadable file, or a bad line; the message names it and
            the fix.
    """
    path = Path(path)
    rows = (
        prompt_of(row_of(line, f"{path} line {number}"), f"line-{number}", f"{path} line {number}")
        for number, line in numbered_lines(path)
    )
    return window(path, rows, limit)


def window(source: str | Path, prompts: Iterable[Prompt], limit: int | None) -> list[Prompt]:
    """The prompts of a source that were asked for; no further ones are read.

    Raises:
        DraftwellError: there are none, or two with the same id.
    """
    if limit is not None and limit < 1:
        raise DraftwellError(
            f"the number of prompts must be at least 1, not {limit}", code="bad_limit"
        )
    found = list(islice(prompts, limit))
    if not found:
        raise DraftwellError(
            f"{source} holds no prompts: name a source that does", code="no_prompts"
        )
    name, count = Counter(prompt.id for prompt in found).most_common(1)[0]
    if count > 1:
        raise DraftwellError(
            f"{source}: id {name!r} comes twice: make it unique", code="duplicate_prompt_id"
        )
    return found


def demo_prompts(limit: int | None = None) -> list[Prompt]:
    """The prompts that the project ships; the first few already cover every category."""
    return read_prompts(DEMO, limit)


def mixed(prompts: Sequence[Prompt]) -> list[Prompt]:
    """The same prompts, one of every task in turn, so that the first n are an even mix; each task
    keeps its order.

    >>> [
    ...     p.id
    ...     for p in mixed(
    ...         [Prompt("a1", "a", ["x"]), Prompt("a2", "a", ["x"]), Prompt("b1", "b", ["x"])]
    ...     )
    ... ]
    ['a1', 'b1', 'a2']
    """
    tasks: dict[str | None, list[Prompt]] = {}
    for prompt in prompts:
        tasks.setdefault(prompt.task, []).append(prompt)
    return [prompt for row in zip_longest(*tasks.values()) for prompt in row if prompt is not None]


def ids_of(pair: LoadedPair, prompt: Prompt) -> list[int]:
    """Token ids of a prompt's first turn with the messages before it, as the pair's target is
    asked."""
    if prompt.tokens:
        return list(prompt.tokens[0])
    if prompt.raw:
        return pair.encode(prompt.prompt)
    return pair.encode_prompt(prompt.prompt, prompt.messages)


def context_of(prompt: Prompt) -> list[Any]:
    """All that a first answer depends on, as plain JSON: the first turn and the messages before
    it."""
    return [prompt.prompt, *prompt.messages, *(["raw"] if prompt.raw else [])]


def prompts_digest(prompts: Sequence[Prompt]) -> str:
    """sha256 over ids, first turns and the messages before these, in order."""
    return hashlib.sha256(
        json.dumps([[p.id, *context_of(p)] for p in prompts]).encode()
    ).hexdigest()


def several_turns(prompts: Sequence[Prompt]) -> int:
    """How many prompts have more than one turn."""
    return sum(len(prompt.turns) > 1 for prompt in prompts)


def numbered_lines(path: Path, *, growing: bool = False) -> Iterator[tuple[int, str]]:
    """Numbered lines that are not blank, decompressed and decoded.

    Args:
        growing: the file is still being written: a last line that ends inside a character is left
            out.
    """
    try:
        with gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb") as file:
            for number, raw in enumerate(file, 1):
                try:
                    line = raw.decode("utf-8-sig" if number == 1 else "utf-8")
                except UnicodeDecodeError as error:
                    if (
                        growing
                        and not raw.endswith(b"\n")
                        and error.reason == "unexpected end of data"
                    ):
                        return
                    raise DraftwellError(
                        f"{path} line {number}: not UTF-8: save the file as UTF-8", code="not_utf8"
                    ) from error
                if line.strip():
                    yield number, line
    except FileNotFoundError as error:
        raise DraftwellError(
            f"there is no prompt file {path}: check the path", code="no_such_source"
        ) from error
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise DraftwellError(
            f"{path} is no complete gzip file: compress it again or give the plain .jsonl",
            code="bad_gzip",
        ) from error
    except OSError as error:
        raise DraftwellError(
            f"cannot read prompt file {path}: {error.strerror}", code="unreadable_source"
        ) from error


def row_of(line: str, where: str) -> dict[str, Any]:
    """The JSON object of a line; `where` is its file and number.

    Raises:
        DraftwellError: it holds none.
    """
    try:
        row: Any = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise bad_prompt(where, f"not valid JSON: write one object a line, {EXAMPLE}") from error
    if not isinstance(row, dict):
        raise bad_prompt(where, f"not a JSON object: write one {EXAMPLE}")
    return row


def bad_prompt(where: str, what: str) -> DraftwellError:
    """What is wrong with a row, in one line."""
    return DraftwellError(f"{where}: {what}", code="bad_prompt")


def prompt_of(row: Mapping[str, Any], name: str, where: str) -> Prompt:
    """The prompt of a row with `prompt`, `turns` or `messages`.

    Args:
        name: id of a row that has none.
        where: the row, for the error.
    """
    asked = next(
        (row[key] for key in ("turns", "prompt", "messages") if row.get(key) is not None), None
    )
    if asked is None:
        raise bad_prompt(
            where,
            "it has neither `prompt`, `turns` nor `messages` (keys: "
            f"{', '.join(row) or 'none'}): rename one of them",
        )
    answers = row.get("responses")
    recorded = (
        tuple(answers)
        if isinstance(answers, list) and all(isinstance(answer, str) for answer in answers)
        else ()
    )
    messages: tuple[Message, ...] = ()
    if isinstance(asked, list) and asked and all(isinstance(turn, Mapping) for turn in asked):
        messages, turns, recorded = conversation(asked, where)
    else:
        turns = [asked] if isinstance(asked, str) else asked
    if not isinstance(turns, list) or not all(isinstance(turn, str) for turn in turns):
        raise bad_prompt(
            where,
            "`prompt` must be a string, `turns` a list of strings and `messages` a list of "
            "roles and contents",
        )
    if not turns or not all(turn.strip() for turn in turns):
        raise bad_prompt(where, "its prompt is empty: write something or remove the line")
    reference = _reference(row.get("reference"))
    fields = {key: value for key, value in row.items() if key not in KNOWN}
    if raw := fields.get("raw") is True:
        del fields["raw"]
        if messages or len(turns) > 1:
            raise bad_prompt(
                where, "`raw` needs a `prompt` or a single turn, not a conversation: leave it out"
            )
    if (problem := wrong_field(fields)) is not None:
        raise bad_prompt(where, problem)
    return Prompt(
        _text(row, *IDS) or name,
        _text(row, *TASKS),
        turns,
        recorded[0] if reference is None and recorded else reference,
        messages,
        recorded,
        fields,
        raw,
    )


def conversation(
    recorded: Sequence[Mapping[str, Any]], where: str
) -> tuple[tuple[Message, ...], list[str], tuple[str, ...]]:
    """Messages before the first turn, the user's turns, and the recorded answers to them.

    Messages that end with a user's are a request: the last one is its only turn. Messages that end
    with an answer are a recording: every user's message is a turn if users and assistant alternate
    after a system message, otherwise only the last one is.

    Args:
        recorded: OpenAI's `role` and `content`, or `from` and `value` (human, gpt).
    """
    messages = [_message(one, where) for one in recorded]
    users = [i for i, message in enumerate(messages) if message["role"] == "user"]
    if not users:
        raise bad_prompt(where, "none of its messages is a user's: write one with the role user")
    roles = [message["role"] for message in messages[users[0] :]]
    if roles == ["user", "assistant"] * (len(roles) // 2):
        contents = [message["content"] for message in messages[users[0] :]]
        return tuple(messages[: users[0]]), contents[::2], tuple(contents[1::2])
    last = users[-1]
    answers = [
        message["content"]
        for message in messages[last + 1 : last + 2]
        if message["role"] == "assistant"
    ]
    return tuple(messages[:last]), [messages[last]["content"]], tuple(answers)


def _message(one: Mapping[str, Any], where: str) -> Message:
    """Role and text of a recorded message; the parts of a content are joined."""
    role, content = one.get("role", one.get("from")), one.get("content", one.get("value"))
    if isinstance(content, list) and all(
        isinstance(part, Mapping) and isinstance(part.get("text"), str) for part in content
    ):
        content = "\n".join(part["text"] for part in content)
    if not isinstance(role, str) or not isinstance(content, str):
        raise bad_prompt(
            where,
            'a message needs a `role` and a `content`, both text, such as {"role": "user", '
            '"content": "Hello"}',
        )
    return {"role": ROLES.get(role, role), "content": content}


def _text(row: Mapping[str, Any], *keys: str) -> str | None:
    return next((str(row[key]) for key in keys if row.get(key) is not None), None)


def _reference(value: Any) -> str | None:
    """A string as it is; the first of a list (an answer for each turn)."""
    if isinstance(value, list):
        value = value[0] if value else None
    return None if value is None else str(value)
