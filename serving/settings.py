"""What all settings have in common: frozen, strict, and a mistake is one line with a code."""

from __future__ import annotations

from typing import Any, ClassVar, Self

from pydantic import (
    BaseModel,
    ConfigDict,
    ModelWrapValidatorHandler,
    ValidationError,
    model_validator,
)

from draftwell.serving.errors import DraftwellError


class Settings(BaseModel):
    """Settings that an entry point builds and passes on. Subclasses name themselves for the error.

    Raises:
        DraftwellError: a value out of bounds, of another type, or an unknown name (`error_code`).
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    called: ClassVar[str] = "setting"
    error_code: ClassVar[str] = "bad_settings"

    @model_validator(mode="wrap")
    @classmethod
    def _refuse_in_one_line(cls, values: Any, handler: ModelWrapValidatorHandler[Self]) -> Self:
        try:
            return handler(values)
        except ValidationError as error:
            first = error.errors()[0]
            name = ".".join(map(str, first["loc"]))
            raise DraftwellError(
                f"{cls.called} {name}: {first['msg']}, not {first['input']!r}", code=cls.error_code
            ) from error


def refuse_empty(command: Any, context: Any, args: list[str]) -> None:
    """Refuse an empty text for an option, or an argument, of a command (of Typer) that is not so by
    default. A shell writes one for a variable that is not set, and as a path it is the working
    folder.

    Raises:
        DraftwellError: it names the option (`empty_option`).
    """
    written = command.make_parser(context).parse_args(list(args))[0]
    for one in command.params:
        found = written.get(one.name)
        if one.default != "" and (found == "" or (isinstance(found, list) and "" in found)):
            name = one.opts[0] if one.opts[0].startswith("-") else one.name.upper()
            raise DraftwellError(
                f"{name} is empty: write a value, or leave it out", code="empty_option"
            )


def read_threads(value: Any) -> Any:
    """A number of compute threads as options are written: `auto` is None, digits are an int;
    anything else is left for others to refuse."""
    if value == "auto":
        return None
    return int(value) if isinstance(value, str) and value.isdecimal() else value
