"""Reading YAML and JSON into strict pydantic models, with one line for a person when something is
wrong."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from draftwell.serving import files
from draftwell.serving.errors import DraftwellError, first_wrong


class Strict(BaseModel):
    """A model that refuses unknown keys and does not change once read."""

    model_config = ConfigDict(extra="forbid", frozen=True)


Model = TypeVar("Model", bound=BaseModel)


def validate(model: type[Model], data: Any, where: str) -> Model:
    """`data` as a `model`; the first thing wrong becomes one line that starts with `where`."""
    try:
        return model.model_validate(data)
    except ValidationError as error:
        first = error.errors()[0]
        if first["type"] == "extra_forbidden":
            place = ".".join(map(str, first["loc"]))
            raise DraftwellError(
                f"{where}: unknown key {place}: remove it or correct its name", code="unknown_key"
            ) from error
        raise DraftwellError(f"{where}: {first_wrong(error)}", code="bad_value") from error


def read_text(path: Path, fix: str) -> str:
    """The text of a file, or one line that names it and says how to fix it."""
    try:
        return files.read_text(path)
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "not UTF-8 text"
        raise DraftwellError(
            f"cannot read {path} ({reason}): {fix}", code="unreadable_file"
        ) from error


def read_yaml(path: Path, model: type[Model]) -> Model:
    """A YAML file as a `model`."""
    import yaml

    text = read_text(path, "check the path")
    try:
        data = yaml.load(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # a date of month 13, say
        mark = getattr(error, "problem_mark", None)
        line = f", line {mark.line + 1}" if mark else ""
        raise DraftwellError(
            f"{path}{line} is not valid YAML: correct it there", code="bad_yaml"
        ) from error
    return validate(model, data if data is not None else {}, str(path))


def read_json(path: Path, model: type[Model]) -> Model:
    """A JSON file as a `model`."""
    text = read_text(path, "check the path")
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise DraftwellError(
            f"{path} is not valid JSON: write it again", code="bad_json"
        ) from error
    return validate(model, data, str(path))
