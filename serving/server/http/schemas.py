"""Requests in OpenAI's shape, with vLLM's further sampling fields and one extension: `speculation`.

Fields that cannot change the answer are ignored. Unsupported fields that would change it are
refused unless they hold the value that means "off", which is vLLM's default too. Unknown fields are
refused too, so that a mistyped `temperature` is noticed. Everything is bounded: the cost of a
request is known before any work is done for it.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Self

from pydantic import Field, model_validator

from draftwell.serving.server.http.calling import Calling, Choice
from draftwell.serving.server.http.fields import Text, Tokens, contradiction
from draftwell.serving.server.http.generation import MOST_CHOICES, Generation
from draftwell.serving.server.http.messages import Messages
from draftwell.serving.server.http.tools import Tool, ToolChoice, Tools


class CompletionRequest(Generation):
    """Body of `POST /v1/completions`."""

    prompt: (
        Text
        | Tokens
        | Annotated[list[Text | Tokens], Field(max_length=MOST_CHOICES, fail_fast=True)]
    ) = Field(description="text or token ids, or a list of them")
    max_tokens: int | None = Field(
        None, ge=0, description="most tokens to generate; default: 16; 0 only with echo"
    )
    logprobs: int | None = Field(
        None,
        ge=0,
        le=20,
        description=(
            "the log-prob of every token, and this many of the most likely tokens at its position"
        ),
    )
    echo: bool | None = Field(
        None, description="begin the answer with the prompt, and its log-probs if requested"
    )

    OFF: ClassVar[dict[str, tuple[Any, ...]]] = Generation.OFF | {
        "suffix": ("",),
        "add_special_tokens": (True,),
    }

    @model_validator(mode="after")
    def check_budget(self) -> Self:
        if self.max_tokens == 0 and not self.echo:
            raise contradiction("max_tokens", "must be at least 1, or 0 together with echo")
        return self

    @property
    def alternatives(self) -> int | None:
        return self.logprobs

    @property
    def prompts(self) -> list[str | list[int]]:
        """The prompts, one or several."""
        if isinstance(self.prompt, str) or not self.prompt or isinstance(self.prompt[0], int):
            return [self.prompt]  # type: ignore[list-item]
        return self.prompt


class ChatRequest(Calling, Messages):
    """Body of `POST /v1/chat/completions`."""

    max_completion_tokens: int | None = Field(
        None, ge=1, description="as max_tokens, and overrides it"
    )
    logprobs: bool | None = Field(None, description="report the log-prob of every token")
    top_logprobs: int | None = Field(
        None,
        ge=0,
        le=20,
        description="report this many of the most likely tokens at each position; needs logprobs",
    )

    OFF: ClassVar[dict[str, tuple[Any, ...]]] = Generation.OFF | {
        "functions": ([],),
        "function_call": ("none", "auto"),
        "modalities": (["text"],),
        "audio": (),
        "verbosity": ("medium",),
        "web_search_options": (),
        "echo": (False,),
        "add_special_tokens": (False,),
    }

    tools: Tools | None = Field(None, description="functions that the answer may call")
    tool_choice: ToolChoice | None = Field(
        None,
        description=(
            "auto, the default: the model decides whether to call; required: it calls some; a "
            "function: that one; none"
        ),
    )

    @model_validator(mode="after")
    def check_logprobs(self) -> Self:
        if self.top_logprobs and not self.logprobs:
            raise contradiction("top_logprobs", "needs logprobs: true")
        return self

    @property
    def functions(self) -> list[Tool]:
        return self.tools or []

    @property
    def choice(self) -> Choice:
        return (
            self.tool_choice
            if self.tool_choice is None or isinstance(self.tool_choice, str)
            else self.tool_choice.function
        )

    @property
    def template_options(self) -> dict[str, Any]:
        return super().template_options | self.tool_options

    @property
    def token_limit(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens

    @property
    def alternatives(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None
