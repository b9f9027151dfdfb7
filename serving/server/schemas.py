"""Requests in OpenAI's shape.

Fields that cannot change the answer are ignored. Fields that would change it and are not supported are refused unless
they hold the value that means "off"; so are fields nobody knows, because a mistyped `temperature` must not go unnoticed.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, StringConstraints, model_validator
from pydantic_core import PydanticCustomError

IGNORED = frozenset({
    "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention",
    "parallel_tool_calls",
})
"""Fields about billing, logging and caching: whatever they hold, the answer is the same."""

SMALLEST_TOP_P = 1e-9
"""What OpenAI's top_p = 0 means: the most likely token alone."""


def whole_characters(text: str) -> str:
    """JSON can spell half a character (a lone surrogate), which no tokenizer takes."""
    if not text.isascii() and any("\ud800" <= c <= "\udfff" for c in text):
        raise PydanticCustomError("not_unicode", "the text holds a lone surrogate, which is no character")
    return text


Text = Annotated[str, AfterValidator(whole_characters)]
StopString = Annotated[Text, StringConstraints(min_length=1, max_length=256)]


class StreamOptions(BaseModel):
    """What else a stream carries."""

    model_config = ConfigDict(strict=True, extra="ignore")

    include_usage: bool | None = Field(None, description="end the stream with a chunk that holds the usage")


class Known(BaseModel):
    """Base that knows OpenAI's other fields: `OFF` names those we refuse, with the values that are fine ("off")."""

    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False)

    OFF: ClassVar[dict[str, tuple[Any, ...]]] = {}

    @model_validator(mode="after")
    def refuse_what_we_cannot_do(self) -> Self:
        for name, value in (self.__pydantic_extra__ or {}).items():
            if value is None or name in IGNORED:
                continue
            if name not in self.OFF:
                raise PydanticCustomError("unknown_field", "unrecognized request argument: {param}", {"param": name})
            if value not in self.OFF[name]:
                raise PydanticCustomError("unsupported_field", "this server does not support {param} yet: leave it out", {"param": name})
        return self


class Generation(Known):
    """What both endpoints share."""

    model: str
    max_tokens: int | None = Field(None, ge=1, description="tokens to generate at most")
    temperature: float | None = Field(None, ge=0, le=2, description="1 by default; 0 takes the most likely token")
    top_p: float | None = Field(None, ge=0, le=1, description="1 by default; sample from the most likely tokens of this mass")
    seed: int | None = Field(None, ge=-(2**63), lt=2**63, description="the same seed gives the same answer; random by default")
    stop: StopString | Annotated[list[StopString], Field(max_length=16)] | None = Field(None, description="strings that end the answer")
    stream: bool | None = Field(None, description="send the answer as it comes, as server-sent events")
    stream_options: StreamOptions | None = None

    OFF: ClassVar[dict[str, tuple[Any, ...]]] = {
        "n": (1,), "top_logprobs": (0,), "presence_penalty": (0,), "frequency_penalty": (0,), "logit_bias": ({},),
    }

    @property
    def token_limit(self) -> int | None:
        return self.max_tokens

    @property
    def stop_strings(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else self.stop or []

    @property
    def wants_usage(self) -> bool:
        """Whether a stream ends with the usage."""
        return bool(self.stream_options and self.stream_options.include_usage)

    def sampling_settings(self) -> dict[str, Any]:
        """Keyword arguments for `Sampling`, with OpenAI's defaults."""
        return {
            "temperature": 1.0 if self.temperature is None else float(self.temperature),
            "top_p": 1.0 if self.top_p is None else max(float(self.top_p), SMALLEST_TOP_P),
        }


class CompletionRequest(Generation):
    """Body of `POST /v1/completions`."""

    prompt: Text | list[int] | list[Text] | list[list[int]] = Field(description="text or token ids; one prompt per request")

    OFF: ClassVar[dict[str, tuple[Any, ...]]] = Generation.OFF | {
        "best_of": (1,), "logprobs": (), "echo": (False,), "suffix": ("",),
    }

    def single_prompt(self) -> str | list[int] | None:
        """The prompt, out of its list if it is alone there; None where there are several."""
        if isinstance(self.prompt, str) or not self.prompt or isinstance(self.prompt[0], int):
            return self.prompt  # type: ignore[return-value]
        return self.prompt[0] if len(self.prompt) == 1 else None


class TextPart(BaseModel):
    """A piece of a message's content."""

    model_config = ConfigDict(strict=True, extra="ignore")

    type: Literal["text"]
    text: Text


class Message(Known):
    """One turn of a conversation."""

    role: Literal["system", "developer", "user", "assistant"]
    content: Text | list[TextPart] | None = None

    # What clients send back of an earlier answer is fine while it is empty. Templates know no names.
    OFF: ClassVar[dict[str, tuple[Any, ...]]] = {
        "tool_calls": ([],), "function_call": (), "audio": (), "refusal": ("",), "annotations": ([],),
    }

    name: str | None = None

    @model_validator(mode="after")
    def check_content(self) -> Self:
        if self.content is None and self.role != "assistant":
            raise PydanticCustomError("no_content", "a {role} message needs content", {"role": self.role})
        return self

    def plain(self) -> dict[str, str]:
        """Role and text, as chat templates take them."""
        role = "system" if self.role == "developer" else self.role
        if isinstance(self.content, list):
            return {"role": role, "content": "".join(part.text for part in self.content)}
        return {"role": role, "content": self.content or ""}


class ChatRequest(Generation):
    """Body of `POST /v1/chat/completions`."""

    messages: list[Message] = Field(min_length=1)
    max_completion_tokens: int | None = Field(None, ge=1, description="as max_tokens; goes first where both are given")

    OFF: ClassVar[dict[str, tuple[Any, ...]]] = Generation.OFF | {
        "logprobs": (False,), "tools": ([],), "tool_choice": ("none", "auto"), "functions": ([],), "function_call": ("none", "auto"),
        "response_format": ({"type": "text"},), "modalities": (["text"],), "audio": (), "prediction": (), "reasoning_effort": ("none",),
        "verbosity": ("medium",), "web_search_options": (),
    }

    @property
    def token_limit(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens
