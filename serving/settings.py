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


def read_threads(value: Any) -> Any:
    """A number of compute threads as options are written: `auto` is None, digits are an int;
    anything else is left for others to refuse."""
    if value == "auto":
        return None
    return int(value) if isinstance(value, str) and value.isdecimal() else value
