"""Checks the fields that answers are graded by when prompts are read: a wrong type found after a
bench would cost all its results."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

KEYS = ("answer_key", "answerKey", "answer")
"""Fields that may hold the letter of the right choice, in this order."""


def wrong_field(fields: Mapping[str, Any]) -> str | None:
    """What is wrong with the fields by which an answer would be graded, and how to fix it; None
    where nothing is.

    A field that no checker would read may be anything: in other tables its name means something
    else.

    >>> wrong_field({"test_list": "assert f(1)"})
    'its `test_list` must be a list of assertions, each a text: correct or remove it'
    >>> (
    ...     wrong_field({"choices": 5}),
    ...     wrong_field({"choices": ["bank", "library"], "answer_key": "B"}),
    ... )
    (None, None)
    """
    if fields.get("test") and fields.get("entry_point"):
        wrong = next(
            (
                f"`{name}` must be text"
                for name in ("test", "entry_point")
                if not isinstance(fields[name], str)
            ),
            None,
        )
    elif fields.get("test_list"):
        wrong = (
            None
            if is_list_of(str, fields["test_list"])
            else "`test_list` must be a list of assertions, each a text"
        )
        if wrong is None and not isinstance(fields.get("test_setup_code") or "", str):
            wrong = "`test_setup_code` must be text"
    else:
        wrong = wrong_choices(fields)
    return None if wrong is None else f"its {wrong}: correct or remove it"


def wrong_choices(fields: Mapping[str, Any]) -> str | None:
    """As `wrong_field`, for `choices` or `options` with the letter of the right one."""
    name = "choices" if fields.get("choices") else "options"
    key = next((fields[known] for known in KEYS if fields.get(known)), None)
    if not fields.get(name) or not (isinstance(key, str) and re.fullmatch(r"\s*[A-Za-z]\s*", key)):
        return None
    found = fields[name].get("text") if isinstance(fields[name], Mapping) else fields[name]
    return (
        None
        if is_list_of(str | int | float, found)
        else f'`{name}` must be a list of texts, or {{"text": [...]}}'
    )


def is_list_of(kind: Any, values: Any) -> bool:
    """Whether `values` is a list whose items are all of one type."""
    return isinstance(values, list) and all(isinstance(value, kind) for value in values)
