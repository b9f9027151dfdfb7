"""What a request of the Responses API may hold besides settings: messages, calls and their results,
and tools."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal, Self

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    model_validator,
)
from pydantic_core import PydanticCustomError

from draftwell.serving.server.http.bounds import few_parts, few_values
from draftwell.serving.server.http.fields import Label, Text
from draftwell.serving.server.http.tools import (
    MOST_TOOLS,
    CalledFunction,
    ChosenFunction,
    FunctionSpec,
    PastCall,
    Tool,
)

MOST_ITEMS = 2048


class InputPart(BaseModel):
    """A piece of a message's content; pieces of an earlier response are accepted as they came."""

    model_config = ConfigDict(strict=True, extra="ignore")

    type: Literal["input_text", "output_text", "refusal"]
    text: Text | None = None
    refusal: Text | None = None

    @model_validator(mode="after")
    def check_text(self) -> Self:
        if self.plain is None:
            raise PydanticCustomError(
                "missing",
                "Field required: {name}",
                {"name": "refusal" if self.type == "refusal" else "text"},
            )
        return self

    @property
    def plain(self) -> str | None:
        """What it says."""
        return self.refusal if self.type == "refusal" else self.text


Content = Text | Annotated[list[InputPart], Field(max_length=1024, fail_fast=True)]


class InputMessage(BaseModel):
    """One turn of a conversation; an item of an earlier response's output is one too."""

    model_config = ConfigDict(strict=True, extra="ignore")

    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: Content

    def plain(self) -> dict[str, Any]:
        """Role and text, as chat templates take them."""
        return {
            "role": "system" if self.role == "developer" else self.role,
            "content": joined_text(self.content),
        }


class InputCall(CalledFunction):
    """A call of an earlier response."""

    type: Literal["function_call"]
    call_id: Label

    def plain(self) -> dict[str, Any]:
        """A turn of the assistant, as chat templates take it."""
        call = PastCall(
            id=self.call_id, function=CalledFunction(name=self.name, arguments=self.arguments)
        )
        return {"role": "assistant", "content": "", "tool_calls": [call.plain()]}


class InputResult(BaseModel):
    """What a function that was called has returned."""

    model_config = ConfigDict(strict=True, extra="ignore")

    type: Literal["function_call_output"]
    call_id: Label
    output: Content

    def plain(self) -> dict[str, Any]:
        """A turn of the tool, as chat templates take it."""
        return {"role": "tool", "content": joined_text(self.output), "tool_call_id": self.call_id}


def kind_of(item: Any) -> str:
    """Which item it is; a tag has a bracket, so that `field_path` leaves it out."""
    kind = item.get("type") if isinstance(item, dict) else getattr(item, "type", None)
    return f"[{kind}]" if kind in ("function_call", "function_call_output") else "[message]"


Item = Annotated[
    Annotated[InputMessage, Tag("[message]")]
    | Annotated[InputCall, Tag("[function_call]")]
    | Annotated[InputResult, Tag("[function_call_output]")],
    Discriminator(kind_of),
]
Input = Annotated[
    Text | Annotated[list[Item], Field(min_length=1, max_length=MOST_ITEMS, fail_fast=True)],
    BeforeValidator(few_parts),
]


class FunctionKind(BaseModel):
    """The only kind of tool; here its fields stand beside its type, which is looked at first."""

    type: Literal["function"]


class FunctionTool(FunctionSpec, FunctionKind):
    """A function that may be called."""


class ChosenTool(ChosenFunction, FunctionKind):
    """A function that has to be called."""


FunctionTools = Annotated[
    list[FunctionTool], Field(max_length=MOST_TOOLS), BeforeValidator(few_values)
]
FunctionChoice = Literal["none", "auto", "required"] | ChosenTool


def tools_of(functions: Sequence[FunctionTool]) -> list[Tool]:
    """The same tools in the shape of chats."""
    return [Tool.model_construct(type="function", function=function) for function in functions]


def turns_of(items: Sequence[InputMessage | InputCall | InputResult]) -> list[dict[str, Any]]:
    """The conversation as chat templates take it: calls in a row, and those that follow an
    assistant's text, are one turn."""
    turns: list[dict[str, Any]] = []
    for item in items:
        if isinstance(item, InputCall) and turns and turns[-1]["role"] == "assistant":
            turns[-1].setdefault("tool_calls", []).extend(item.plain()["tool_calls"])
        else:
            turns.append(item.plain())
    return turns


def joined_text(content: str | Sequence[InputPart]) -> str:
    """Content as one text."""
    return content if isinstance(content, str) else "".join(part.plain or "" for part in content)
