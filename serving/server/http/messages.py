"""Conversations as requests hold them, and how they become a prompt."""

from __future__ import annotations

import json
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    JsonValue,
    model_validator,
)
from pydantic_core import PydanticCustomError

from draftwell.serving.server.http.bounds import few_parts, few_values
from draftwell.serving.server.http.characters import whole_values
from draftwell.serving.server.http.fields import Label, Name, OpenAIFields, Text, contradiction
from draftwell.serving.server.http.tools import PastCall

MOST_TEMPLATE_VALUES = 32
MOST_TOOL_CALLS = 256
"""Calls of one message of a conversation."""
LONGEST_VALUE = 65_536
"""Characters of one value for a template, as JSON."""


def short_value(value: Any) -> Any:
    """Refuse a value for a template that is too long."""
    if len(json.dumps(whole_values(value))) > LONGEST_VALUE:
        raise PydanticCustomError(
            "too_long", "it has more than {most} characters", {"most": LONGEST_VALUE}
        )
    return value


TemplateValues = Annotated[
    dict[Name, Annotated[JsonValue, AfterValidator(short_value)]],
    Field(max_length=MOST_TEMPLATE_VALUES),
    BeforeValidator(few_values),
]


class TextPart(BaseModel):
    """A piece of a message's content."""

    model_config = ConfigDict(strict=True, extra="ignore")

    type: Literal["text"]
    text: Text


class Message(OpenAIFields):
    """One turn of a conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Text | Annotated[list[TextPart], Field(max_length=1024, fail_fast=True)] | None = None
    tool_calls: Annotated[list[PastCall], Field(max_length=MOST_TOOL_CALLS)] | None = Field(
        None, description="of an assistant: the calls that it has made"
    )
    tool_call_id: Label | None = Field(None, description="of a tool: the call that it answers")
    reasoning: Text | None = Field(
        None,
        description=(
            "of an assistant: what it thought before; whether it is read is the template's choice"
        ),
    )
    reasoning_content: Text | None = Field(None, description="the same, by its older name")

    # Clients send these fields of an earlier answer back; empty ones are accepted. Chat templates
    # use no names.
    OFF: ClassVar[dict[str, tuple[Any, ...]]] = {
        "function_call": (),
        "audio": (),
        "refusal": ("",),
        "annotations": ([],),
    }

    name: Label | None = None

    @model_validator(mode="after")
    def check_content(self) -> Self:
        if self.content is None and self.role != "assistant":
            raise PydanticCustomError(
                "no_content", "a {role} message needs content", {"role": self.role}
            )
        if self.tool_calls and self.role != "assistant":
            raise PydanticCustomError("no_calls", "only an assistant's message has tool_calls")
        return self

    def plain(self) -> dict[str, Any]:
        """Role and text, as chat templates take them, the thoughts and calls of an assistant, or
        the call that a tool answers."""
        text = (
            "".join(part.text for part in self.content)
            if isinstance(self.content, list)
            else self.content or ""
        )
        said: dict[str, Any] = {
            "role": "system" if self.role == "developer" else self.role,
            "content": text,
        }
        if self.tool_calls:
            said["tool_calls"] = [call.plain() for call in self.tool_calls]
        if self.role == "assistant" and (thought := self.reasoning or self.reasoning_content):
            # templates know one name or the other
            said |= {"reasoning": thought, "reasoning_content": thought}
        if self.role == "tool":
            said |= {
                key: value
                for key, value in (("tool_call_id", self.tool_call_id), ("name", self.name))
                if value
            }
        return said


class Messages(OpenAIFields):
    """Messages, and how they become a prompt."""

    messages: Annotated[
        list[Message],
        Field(min_length=1, max_length=2048, fail_fast=True),
        BeforeValidator(few_parts),
    ]
    add_generation_prompt: bool | None = Field(
        None,
        description=(
            "end the prompt with the beginning of the assistant's turn; default: true, false "
            "with continue_final_message"
        ),
    )
    continue_final_message: bool | None = Field(
        None, description="true: the answer continues the last message, an assistant's"
    )
    chat_template_kwargs: TemplateValues | None = Field(
        None, description="further values for the model's chat template, such as enable_thinking"
    )

    @model_validator(mode="after")
    def check_end(self) -> Self:
        if self.continue_final_message and self.add_generation_prompt:
            raise contradiction(
                "add_generation_prompt", "must be false with continue_final_message: true"
            )
        if self.continue_final_message and self.messages[-1].role != "assistant":
            raise contradiction("continue_final_message", "needs an assistant message at the end")
        return self

    @property
    def template_options(self) -> dict[str, Any]:
        """Keyword arguments for `ServedModel.encode_chat`; none for a prompt that only awaits an
        answer."""
        options: dict[str, Any] = {}
        if self.continue_final_message:
            options["continue_last"] = True
        elif self.add_generation_prompt is False:
            options["open_turn"] = False
        return options | (
            {"values": self.chat_template_kwargs} if self.chat_template_kwargs else {}
        )
