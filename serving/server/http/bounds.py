"""Bounds on what a request holds in all, checked before any of it becomes an object: nobody else is
served meanwhile."""

from __future__ import annotations

from typing import Any

from pydantic_core import PydanticCustomError

MOST_PARTS = 4096
"""Parts of texts and calls of all messages together."""
MOST_VALUES = 70_000
"""Values within a JSON value of any shape, such as a schema; those of all tools together. More than
the longest definition of a grammar has room for."""


def few_parts(messages: Any) -> Any:
    """Refuse messages that have too many parts and calls together."""
    found = messages if isinstance(messages, list) else []
    parts = sum(
        len(value)
        for one in found
        if isinstance(one, dict)
        for key in ("content", "output", "tool_calls")
        if isinstance(value := one.get(key), list)
    )
    if parts > MOST_PARTS:
        raise PydanticCustomError(
            "too_many_parts",
            "the messages have {parts} parts and calls together, at most {most} are read: join "
            "some parts",
            {"parts": parts, "most": MOST_PARTS},
        )
    return messages


def few_values(value: Any) -> Any:
    """Refuse a JSON value that holds too many others."""
    left, seen = [value], 0
    while left and seen <= MOST_VALUES:
        one = left.pop()
        inner = one.values() if isinstance(one, dict) else one if isinstance(one, list) else ()
        seen += len(inner)
        if seen <= MOST_VALUES:
            left += inner
    if seen > MOST_VALUES:
        raise PydanticCustomError(
            "too_many_values",
            "it holds more than {most} values: send a smaller one",
            {"most": MOST_VALUES},
        )
    return value
