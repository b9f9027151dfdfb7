"""Prompts: one JSON object a line, from a user's file or from those that the project ships."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice, zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any

from draftwell.components.prompts.answer_fields import wrong_field
from draftwell.components.prompts.files import rows_of
from draftwell.components.prompts.layouts import normal_rows
from draftwell.components.prompts.messages import (
    EMPTY,
    Message,
    NoPrompt,
    plain_messages,
    text_of,
    tools_of,
)
from draftwell.serving.errors import DraftwellError

if TYPE_CHECKING:
    from draftwell.serving.runtime.pair import LoadedPair

DEMO = Path(__file__).parent / "data" / "demo_prompts.jsonl"
PLACEHOLDER = "FULL BENCHMARK DATA SHOULD BE FETCHED FROM THE SOURCE"
"""How turns of SPEED-Bench begin whose text only `prepare_data.py` of Model-Optimizer's
specdec_bench may fetch."""
IDS, TASKS = ("id", "question_id", "task_id"), ("task", "category")
KNOWN = frozenset(
    {
        *IDS,
        *TASKS,
        "turns",
        "messages",
        "tokens",
        "responses",
        "reference",
        "raw",
        "tools",
        "system",
    }
)
"""Keys of a row in its normal form that have a place of their own in `Prompt`."""


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
            text (`prompts_of_trace`, a request of token ids); `turns` and `answers` then only give
            their number.
        tools: functions that may be called, as in OpenAI's API.
        after: what follows the only turn before the answer: calls of tools and their results.
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
    tools: tuple[Mapping[str, Any], ...] = ()
    after: tuple[Message, ...] = ()

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
    return window(path, _strictly(Path(path)), limit)


def _strictly(path: Path) -> Iterator[Prompt]:
    """The prompts of a file, in which every row has one."""
    for place, row in rows_of(path):
        if isinstance(row, NoPrompt):
            raise bad_prompt(f"{path} {place}", str(row)) from row
        yield prompt_of(row, place.replace(" ", "-"), f"{path} {place}")


def window(source: str | Path, prompts: Iterable[Prompt], limit: int | None) -> list[Prompt]:
    """The prompts of a source that were asked for; no further ones are read.

    Raises:
        DraftwellError: there are none, or two with the same id.
    """
    check_limit(limit)
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


def check_limit(limit: int | None) -> None:
    """Refuse to read no prompts."""
    if limit is not None and limit < 1:
        raise DraftwellError(
            f"the number of prompts must be at least 1, not {limit}", code="bad_limit"
        )


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
    user = {"role": "user", "content": prompt.prompt}
    return pair.encode_messages([*prompt.messages, user, *prompt.after], prompt.tools)


def context_of(prompt: Prompt) -> list[Any]:
    """All that a first answer depends on, as plain JSON: the first turn, the messages before and
    after it, and the tools."""
    further = {"after": prompt.after, "tools": prompt.tools}
    asked = {name: list(value) for name, value in further.items() if value}
    parts = [prompt.prompt, *prompt.messages, *(["raw"] if prompt.raw else [])]
    return [*parts, asked] if asked else parts


def prompts_digest(prompts: Sequence[Prompt]) -> str:
    """sha256 over ids, first turns and the messages before these, in order."""
    return hashlib.sha256(
        json.dumps([[p.id, *context_of(p)] for p in prompts]).encode()
    ).hexdigest()


def several_turns(prompts: Sequence[Prompt]) -> int:
    """How many prompts have more than one turn."""
    return sum(len(prompt.turns) > 1 for prompt in prompts)


def bad_prompt(where: str, what: str) -> DraftwellError:
    """What is wrong with a row, in one line."""
    return DraftwellError(f"{where}: {what}", code="bad_prompt")


def prompt_of(row: Mapping[str, Any], name: str, where: str) -> Prompt:
    """The one prompt of a row.

    Args:
        name: id of a row that has none.
        where: the row, for the error.
    """
    try:
        found = prompts_of_row(row, name)
    except NoPrompt as error:
        raise bad_prompt(where, str(error)) from error
    if len(found) > 1:
        raise bad_prompt(where, "it holds several prompts: write one in a row")
    return found[0]


def prompts_of_row(row: Mapping[str, Any], name: str, **layout: Any) -> list[Prompt]:
    """The prompts of a row of any known layout; most have one.

    Args:
        name: id of a row that has none.
        layout: of `normal_rows`.
    Raises:
        NoPrompt: what is wrong with it.
    """
    found = [_prompt(one, name) for one in normal_rows(row, **layout)]
    if len(found) > 1:
        return [replace(prompt, id=f"{prompt.id}.{i}") for i, prompt in enumerate(found)]
    return found


def _prompt(row: Mapping[str, Any], name: str) -> Prompt:
    """The prompt of a row in its normal form."""
    answers = row.get("responses")
    texts = isinstance(answers, list) and all(isinstance(answer, str) for answer in answers)
    recorded = tuple(answers) if isinstance(answers, list) and texts else ()
    before, after, tokens = tuple[Message, ...](), tuple[Message, ...](), row.get("tokens")
    if (said := row.get("messages")) is not None:
        before, turns, after, recorded = conversation(said)
    elif tokens is not None:
        turns = [""]
    else:
        turns = [row["turns"]] if isinstance(row["turns"], str) else row["turns"]
    if not isinstance(turns, list) or not all(isinstance(turn, str) for turn in turns):
        raise NoPrompt(
            "`prompt` must be a string, `turns` a list of strings and `messages` a list of "
            "roles and contents"
        )
    if tokens is None and not (turns and all(turn.strip() for turn in turns)):
        raise NoPrompt(EMPTY)
    if any(turn.startswith(PLACEHOLDER) for turn in turns):
        raise NoPrompt(
            "SPEED-Bench's placeholder for a text of another data set: run specdec_bench's "
            "prepare_data.py, and name the Parquet file that it writes"
        )
    reference = _reference(row.get("reference"))
    fields = {key: row[key] for key in row if key not in KNOWN}
    raw = row.get("raw") is True
    if raw and (before or len(turns) > 1 or said):
        raise NoPrompt("`raw` needs a `prompt` or a single turn, not a conversation: leave it out")
    if (problem := wrong_field(fields)) is not None:
        raise NoPrompt(problem)
    system = row.get("system")
    if system and not raw and not any(message["role"] == "system" for message in before):
        before = ({"role": "system", "content": text_of_all(system)}, *before)
    found = Prompt(
        _text(row, *IDS) or name,
        _text(row, *TASKS),
        turns,
        recorded[0] if reference is None and recorded else reference,
        before,
        recorded,
        fields,
        raw,
        (tuple(tokens),) if tokens is not None else (),
        tuple(tools_of(row.get("tools"))) if not raw and tokens is None else (),
        after,
    )
    refuse_broken_text(found)
    return found


def refuse_broken_text(prompt: Prompt) -> None:
    """Refuse half characters, which no tokenizer takes and no file can hold.

    Raises:
        NoPrompt: it has some.
    """
    said: list[Any] = [prompt.id, prompt.task, prompt.turns, prompt.answers, prompt.reference]
    said += [prompt.messages, prompt.after, prompt.tools, prompt.fields]
    try:
        json.dumps(said, ensure_ascii=False, default=str).encode()
    except UnicodeEncodeError as error:
        code = ord(error.object[error.start])
        if 0xDC80 <= code <= 0xDCFF:
            raise NoPrompt("not UTF-8: save it as UTF-8") from error
        raise NoPrompt(f"half a surrogate pair (U+{code:04X})") from error


def conversation(
    recorded: Sequence[Any],
) -> tuple[tuple[Message, ...], list[str], tuple[Message, ...], tuple[str, ...]]:
    """Messages before the first turn, the user's turns, what follows the last one before its
    answer (calls of tools and their results), and the recorded answers to them.

    Messages that end with a user's, with a tool's result, or with an assistant's empty one after
    another of its, are a request: the last user's is its
    only turn. Messages that end with an answer are a recording: every user's message is a turn if
    users and assistant alternate after a system message, otherwise only the last one is.

    Args:
        recorded: as in `plain_messages`.
    """
    messages = plain_messages(recorded)
    users = [i for i, message in enumerate(messages) if message["role"] == "user"]
    if not users:
        raise NoPrompt("none of its messages is a user's: write one with the role user")
    roles = [message["role"] for message in messages[users[0] :]]
    calls = any("tool_calls" in message for message in messages[users[0] :])
    if roles == ["user", "assistant"] * (len(roles) // 2) and not calls:
        contents = [message["content"] for message in messages[users[0] :]]
        return tuple(messages[: users[0]]), contents[::2], (), tuple(contents[1::2])
    last = users[-1]
    following, answers = messages[last + 1 :], tuple[str, ...]()
    if following and following[-1]["role"] == "assistant":
        *following, answer = following
        said = answer["content"] and "tool_calls" not in answer
        answers = (answer["content"],) if said else ()
    return tuple(messages[:last]), [messages[last]["content"]], tuple(following), answers


def text_of_all(said: Any) -> str:
    """A system's text, alone or in parts."""
    return "\n".join(text_of(part) for part in (said if isinstance(said, list) else [said]))


def _text(row: Mapping[str, Any], *keys: str) -> str | None:
    return next((str(row[key]) for key in keys if row.get(key) is not None), None)


def _reference(value: Any) -> str | None:
    """A string as it is; the first of a list (an answer for each turn)."""
    if isinstance(value, list):
        value = value[0] if value else None
    return None if value is None else str(value)
