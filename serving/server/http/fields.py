"""Fields that requests have in common: their types, the bounds of these, and what is made of fields
that this server lacks."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    StringConstraints,
    model_validator,
)
from pydantic_core import PydanticCustomError

from draftwell.serving.server.http.characters import whole_characters

IGNORED = frozenset(
    {
        "user",
        "metadata",
        "store",
        "service_tier",
        "safety_identifier",
        "prompt_cache_key",
        "prompt_cache_retention",
        "parallel_tool_calls",
        "reasoning_effort",
        "reasoning",
        "max_tool_calls",
        "request_id",
        "include_reasoning",
        "guided_decoding_backend",
        "session_id",
        "stream_interval",
        "truncation_side",
        "media_io_kwargs",
        "mm_payload",
    }
)
"""Fields about billing, logging, caching, order and speed, and about reasoning, images and cuts of
prompts that this server lacks. They change no answer."""

LONGEST_TEXT = 500_000
"""Characters of one prompt or message; encoding more takes seconds, and no context holds it."""
LONGEST_TOKENS = 131_072

Name = Annotated[str, StringConstraints(max_length=256)]
Label = Annotated[str, StringConstraints(max_length=256), AfterValidator(whole_characters)]
"""A name that a chat template may write."""
Text = Annotated[str, StringConstraints(max_length=LONGEST_TEXT), AfterValidator(whole_characters)]
StopString = Annotated[
    str, StringConstraints(min_length=1, max_length=256), AfterValidator(whole_characters)
]
TokenId = Annotated[int, Field(ge=0, lt=2**31)]
Tokens = Annotated[list[TokenId], Field(max_length=LONGEST_TOKENS, fail_fast=True)]
TokenKey = Annotated[str, StringConstraints(pattern=r"^[0-9]{1,9}$")]


def contradiction(param: str, message: str) -> PydanticCustomError:
    """The error of a field that contradicts another one."""
    return PydanticCustomError("contradiction", message, {"param": param})


class OpenAIFields(BaseModel):
    """Base that handles OpenAI's other fields: `OFF` names those that are refused, with the values
    that mean "off"."""

    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False)

    OFF: ClassVar[dict[str, tuple[Any, ...]]] = {}

    @model_validator(mode="after")
    def refuse_what_we_cannot_do(self) -> Self:
        for name, value in (self.__pydantic_extra__ or {}).items():
            if value is None or name in IGNORED:
                continue
            if name not in self.OFF:
                raise PydanticCustomError(
                    "unknown_field", "unrecognized request argument: {param}", {"param": name}
                )
            if value not in self.OFF[name]:
                raise PydanticCustomError(
                    "unsupported_field",
                    "this server does not support {param}: leave it out",
                    {"param": name},
                )
        return self
