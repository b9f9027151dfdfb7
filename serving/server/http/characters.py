"""Texts that tokenizers can encode."""

from __future__ import annotations

import json
from typing import TypeVar

from pydantic_core import PydanticCustomError

V = TypeVar("V")


def whole_characters(text: str) -> str:
    """Refuse lone surrogates: JSON can write them, tokenizers cannot encode them."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise PydanticCustomError(
            "not_unicode", "the text contains a lone surrogate, which is not a character"
        ) from error
    return text


def whole_values(value: V) -> V:
    """The same of a JSON value's texts, and refuse one that cannot be written: nested too deeply,
    or with what is no number in JSON."""
    try:
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
    except UnicodeEncodeError as error:
        raise PydanticCustomError(
            "not_unicode", "it contains a lone surrogate, which is not a character"
        ) from error
    except ValueError as error:
        raise PydanticCustomError(
            "not_finite", "it contains NaN or an infinite number, which JSON does not have"
        ) from error
    except RecursionError as error:
        raise PydanticCustomError("nested", "it is nested too deeply") from error
    return value
