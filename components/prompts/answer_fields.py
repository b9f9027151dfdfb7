"""Checks the fields that answers are graded by when prompts are read: a wrong type found after a
bench would cost all its results."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, StrictFloat, StrictInt, StrictStr, ValidationError

KEYS = ("answer_key", "answerKey", "answer")
"""Fields that may hold the letter of the right choice, in this order."""
Texts = list[StrictStr | StrictInt | StrictFloat]


class UnitTest(BaseModel):
    """HumanEval's."""

    test: StrictStr
    entry_point: StrictStr


class Assertions(BaseModel):
    """MBPP's."""

    test_list: list[StrictStr]
    test_setup_code: StrictStr | None = None


class ChoiceTexts(BaseModel):
    """Those of CommonsenseQA on the hub."""

    text: Texts


class Choices(BaseModel):
    """CommonsenseQA's and AQuA's, which answers are graded by where a letter names the right
    one."""

    choices: Texts | ChoiceTexts | None = None
    options: Texts | ChoiceTexts | None = None


def wrong_field(fields: Mapping[str, Any]) -> str | None:
    """What is wrong with the fields by which an answer would be graded, and how to fix it; None
    where nothing is.

    A field that no checker would read may be anything: in other tables its name means something
    else.

    >>> wrong_field({"test_list": "assert f(1)"})
    'its `test_list` grades no answer (Input should be a valid list): correct or remove it'
    >>> (
    ...     wrong_field({"choices": 5}),
    ...     wrong_field({"choices": ["bank", "library"], "answer_key": "B"}),
    ... )
    (None, None)
    """
    key = next((fields[name] for name in KEYS if fields.get(name)), None)
    read: type[BaseModel]
    if fields.get("test") and fields.get("entry_point"):
        read = UnitTest
    elif fields.get("test_list"):
        read = Assertions
    elif isinstance(key, str) and re.fullmatch(r"\s*[A-Za-z]\s*", key):
        read = Choices
    else:
        return None
    try:
        read.model_validate({name: value or None for name, value in fields.items()})
    except ValidationError as error:
        first = error.errors()[0]
        return f"its `{first['loc'][0]}` grades no answer ({first['msg']}): correct or remove it"
    return None
