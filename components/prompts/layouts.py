"""Rows of other people's files and logs, brought into one form: `turns`, `messages` or `tokens`,
with `tools`, `system` and `raw`, and the row's other keys.

Known are OpenAI's request bodies (chat, completions, responses) alone, in batch input files and in
logs of LiteLLM and Langfuse; ShareGPT and its kin; Alpaca; and columns of texts.
"""

from __future__ import annotations

import ast
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from draftwell.components.prompts.messages import EMPTY, NoPrompt, parsed

CONVERSATIONS = ("messages", "conversations", "conversation")
TEXTS = ("instruction", "question", "problem", "query", "text")
KEYS = ("turns", "prompt", *CONVERSATIONS, *TEXTS, "input")
"""Keys or columns that may hold a prompt, in this order; `instruction` is followed by the row's
`input` or `context`."""
BODIES = ("body", "proxy_server_request", "request", "request_body", "kwargs")
"""Keys under which logs keep the body of a request (batch files, LiteLLM, tracers of functions)."""
SAMPLING = frozenset({"max_tokens", "temperature", "top_p", "n", "stream", "stop", "logprobs"})
"""Beside `model`, keys that tell a completion request from a row of a data set."""
OPTIONS = ("model_parameters", "optional_params", "modelParameters")
"""Where logs keep a request's tools."""
MODEL_CALL, TRACED = "GENERATION", ("traceId", "trace_id")
"""Langfuse's type of an observation that is a request to a model, and what observations name."""
SYSTEM = ("system", "system_prompt", "instructions")
UNKNOWN = "it has no"
"""How the reason begins where a row has none of the keys."""
NO_TEXT = re.compile(r"embed|image|audio|speech|transcri|moderation|rerank", re.IGNORECASE)
LOOKS_RECORDED = re.compile(r"""\s*[\[{]\s*\{?\s*['"](role|from|content|value|messages)['"]\s*:""")
PLAIN = (str, int, float, bool, list, dict, type(None))
Row = Mapping[str, Any]


def normal_rows(
    row: Row, *, column: str | None = None, cells: bool = False, bodies: bool = False
) -> Iterator[dict[str, Any]]:
    """The prompts of a row in one form, each with exactly one of `turns`, `messages` and `tokens`.

    Args:
        column: that holds the prompt; None takes the first of `KEYS`.
        cells: of a table: a text that is JSON is a conversation or refused, never a prompt.
        bodies: rows are bodies of requests: a `prompt` goes to the model as it is.
    Raises:
        NoPrompt: it holds none.
    """
    if isinstance(parts := parsed(row.get("observations")), list) and parts:
        calls = [one for one in parts if isinstance(one, Mapping) and one.get("type") == MODEL_CALL]
        for one in calls:
            yield from normal_rows(one)
        if calls:
            return
    row, key = located(row, column)
    bodies = bodies or ("model" in row and not row.keys().isdisjoint(SAMPLING))
    content = row[key]
    if key in (*CONVERSATIONS, "input") or (cells and not raw(row, key, bodies)):
        content = decoded(content, key, cells=cells)
    common = {**others(row, key), "tools": tools_beside(row), "system": system_of(row, key)}
    if isinstance(content, Mapping):  # of lists, as `datasets` keeps a list of objects
        lists = all_are(list(content.values()), list)
        columns = zip(*content.values(), strict=False) if lists else [content.values()]
        content = [dict(zip(content, values, strict=False)) for values in columns]
    if isinstance(content, list) and len(content) == 1 and isinstance(content[0], list):
        content = content[0]  # a batch of one, as LangChain logs it
    if not isinstance(content, list | tuple):
        yield {**common, "turns": with_input(content, row, key), "raw": raw(row, key, bodies)}
    elif all_are(content, Mapping):
        yield {**common, "messages": list(content), "raw": row.get("raw")}
    elif all_are(content, int):
        yield {**common, "tokens": list(content)}
    elif all_are(content, list) and all(all_are(tokens, int) for tokens in content):
        yield from ({**common, "tokens": tokens} for tokens in content)
    elif key == "prompt" and bodies:
        yield from ({**common, "turns": [text], "raw": True} for text in content)
    else:
        yield {**common, "turns": list(content), "raw": raw(row, key, bodies)}


def located(row: Row, column: str | None) -> tuple[Row, str]:
    """The part of a row that holds the prompt, and under which key."""
    if column is not None:
        if column not in row:
            raise NoPrompt(f"{UNKNOWN} column {column} (keys: {named(row)})")
        return row, column
    refuse_other_requests(row)
    held = [key for key in KEYS if row.get(key) is not None and readable(row[key], key)]
    full = [key for key in held if row[key] not in ("", "{}", "[]", {}, [])]
    for key in () if full else BODIES:
        if isinstance(body := parsed(row.get(key)), Mapping) and body:
            return located({**ids_in(row), **body}, None)
    if not held:
        if isinstance(row.get("response"), Mapping) and "custom_id" in row:
            raise NoPrompt("the answer of a batch, without its request: give the batch's input")
        raise NoPrompt(f"{UNKNOWN} {' or '.join(KEYS)} (keys: {named(row)})")
    if not full:
        raise NoPrompt(EMPTY)
    key = full[0]
    within = parsed(row[key])
    if not isinstance(within, Mapping) or not within.keys().isdisjoint(("role", "from")):
        return row, key
    if within is not row[key] and within.keys().isdisjoint(("messages", "kwargs", "input")):
        return row, key  # a text that happens to be JSON
    return located({**tools_in(row), **ids_in(row), **within}, None)


