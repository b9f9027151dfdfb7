"""Tools in OpenAI's shape, and the grammar of their calls in the notation of Hermes, which Qwen,
SmolLM2 and others were trained on:

    <tool_call>
    {"name": "get_weather", "arguments": {"city": "Paris"}}
    </tool_call>
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    StringConstraints,
    field_validator,
)
from pydantic_core import PydanticCustomError

from draftwell.serving.runtime.grammar import guidance
from draftwell.serving.server.http.bounds import few_values
from draftwell.serving.server.http.characters import whole_characters, whole_values
from draftwell.serving.server.http.formats import JsonObject

BEGIN, END = "<tool_call>", "</tool_call>"
MOST_TOOLS, MOST_CALLS = 128, 16
FunctionName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_.-]{1,128}$")]
NO_PARAMETERS: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}


class FunctionSpec(BaseModel):
    """A function that the model may call."""

    model_config = ConfigDict(strict=True, extra="forbid")

    name: FunctionName
    description: (
        Annotated[str, StringConstraints(max_length=65_536), AfterValidator(whole_characters)]
        | None
    ) = None
    parameters: JsonObject | None = Field(
        None, description="JSON schema of the arguments; default: it takes none"
    )
    strict: bool | None = Field(
        None,
        description="true: calls follow the schema also where the model decides whether to call",
    )

    @field_validator("parameters")
    @classmethod
    def check_object(cls, parameters: JsonObject | None) -> JsonObject | None:
        if (parameters or {}).get("type", "object") != "object":
            raise PydanticCustomError(
                "parameters", "arguments are an object: the schema's type must be object"
            )
        return parameters


class Tool(BaseModel):
    """A tool; functions are the only kind."""

    model_config = ConfigDict(strict=True, extra="forbid")

    type: Literal["function"]
    function: FunctionSpec

    def plain(self) -> dict[str, Any]:
        """As chat templates take it."""
        spec = self.function
        about = {"description": spec.description} if spec.description else {}
        return {
            "type": "function",
            "function": {
                "name": spec.name,
                **about,
                "parameters": spec.parameters or NO_PARAMETERS,
            },
        }


class ChosenFunction(BaseModel):
    """The name of a function that has to be called."""

    model_config = ConfigDict(strict=True, extra="forbid")

    name: FunctionName


class ChosenTool(BaseModel):
    """A tool that has to be called."""

    model_config = ConfigDict(strict=True, extra="forbid")

    type: Literal["function"]
    function: ChosenFunction


class CalledFunction(BaseModel):
    """Name and arguments of a call in a conversation."""

    model_config = ConfigDict(strict=True, extra="ignore")

    name: Annotated[str, StringConstraints(max_length=256), AfterValidator(whole_characters)]
    arguments: Annotated[
        str, StringConstraints(max_length=500_000), AfterValidator(whole_characters)
    ] = "{}"


class PastCall(BaseModel):
    """A call that an assistant's message of the conversation has made."""

    model_config = ConfigDict(strict=True, extra="ignore")

    id: Annotated[str, StringConstraints(max_length=256), AfterValidator(whole_characters)] = ""
    type: Literal["function"] = "function"
    function: CalledFunction

    def plain(self) -> dict[str, Any]:
        """As chat templates take it: with arguments as an object, where they are one."""
        arguments: Any = self.function.arguments
        try:
            read = whole_values(json.loads(arguments))
        except (ValueError, RecursionError):
            read = None
        return {
            "id": self.id,
            "type": "function",
            "function": {
                "name": self.function.name,
                "arguments": read if isinstance(read, dict) else arguments,
            },
        }


Tools = Annotated[list[Tool], Field(max_length=MOST_TOOLS), BeforeValidator(few_values)]
ToolChoice = Literal["none", "auto", "required"] | ChosenTool


def calls_grammar(
    tools: Sequence[Tool],
    is_token: Callable[[str], bool],
    *,
    most: int = MOST_CALLS,
    text: bool = False,
    answer: str | None = None,
) -> str:
    """The grammar of one or more calls.

    Args:
        is_token: whether a mark is a token of its own, as in Qwen's vocabularies.
        most: calls at most.
        text: any text may come before, between and after calls, or instead of them; a call that has
            begun follows its schema, whichever tokens its mark is spelt with.
        answer: the body of a rule: what may come instead of calls.
    Raises:
        InvalidRequest: it is too large.
    """
    bodies = " | ".join(f"body_{i}" for i in range(len(tools)))
    begin, end = (mark if is_token(mark) else json.dumps(mark) for mark in (BEGIN, END))
    if text:
        # a mark that is spelt with other tokens begins a call too
        rest = rf"/(.|\n)*/ & ~/(.|\n)*{BEGIN}(.|\n)*/"
        rules = [f"start: tagged{{0,{most}}} REST", f"REST: {rest}"]
        rules += (
            [f"tagged: REST {begin} ({bodies})"]
            if is_token(BEGIN)
            else [f"tagged: head ({bodies})", f"head[lazy]: TEXT {begin}", r"TEXT: /(.|\n)*/"]
        )
    else:
        further = f' ("\\n" call){{0,{most - 1}}}' if most > 1 else ""
        rules = [
            f"start: call{further}" + (" | answer" if answer else ""),
            f"call: {begin} ({bodies})",
        ]
        rules += [f"answer: {answer}"] if answer else []
    for i, tool in enumerate(tools):
        schema: dict[str, Any] = {"type": "object", **(tool.function.parameters or NO_PARAMETERS)}
        opening, closing = (
            json.dumps(f'\n{{"name": {json.dumps(tool.function.name)}, "arguments": '),
            json.dumps("}\n"),
        )
        rules += [
            f"body_{i}: {opening} args_{i} {closing} {end}",
            f"args_{i}: {guidance.json_rule(schema)}",
        ]
    written = "\n".join(rules) + "\n"
    return guidance.lark(written, rules=len(rules) + guidance.references(written))
