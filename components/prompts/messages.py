"""Messages of other people's logs as chat templates take them: OpenAI's (chat completions and
responses), Anthropic's, ShareGPT's (`from`, `value`) and LangChain's."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

Message = dict[str, Any]
"""`role` (system, user, assistant, tool) and `content`; `tool_calls` of an assistant, whose
`arguments` are an object where they are one."""

ROLES = {
    **dict.fromkeys(("user", "human", "prompter"), "user"),
    **dict.fromkeys(("assistant", "gpt", "ai", "model", "chatgpt", "bot", "bing"), "assistant"),
    **dict.fromkeys(("system", "developer"), "system"),
    **dict.fromkeys(("tool", "function", "observation", "tool_response"), "tool"),
    **dict.fromkeys(("function_call", "tool_call"), "function_call"),
}
"""Names of roles in logs → those of chat templates; `function_call` becomes an assistant's."""
TEXTS = frozenset({"text", "input_text", "output_text", "refusal"})
THOUGHTS = frozenset({"reasoning", "thinking", "redacted_thinking"})
"""Types of what another model thought: no template has a place for it."""
NO_PARAMETERS = {"type": "object", "properties": {}}
EMPTY = "its prompt is empty: write something or remove it"
PROMPTED = "a message needs a `role` and a `content`, both text, such as "
EXAMPLE = '{"role": "user", "content": "Hello"}'


class NoPrompt(Exception):
    """What is wrong with a row, without its place."""


def plain_messages(recorded: Sequence[Any]) -> list[Message]:
    """Recorded messages in order; one item may give several, calls join the message before.

    Raises:
        NoPrompt: one that is no text, or of no known role.
    """
    found: list[Message] = []
    for one in recorded:
        for message in _plain(one):
            last = found[-1] if found else {}
            calls = message.get("tool_calls")
            if calls and not message["content"] and last.get("role") == "assistant":
                last["tool_calls"] = [*last.get("tool_calls", ()), *calls]
            else:
                found.append(message)
    return found


def _plain(one: Any) -> Iterator[Message]:
    if not isinstance(one, Mapping):
        raise NoPrompt(f"{PROMPTED}{EXAMPLE}")
    kind = type_of(one)
    if kind in THOUGHTS:
        return
    if kind == "function_call_output":
        yield answered(one.get("output"), one.get("call_id"), None)
        return
    given = one.get("role") or one.get("from") or (kind if kind in ROLES else None)
    if not isinstance(given, str):
        raise NoPrompt(
            f"{PROMPTED}{EXAMPLE}" if kind is None else f"items of type {kind} cannot be read"
        )
    if (role := ROLES.get(given.lower())) is None:
        raise NoPrompt(f"the role {given!r} is not one of {', '.join(ROLES)}")
    content = next((one[key] for key in ("content", "value", "text") if one.get(key)), None)
    if content is None:  # an empty text is not the same as none
        content = next((one[key] for key in ("content", "value", "text") if key in one), None)
    if role == "function_call":
        said = one if kind == "function_call" else parsed(content)
        if not isinstance(said, Mapping) or not isinstance(said.get("name"), str):
            raise NoPrompt("a call of a function needs its `name` and `arguments`")
        yield {"role": "assistant", "content": "", "tool_calls": [call_of(said)]}
    elif role == "tool":
        yield answered(content, one.get("tool_call_id"), one.get("name"))
    else:
        yield from _said(role, content, one)


