"""Tools for models whose chat template knows none: told in the system message, in Hermes' words,
with calls and results as plain text."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

INTRODUCTION = """\
You may call functions to answer. These are their signatures, one in a line:
<tools>
{tools}
</tools>
To call a function, write its name and arguments as JSON between tags:
<tool_call>
{{"name": "function", "arguments": {{"argument": "value"}}}}
</tool_call>"""


def told(
    messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]
) -> list[dict[str, str]]:
    """A conversation of roles and texts alone.

    Args:
        messages: `tool_calls` of assistants and the role `tool` become text.
        tools: as in OpenAI's API; none: nothing is said of them.

    >>> told([{"role": "tool", "content": "22 degrees"}], [])
    [{'role': 'user', 'content': '<tool_response>\\n22 degrees\\n</tool_response>'}]
    """
    said = [plain(message) for message in messages]
    if not tools:
        return said
    about = INTRODUCTION.format(
        tools="\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in tools)
    )
    if said and said[0]["role"] == "system":
        return [
            {"role": "system", "content": f"{said[0]['content']}\n\n{about}".strip()},
            *said[1:],
        ]
    return [{"role": "system", "content": about}, *said]


def plain(message: Mapping[str, Any]) -> dict[str, str]:
    """A message as role and text."""
    content = str(message.get("content") or "")
    if message["role"] == "tool":
        return {"role": "user", "content": f"<tool_response>\n{content}\n</tool_response>"}
    calls = [
        json.dumps(
            {"name": call["function"]["name"], "arguments": call["function"]["arguments"]},
            ensure_ascii=False,
        )
        for call in message.get("tool_calls") or ()
    ]
    written = [f"<tool_call>\n{call}\n</tool_call>" for call in calls]
    return {
        "role": str(message["role"]),
        "content": "\n".join([content, *written] if content else written or [content]),
    }


def knows_tools(template: str) -> bool:
    """Whether a chat template has a place for tools."""
    return "tools" in template or "tool_calls" in template