def refuse_other_requests(row: Row) -> None:
    """Refuse a logged row that is no request for text.

    Raises:
        NoPrompt: an embedding, an image, a span of a trace.
    """
    kind = row.get("type")
    if isinstance(kind, str) and kind.upper() != MODEL_CALL and not row.keys().isdisjoint(TRACED):
        raise NoPrompt(f"an observation of type {kind}, which is no request to a model")
    told = ["call_type"]
    if row.keys() & {*BODIES, "method"}:  # else where a text was found
        told += ["url", "endpoint"]
    if not row.keys() & {"prompt", *CONVERSATIONS}:  # else models may have any name
        told += ["model"]
    for value in map(row.get, told):
        if isinstance(value, str) and NO_TEXT.search(value):
            raise NoPrompt(f"a request to {value}, which writes no text")


def readable(value: Any, key: str) -> bool:
    """Whether a value can hold a prompt: Responses' `prompt` names a stored one."""
    return not (key == "prompt" and isinstance(value, Mapping) and "id" in value)


def decoded(value: Any, key: str, *, cells: bool) -> Any:
    """A conversation that a text holds as JSON, or as pandas writes a list; else the value."""
    if not isinstance(value, str) or value.lstrip()[:1] not in ("[", "{"):
        return value
    found = parsed(value)
    if isinstance(found, str):
        try:
            found = literal(value.strip())
        except (ValueError, SyntaxError, RecursionError, MemoryError):
            found = value
    first = found[0] if isinstance(found, list) and found else None
    if isinstance(first, Mapping) and not first.keys().isdisjoint(("role", "from", "type")):
        return found
    if cells and isinstance(first, str | int | list):
        return found
    if LOOKS_RECORDED.match(value) or key in CONVERSATIONS or (cells and found != value):
        raise NoPrompt(f"its `{key}` is no conversation in JSON: write it as JSON")
    return value


def literal(text: str) -> Any:
    """What a text says as a literal of Python, without a warning about escapes like `\\d`.

    Raises:
        ValueError, SyntaxError, RecursionError, MemoryError: it is none.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return ast.literal_eval(text)


def with_input(text: Any, row: Row, key: str) -> Any:
    """An instruction with what it is about (Alpaca's `input`, Dolly's `context`)."""
    about = row.get("input") or row.get("context") if key == "instruction" else None
    if isinstance(text, str) and text.strip() and isinstance(about, str) and about.strip():
        return f"{text}\n\n{about}"
    return text


def raw(row: Row, key: str, bodies: bool) -> Any:
    """Whether a text goes to the model without a chat template: a completion's does."""
    return row.get("raw") if "raw" in row else bodies and key == "prompt"


def system_of(row: Row, key: str) -> Any:
    """What the system says beside the prompt: Anthropic's, LLaMA-Factory's or Responses'."""
    names = SYSTEM if key == "input" else SYSTEM[:2]
    return next((row[name] for name in names if row.get(name)), None)


def tools_beside(row: Row) -> Any:
    """The functions that may be called, where the request lets them."""
    found = tools_in(row)
    return None if found.get("tool_choice") == "none" else found.get("tools")


def tools_in(row: Row) -> dict[str, Any]:
    """`tools` and `tool_choice` of a row, or of the parameters that a log keeps apart."""
    for place in (row, *(parsed(row.get(name)) for name in OPTIONS)):
        if isinstance(place, Mapping) and (tools := place.get("tools") or place.get("functions")):
            return {"tools": tools, "tool_choice": place.get("tool_choice")}
    return {}


def ids_in(row: Row) -> dict[str, Any]:
    """The id of a row whose prompt is further within."""
    name = next((row[key] for key in ("custom_id", "id", "request_id") if row.get(key)), None)
    return {} if name is None else {"id": name}


def others(row: Row, key: str) -> dict[str, Any]:
    """A row's other keys, which answers may be graded by."""
    read = {key, "tools", "tool_choice", "functions", "raw", "tokens", "turns", "prompt"}
    read |= set(CONVERSATIONS)
    if system_of(row, key) is not None:
        read |= set(SYSTEM)
    return {k: v for k, v in row.items() if k not in read and isinstance(v, PLAIN)}


def all_are(values: Sequence[Any], kind: type) -> bool:
    """Whether there are values, all of a kind."""
    return bool(values) and all(
        isinstance(one, kind) and not isinstance(one, bool) for one in values
    )


def named(row: Row) -> str:
    """A row's keys, for a line."""
    keys = [str(key) for key in row]
    return ", ".join(keys[:20]) + (", …" if len(keys) > 20 else "") if keys else "none"