def _said(role: str, content: Any, one: Mapping[str, Any]) -> Iterator[Message]:
    """What a system, a user or an assistant said, after the results it brings (Anthropic's)."""
    parts = content if isinstance(content, list) else [content or ""]
    if content is None and role != "assistant":
        raise NoPrompt(f"{PROMPTED}{EXAMPLE}")
    made = one.get("tool_calls") or []
    calls = [call_of(call) for call in (made if isinstance(made, list) else [made])]
    if one.get("function_call"):
        calls.append(call_of(one["function_call"]))
    texts: list[str] = []
    for part in parts:
        kind = type_of(part)
        if not isinstance(part, Mapping):
            texts.append(text_of(part))
        elif kind == "tool_use":
            calls.append(call_of({**part, "arguments": part.get("input")}))
        elif kind == "tool_result":
            yield answered(part.get("content"), part.get("tool_use_id"), None)
        elif kind not in THOUGHTS:
            texts.append(text_of(part))
    results = isinstance(content, list) and not texts and not calls
    if results and role == "user" and content:
        return
    said: Message = {"role": role, "content": "\n".join(texts)}
    if calls and role == "assistant":
        said["tool_calls"] = calls
    if role == "assistant" and isinstance(
        thought := one.get("reasoning") or one.get("reasoning_content"), str
    ):
        said |= {"reasoning": thought, "reasoning_content": thought}
    yield said


def type_of(part: Any) -> str | None:
    """What a part of a message says that it is."""
    kind = part.get("type") if isinstance(part, Mapping) else None
    return kind if isinstance(kind, str) else None


def text_of(part: Any) -> str:
    """The text of a part of a message."""
    if isinstance(part, str):
        return part
    kind = type_of(part)
    if isinstance(part, Mapping) and (kind is None or kind in TEXTS):
        text = part.get("text", part.get("refusal"))
        if isinstance(text, str):
            return text
    if kind is None or kind in TEXTS:
        raise NoPrompt(f"{PROMPTED}{EXAMPLE}")
    raise NoPrompt(f"it has a part of type {kind}: only text can be read")


def answered(content: Any, call: Any, name: Any) -> Message:
    """A tool's result; what is no text stands in it as JSON."""
    if isinstance(content, list):
        content = "\n".join(text_of(part) for part in content)
    if not isinstance(content, str):
        content = "" if content is None else json.dumps(content, ensure_ascii=False)
    named = {"tool_call_id": call, "name": name}
    return {
        "role": "tool",
        "content": content,
        **{key: value for key, value in named.items() if isinstance(value, str) and value},
    }


def call_of(recorded: Any) -> dict[str, Any]:
    """A call as chat templates take it."""
    call = recorded if isinstance(recorded, Mapping) else {}
    function = inner if isinstance(inner := call.get("function"), Mapping) else call
    name = function.get("name")
    if not isinstance(name, str):
        raise NoPrompt("a call of a function needs its `name` and `arguments`")
    arguments = function.get("arguments")
    if isinstance(arguments, str) and isinstance(read := parsed(arguments), Mapping):
        arguments = read
    return {
        "id": str(call.get("id") or call.get("call_id") or ""),
        "type": "function",
        "function": {"name": name, "arguments": {} if arguments is None else arguments},
    }


def tools_of(offered: Any) -> list[dict[str, Any]]:
    """Functions that may be called, as in OpenAI's chat completions; tools that a provider runs
    itself are left out, no template knows them.

    Args:
        offered: OpenAI's of either API, Anthropic's, bare functions, or one of these as JSON.
    """
    offered = parsed(offered)
    if not offered:
        return []
    if not isinstance(offered, list) or not all(isinstance(tool, Mapping) for tool in offered):
        raise NoPrompt("its `tools` are no list of functions")
    found = []
    for tool in offered:
        function = inner if isinstance(inner := tool.get("function"), Mapping) else tool
        if isinstance(function.get("name"), str) and tool.get("type") in (
            None,
            "function",
            "custom",
        ):
            about = function.get("description")
            given = function.get("parameters") or function.get("input_schema") or NO_PARAMETERS
            said = {"name": function["name"], **({"description": about} if about else {})}
            found.append({"type": "function", "function": {**said, "parameters": given}})
    return found


def parsed(value: Any) -> Any:
    """What a text says as JSON; any other value, and any other text, as it is."""
    if isinstance(value, str) and value.lstrip()[:1] in ("{", "["):
        try:
            return json.loads(value)
        except (ValueError, RecursionError):
            return value
    return value
