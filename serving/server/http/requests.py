"""Requests in OpenAI's shape, with vLLM's further sampling fields and one extension: `speculation`.

Fields that cannot change the answer are ignored. Unsupported fields that would change it are
refused unless they hold the value that means "off", which is vLLM's default too. Unknown fields are
refused too, so that a mistyped `temperature` is noticed. Everything is bounded: the cost of a
request is known before any work is done for it.

From the smallest to the whole: texts and other fields, what an answer has to be, tools and the
grammar of their calls in the notation of Hermes (which Qwen, SmolLM2 and others were trained on),
conversations, and the bodies of completions and chats.

    <tool_call>
    {"name": "get_weather", "arguments": {"city": "Paris"}}
    </tool_call>
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    JsonValue,
    StringConstraints,
    Tag,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic_core import PydanticCustomError

from draftwell.serving.runtime.grammar import guidance
from draftwell.serving.runtime.grammar.closing import closed
from draftwell.serving.server.http.bodies import MOST_VALUES
from draftwell.serving.server.http.tool_calls import BEGIN, END, FirstCall, ToolCallParser
from draftwell.serving.server.scheduling.detokenize import StopStrings
from draftwell.serving.temperature import SERVED_TEMPERATURE

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
    except UnicodeEncodeError:
        kind, why = "not_unicode", "it contains a lone surrogate, which is not a character"
    except ValueError:
        kind, why = "not_finite", "it contains NaN or an infinite number, which JSON does not have"
    except RecursionError:
        kind, why = "nested", "it is nested too deeply"
    else:
        return value
    raise PydanticCustomError(kind, why)


def at_most(count: int) -> BeforeValidator:
    """Refuse a larger object before anything in it is looked at: each entry could be an error."""

    def check(value: Any) -> Any:
        if isinstance(value, dict) and len(value) > count:
            raise PydanticCustomError(
                "too_long",
                "it has {found} entries: at most {most}",
                {"found": len(value), "most": count},
            )
        return value

    return BeforeValidator(check)


OTHER_FIELDS = json.loads((Path(__file__).parent / "other_fields.json").read_text(encoding="utf-8"))
"""Fields that this server lacks. `ignored`: about billing, logging, caching, order and speed, and
about reasoning, images and cuts of prompts; they change no answer. `media`: types of a message's
pieces that hold no text; `items`: types of a response's items that are no turns, but what other
models thought and looked up. All others: by what has them (OpenAI's, and vLLM's), with the values
that mean "off"; null always is one."""

NOT_SUPPORTED = "this server does not support {field}: leave it out"
TEXT_ONLY = "this model takes and writes text only: leave {field} out"
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

    OFF: ClassVar[dict[str, list[Any]]] = {}

    @model_validator(mode="before")
    @classmethod
    def drop_what_is_ignored(cls, data: Any) -> Any:
        """Before it is looked at: it is not kept until the request is answered."""
        if isinstance(data, dict):
            for name in set(OTHER_FIELDS["ignored"]) - cls.model_fields.keys():
                data.pop(name, None)
        return data

    @model_validator(mode="after")
    def refuse_what_we_cannot_do(self) -> Self:
        for name, value in (self.__pydantic_extra__ or {}).items():
            if value is None:
                continue
            if name not in self.OFF:
                raise PydanticCustomError(
                    "unknown_field", "unrecognized request argument: {param}", {"param": name}
                )
            if value not in self.OFF[name]:
                why = TEXT_ONLY if name in ("audio", "modalities") else NOT_SUPPORTED
                named = {"field": name, "param": name}
                raise PydanticCustomError("unsupported_field", why, named)
        return self


MOST_TEXTS = 900
"""Texts of a choice: each is a reading (`guidance.MOST_ITEMS`), and tools beside them are further
ones."""
Definition = Annotated[
    str,
    StringConstraints(min_length=1, max_length=guidance.LONGEST_DEFINITION),
    AfterValidator(whole_characters),
]
JsonObject = Annotated[dict[str, JsonValue], AfterValidator(whole_values)]
Schema = JsonObject | bool | Definition
ChoiceText = Annotated[str, StringConstraints(max_length=4096), AfterValidator(whole_characters)]
Choices = Annotated[list[ChoiceText], Field(min_length=1, max_length=MOST_TEXTS)]


@dataclass(frozen=True)
class Format:
    """What an answer has to be.

    Args:
        field: the request field that asks for it.
        define: returns the grammar's definition; raises InvalidRequest. Its argument says of a
            text whether it is a token of its own, which is written as text.
        rule: returns the body of a rule in llguidance's Lark for the same, so that a grammar can
            allow it beside other things; None: there is none.
        parts: what it is made of by other fields, each a format of its own: which of them is at
            fault where the whole is refused.
    """

    field: str
    define: Callable[[Callable[[str], bool]], str]
    rule: Callable[[], str] | None = None
    parts: tuple[Format, ...] = ()


class NamedSchema(BaseModel):
    """A JSON schema as OpenAI's clients send it. It is always enforced, whatever `strict` says."""

    model_config = ConfigDict(strict=True, extra="forbid", populate_by_name=True)

    name: Name = "answer"
    description: Annotated[str, StringConstraints(max_length=8192)] | None = None
    json_schema: JsonObject | None = Field(None, alias="schema")
    strict: bool | None = None


class ResponseFormat(BaseModel):
    """OpenAI's `response_format`."""

    model_config = ConfigDict(strict=True, extra="forbid")

    type: Literal["text", "json_object", "json_schema"]
    json_schema: NamedSchema | None = None
    own_schema: JsonObject | None = Field(
        None, alias="schema", description="with json_object: a schema, as llama.cpp takes it"
    )

    @model_validator(mode="after")
    def check_schema(self) -> Self:
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise PydanticCustomError(
                "format", "json_schema belongs to the type json_schema, and to no other"
            )
        if self.own_schema is not None and self.type != "json_object":
            raise PydanticCustomError("format", "schema belongs to the type json_object")
        return self

    def format(self, field: str) -> Format | None:
        """What it asks for; None: any text."""
        schema = self.json_schema.json_schema if self.json_schema else self.own_schema
        return None if self.type == "text" else json_format(field, schema)


class TextFormat(NamedSchema):
    """`text.format` of the Responses API, where the schema stands beside its type."""

    type: Literal["text", "json_object", "json_schema"]

    def format(self, field: str) -> Format | None:
        """What it asks for; None: any text."""
        schema = self.json_schema if self.type == "json_schema" else None
        return None if self.type == "text" else json_format(field, schema)


class StructuredOutputs(BaseModel):
    """vLLM's `structured_outputs`: one of these."""

    model_config = ConfigDict(strict=True, extra="forbid", populate_by_name=True)

    json_: Schema | None = Field(None, alias="json", description="a JSON schema")
    regex: Definition | None = Field(
        None, description="a regular expression that matches the whole answer"
    )
    choice: Choices | None = Field(None, description="the possible answers")
    grammar: Definition | None = Field(
        None, description="a context-free grammar, in Lark or in GBNF"
    )
    json_object: bool | None = Field(None, description="true: any JSON object")
    whitespace_pattern: Definition | None = Field(
        None, description="regular expression of what may stand between the parts of a JSON text"
    )
    disable_fallback: bool | None = Field(None, description="without effect: there is one backend")
    disable_any_whitespace: bool | None = Field(
        None, description="true: nothing stands between the parts of a JSON text"
    )
    disable_additional_properties: bool | None = Field(
        None,
        description="with json: whether objects have the properties that the schema lists and no "
        "others, where it does not say; default: true",
    )
    structural_tag: None = Field(None, description="only null, as vLLM's own class sends it")

    @model_validator(mode="after")
    def check_one(self) -> Self:
        if len(self.asked) != 1:
            raise PydanticCustomError(
                "format", "takes exactly one of json, regex, choice, grammar and json_object"
            )
        kind = self.asked[0]
        if self.disable_additional_properties and kind != "json":
            raise PydanticCustomError(
                "format", "disable_additional_properties is about the schema of json: leave it out"
            )
        spaced = self.whitespace_pattern is not None or self.disable_any_whitespace
        if spaced and kind not in ("json", "json_object"):
            raise PydanticCustomError(
                "format",
                "whitespace_pattern and disable_any_whitespace are about json and json_object: "
                "leave them out",
            )
        return self

    @property
    def asked(self) -> list[str]:
        """Which kinds it names."""
        kinds = {
            "json": self.json_,
            "regex": self.regex,
            "choice": self.choice,
            "grammar": self.grammar,
            "json_object": self.json_object or None,
        }
        return [kind for kind, value in kinds.items() if value is not None]

    def format(self, field: str | None = None) -> Format:
        """What it asks for.

        Args:
            field: of the request that asks for it; None: `structured_outputs`.
        """
        kind = self.asked[0]
        place = field or f"structured_outputs.{kind}"
        if kind in ("json", "json_object"):
            space = self.whitespace_pattern or guidance.WHITESPACE
            space = "" if self.disable_any_whitespace else space
            closes = self.disable_additional_properties is not False
            return json_format(place, self.json_, space, closes=closes)
        if self.regex is not None:
            pattern = self.regex
            return Format(place, lambda _: guidance.regex(pattern))
        if self.choice is not None:
            texts = self.choice
            return Format(
                place, lambda _: guidance.choice(texts), lambda: guidance.alternatives(texts)
            )
        rules = self.grammar or ""
        return Format(place, lambda _: guidance.context_free(rules))


def json_format(
    field: str,
    schema: Any,
    whitespace: str = guidance.WHITESPACE,
    *,
    closes: bool = True,
) -> Format:
    """JSON by a schema, as an object or as text; None: any JSON object.

    Args:
        closes: objects have the properties that their schema lists alone (`closing.closed`).
    """

    def wanted() -> dict[str, Any] | bool:
        wanted: Any = {"type": "object"} if schema is None else schema
        if isinstance(wanted, str):
            try:
                wanted = json.loads(wanted)
            except (ValueError, RecursionError) as error:
                raise guidance.refused(f"the schema is no JSON: {error}") from error
        if not isinstance(wanted, dict | bool):
            raise guidance.refused("a JSON schema is an object")
        return closed(wanted) if closes else wanted

    return Format(
        field,
        lambda _: guidance.json_schema(wanted(), whitespace),
        lambda: guidance.json_rule(wanted(), whitespace),
    )


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

    def plain(self) -> dict[str, Any]:
        """As chat templates take it."""
        about = {"description": self.description} if self.description else {}
        parameters = self.parameters or NO_PARAMETERS
        return {
            "type": "function",
            "function": {"name": self.name, **about, "parameters": parameters},
        }


class Tool(BaseModel):
    """A tool; functions are the only kind."""

    model_config = ConfigDict(strict=True, extra="forbid")

    type: Literal["function"]
    function: FunctionSpec


class ChosenFunction(BaseModel):
    """The name of a function that has to be called."""

    model_config = ConfigDict(strict=True, extra="forbid")

    name: FunctionName


class ChosenTool(BaseModel):
    """A tool that has to be called."""

    model_config = ConfigDict(strict=True, extra="forbid")

    type: Literal["function"]
    function: ChosenFunction


class Allowed(BaseModel):
    """Which of the functions may be called; either API names them in its own shape."""

    model_config = ConfigDict(strict=True, extra="forbid")

    mode: Literal["auto", "required"]

    @property
    def names(self) -> set[str]:
        """Of the functions."""
        raise NotImplementedError


class AllowedFunctions(Allowed):
    """OpenAI's `allowed_tools` of a chat."""

    tools: Annotated[list[ChosenTool], Field(min_length=1, max_length=MOST_TOOLS)]

    @property
    def names(self) -> set[str]:
        return {tool.function.name for tool in self.tools}


class AllowedTools(BaseModel):
    """A choice of the functions that may be called; the others stay in the prompt."""

    model_config = ConfigDict(strict=True, extra="forbid")

    type: Literal["allowed_tools"]
    allowed_tools: AllowedFunctions


def type_of(value: Any) -> Any:
    """What a body's object, read or not yet, says of its type; None where it does not."""
    return value.get("type") if isinstance(value, dict) else getattr(value, "type", None)


def choice_kind(choice: Any) -> str:
    """Which choice of tools it is; a tag has a bracket, so that `field_path` leaves it out."""
    if type_of(choice) == "allowed_tools":
        return "[allowed]"
    return "[word]" if isinstance(choice, str) else "[function]"


def arguments_text(arguments: Any) -> Any:
    """Arguments as JSON, where a client sends the object itself, or none."""
    return json.dumps(arguments or {}) if isinstance(arguments, dict | None) else arguments


class CalledFunction(BaseModel):
    """Name and arguments of a call in a conversation."""

    model_config = ConfigDict(strict=True, extra="ignore")

    name: Label
    arguments: Annotated[Text, BeforeValidator(arguments_text)] = "{}"


class PastCall(BaseModel):
    """A call that an assistant's message of the conversation has made."""

    model_config = ConfigDict(strict=True, extra="ignore")

    id: Label | None = None
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
            "id": self.id or "",
            "type": "function",
            "function": {
                "name": self.function.name,
                "arguments": read if isinstance(read, dict) else arguments,
            },
        }


def check_arguments(calls: Iterable[CalledFunction]) -> None:
    """Refuse calls whose arguments, which are JSON again, hold more values than a body may."""
    texts = [call.arguments for call in calls]
    if sum(text.count(mark) for text in texts for mark in ",:[{") > MOST_VALUES:
        raise PydanticCustomError(
            "too_complex", f"arguments of calls hold more than {MOST_VALUES} values"
        )


Tools = Annotated[list[Tool], Field(max_length=MOST_TOOLS)]
ToolChoice = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag("[word]")]
    | Annotated[ChosenTool, Tag("[function]")]
    | Annotated[AllowedTools, Tag("[allowed]")],
    Discriminator(choice_kind),
]


def calls_grammar(
    functions: Sequence[FunctionSpec],
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
    bodies = " | ".join(f"body_{i}" for i in range(len(functions)))
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
    closing = json.dumps("}\n")
    for i, function in enumerate(functions):
        schema: dict[str, Any] = {"type": "object", **(function.parameters or NO_PARAMETERS)}
        opening = json.dumps(f'\n{{"name": {json.dumps(function.name)}, "arguments": ')
        rules += [
            f"body_{i}: {opening} args_{i} {closing} {end}",
            f"args_{i}: {guidance.json_rule(closed(schema))}",
        ]
    written = "\n".join(rules) + "\n"
    return guidance.lark(written, rules=len(rules) + guidance.references(written))


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
    at_most(MOST_TEMPLATE_VALUES),
]


class TextPart(BaseModel):
    """A piece of a message's content. Those of earlier answers are taken as they came, in the types
    of either API; thoughts are left out."""

    model_config = ConfigDict(strict=True, extra="ignore")

    type: Literal[
        "text",
        "input_text",
        "output_text",
        "refusal",
        "thinking",
        "redacted_thinking",
        "reasoning",
        "reasoning_text",
        "summary_text",
    ]
    text: Text | None = None
    refusal: Text | None = None

    @model_validator(mode="before")
    @classmethod
    def refuse_other_media(cls, part: Any) -> Any:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind in OTHER_FIELDS["media"]:
            place = kind if kind in part else "type"
            raise PydanticCustomError("text_only", TEXT_ONLY, {"field": kind, "part": place})
        return part

    @model_validator(mode="after")
    def check_text(self) -> Self:
        name = "refusal" if self.type == "refusal" else "text"
        if self.plain is None:
            raise PydanticCustomError("missing", "Field required", {"part": name})
        return self

    @property
    def plain(self) -> str | None:
        """What it says."""
        if self.type == "refusal":
            return self.refusal
        return self.text if self.type in ("text", "input_text", "output_text") else ""


Content = Text | Annotated[list[TextPart], Field(max_length=1024, fail_fast=True)]


def text_of(content: str | Sequence[TextPart] | None) -> str:
    """Content as one text."""
    if content is None or isinstance(content, str):
        return content or ""
    return "".join(part.plain or "" for part in content)


class Message(BaseModel):
    """One turn of a conversation. Clients send earlier answers back with fields of their own, which
    are left out."""

    model_config = ConfigDict(strict=True, extra="ignore")

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Content | None = None
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

    refusal: Text | None = Field(None, description="of an assistant: what it said instead")
    name: Label | None = Field(None, description="of a tool; chat templates use no other names")
    audio: Any = Field(None, description="only null: there is no audio here")
    function_call: Any = Field(None, description="only null: calls are in tool_calls")

    @field_validator("audio", "function_call")
    @classmethod
    def refuse_what_is_not_read(cls, value: Any, info: ValidationInfo) -> None:
        if value is not None:
            in_calls = "{field} is not read: send the call as one of tool_calls"
            mend = TEXT_ONLY if info.field_name == "audio" else in_calls
            raise PydanticCustomError("unsupported_field", mend, {"field": info.field_name})

    @model_validator(mode="after")
    def check_content(self) -> Self:
        if self.content is None and self.role not in ("assistant", "tool"):
            raise PydanticCustomError(
                "no_content", "a {role} message needs content", {"role": self.role}
            )
        if self.tool_calls and self.role != "assistant":
            raise PydanticCustomError("no_calls", "only an assistant's message has tool_calls")
        return self

    def plain(self) -> dict[str, Any]:
        """Role and text, as chat templates take them, the thoughts and calls of an assistant, or
        the call that a tool answers."""
        role = "system" if self.role == "developer" else self.role
        said: dict[str, Any] = {"role": role, "content": text_of(self.content)}
        if self.role == "assistant" and not said["content"]:
            said["content"] = self.refusal or ""
        if self.tool_calls:
            said["tool_calls"] = [call.plain() for call in self.tool_calls]
        if self.role == "assistant" and (thought := self.reasoning or self.reasoning_content):
            # templates know one name or the other
            said |= {"reasoning": thought, "reasoning_content": thought}
        if self.role == "tool":
            answered = {"tool_call_id": self.tool_call_id, "name": self.name}
            said |= {key: value for key, value in answered.items() if value}
        return said


class Templated(OpenAIFields):
    """What a chat template makes a prompt of."""

    chat_template_kwargs: TemplateValues | None = Field(
        None, description="further values for the model's chat template, such as enable_thinking"
    )

    @property
    def template_options(self) -> dict[str, Any]:
        """Keyword arguments for `ServedModel.encode_chat`; none for a prompt that only awaits an
        answer."""
        return {"values": self.chat_template_kwargs} if self.chat_template_kwargs else {}


class Messages(Templated):
    """Messages, and how they become a prompt."""

    messages: Annotated[
        list[Message],
        Field(min_length=1, max_length=2048, fail_fast=True),
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

    @model_validator(mode="after")
    def check_messages(self) -> Self:
        check_arguments(call.function for m in self.messages for call in m.tool_calls or ())
        if self.continue_final_message and self.add_generation_prompt:
            raise contradiction(
                "add_generation_prompt", "must be false with continue_final_message: true"
            )
        if self.continue_final_message and self.messages[-1].role != "assistant":
            raise contradiction("continue_final_message", "needs an assistant message at the end")
        return self

    @property
    def template_options(self) -> dict[str, Any]:
        if self.continue_final_message:
            return super().template_options | {"continue_last": True}
        closed = {"open_turn": False} if self.add_generation_prompt is False else {}
        return super().template_options | closed


SMALLEST_TOP_P = 1e-9
"""Stands for OpenAI's top_p = 0: only the most likely token."""
MOST_PARAMETERS = 32
MOST_CHOICES = 128
"""Choices of one request: prompts × `n`."""
MOST_STOP_TOKENS = 128


class StreamOptions(BaseModel):
    """Extras of a stream."""

    model_config = ConfigDict(strict=True, extra="ignore")

    include_usage: bool | None = Field(
        None, description="end the stream with a chunk that holds the usage"
    )
    continuous_usage_stats: bool | None = Field(
        None,
        description=(
            "with include_usage: every chunk has the tokens of its choice so far, as vLLM's have"
        ),
    )


class SpeculationOptions(BaseModel):
    """How to decode. Lossless strategies change the speed of an answer only, lossy ones its text
    too."""

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)

    strategy: Name | None = Field(
        None,
        description=(
            "a strategy that this server offers; default: the one that the bundle was tuned for"
        ),
    )
    enabled: bool | None = Field(
        None, description="false: plain decoding, token by token, without the prediction too"
    )
    stats: bool | None = Field(
        None, description="false: leave the speculation statistics out of the answer; default: true"
    )
    trace: bool | None = Field(
        None, description="report the origin of every token: accepted, rescued, recovered or target"
    )
    parameters: (
        Annotated[
            dict[Name, bool | int | float | Name],
            Field(max_length=MOST_PARAMETERS),
            at_most(MOST_PARAMETERS),
        ]
        | None
    ) = Field(
        None,
        description=(
            "parameters of the strategy that replace the tuned ones, within their bounds; the "
            "server must allow it"
        ),
    )


class PredictedContent(BaseModel):
    """What the client expects much of the answer to be, such as the file that it asks to have
    edited (OpenAI's predicted outputs)."""

    model_config = ConfigDict(strict=True, extra="forbid")

    type: Literal["content"] = "content"
    content: Content


class Generation(OpenAIFields):
    """Fields of both endpoints."""

    model: Name
    max_tokens: int | None = Field(None, ge=1, description="most tokens to generate")
    n: int | None = Field(
        None,
        ge=1,
        le=MOST_CHOICES,
        description="answers to each prompt; default: 1, the first of several",
    )
    temperature: float | None = Field(
        None,
        ge=0,
        le=2,
        description=(
            f"default: the model's own, else {SERVED_TEMPERATURE:g}; 0 takes the most likely token"
        ),
    )
    top_p: float | None = Field(
        None,
        ge=0,
        le=1,
        description="sample from the most likely tokens of this total probability; default: the "
        "model's own, else 1",
    )
    top_k: int | None = Field(
        None,
        ge=-1,
        le=10**6,
        description="sample from this many of the most likely tokens; 0 and -1: all; default: the "
        "model's own, else "
        "all",
    )
    min_p: float | None = Field(
        None,
        ge=0,
        le=1,
        description="sample from the tokens with at least this share of the most likely one's "
        "probability; default: the "
        "model's own, else 0",
    )
    repetition_penalty: float | None = Field(
        None,
        ge=0.01,
        le=10,
        description="divides the positive logits of tokens that prompt or answer contain, and "
        "multiplies "
        "the negative ones; default: the model's own, else 1",
    )
    presence_penalty: float | None = Field(
        None,
        ge=-2,
        le=2,
        description="subtracted once from the logit of a token that the answer contains",
    )
    frequency_penalty: float | None = Field(
        None, ge=-2, le=2, description="subtracted as many times as the answer contains the token"
    )
    logit_bias: (
        Annotated[
            dict[TokenKey, Annotated[float, Field(ge=-100, le=100)]],
            Field(max_length=300),
            at_most(300),
        ]
        | None
    ) = Field(None, description="token id → number added to its logit, for the whole answer")
    seed: int | None = Field(
        None,
        ge=-(2**63),
        lt=2**63,
        description="the same seed gives the same answer; default: random",
    )
    min_tokens: int | None = Field(
        None,
        ge=0,
        description=(
            "tokens that the answer has before a stop token, the end of the text or a stop "
            "string may end it"
        ),
    )
    ignore_eos: bool | None = Field(
        None, description="true: the model's end-of-text tokens do not end the answer"
    )
    stop_token_ids: Annotated[list[TokenId], Field(max_length=MOST_STOP_TOKENS)] | None = Field(
        None, description="tokens that end the answer and are not shown, besides the model's own"
    )
    stop: StopString | Annotated[list[StopString], Field(max_length=16)] | None = Field(
        None, description="strings that end the answer"
    )
    stream: bool | None = Field(
        None, description="send the answer as it comes, as server-sent events"
    )
    stream_options: StreamOptions | None = None
    prediction: PredictedContent | None = Field(
        None,
        description="text that much of the answer is expected to equal; it is drafted wherever it "
        "fits. With a lossless strategy answers follow the same "
        "distribution, and greedy ones and those with a seed are identical",
    )
    cache_salt: Name | None = Field(
        None,
        description="what only requests with the same salt have read before need not be read again "
        "(vLLM's): others then cannot tell "
        "from the time what was asked",
    )
    response_format: ResponseFormat | None = Field(
        None, description="what the answer has to be: any text, a JSON object, or JSON by a schema"
    )
    structured_outputs: StructuredOutputs | None = Field(
        None, description="vLLM's field for the same, with further kinds"
    )
    guided_json: Schema | None = Field(
        None,
        description=(
            "a JSON schema that the answer has to follow; vLLM's older name, as those below"
        ),
    )
    guided_regex: Definition | None = Field(
        None, description="a regular expression that has to match the whole answer"
    )
    guided_choice: Choices | None = Field(None, description="the possible answers")
    guided_grammar: Definition | None = Field(
        None, description="a context-free grammar of the answer, in Lark or in GBNF"
    )
    guided_whitespace_pattern: Definition | None = Field(
        None,
        description=(
            "with guided_json: regular expression of what may stand between the parts of a "
            "JSON text"
        ),
    )
    timeout: float | None = Field(
        None,
        gt=0,
        le=86_400,
        description=(
            "seconds after which the request is cancelled; the server may have a shorter limit"
        ),
    )
    speculation: SpeculationOptions | None = Field(
        None, description="Draftwell's extension: how to decode, and what to report about it"
    )

    OFF = OTHER_FIELDS["generation"]

    FORMATS: ClassVar[tuple[str, ...]] = (
        "response_format",
        "structured_outputs",
        "guided_json",
        "guided_regex",
        "guided_choice",
        "guided_grammar",
    )

    @model_validator(mode="after")
    def check_format(self) -> Self:
        asked = self.format_fields
        if len(asked) > 1:
            raise contradiction(asked[1], f"cannot be combined with {asked[0]}: ask for one format")
        if self.guided_whitespace_pattern is not None and self.guided_json is None:
            raise contradiction("guided_whitespace_pattern", "needs guided_json")
        return self

    @property
    def format_fields(self) -> list[str]:
        """The fields that ask for a format."""
        return [name for name in self.FORMATS if getattr(self, name) is not None]

    @property
    def format(self) -> Format | None:
        """What the answer has to be; None: any text."""
        return self.asked_format

    @property
    def asked_format(self) -> Format | None:
        """The format that the request names; None: none."""
        if self.response_format is not None:
            return self.response_format.format("response_format")
        if self.structured_outputs is not None:
            return self.structured_outputs.format()
        for name in self.format_fields:
            older = {name.removeprefix("guided_"): getattr(self, name)}
            space = self.guided_whitespace_pattern
            return StructuredOutputs(**older, whitespace_pattern=space).format(name)
        return None

    def with_defaults(self, defaults: Mapping[str, float]) -> Self:
        """The same request, with the model's value wherever it names none."""
        return self.model_copy(
            update={name: value for name, value in defaults.items() if getattr(self, name) is None}
        )

    @property
    def token_limit(self) -> int | None:
        return self.max_tokens

    @property
    def used_temperature(self) -> float:
        """The temperature, or the default where the request names none."""
        return SERVED_TEMPERATURE if self.temperature is None else float(self.temperature)

    @property
    def stop_strings(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else self.stop or []

    def stops(self) -> StopStrings:
        """What looks for the end of one answer."""
        return StopStrings(self.stop_strings)

    @property
    def wants_usage(self) -> bool:
        """Whether a stream ends with the usage."""
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def wants_usage_so_far(self) -> bool:
        """Whether every chunk of a stream has the tokens of its choice so far."""
        options = self.stream_options
        return bool(options and options.include_usage and options.continuous_usage_stats)

    @property
    def decoding(self) -> SpeculationOptions:
        return self.speculation or SpeculationOptions()

    @property
    def alternatives(self) -> int | None:
        """How many of the most likely tokens to list with each one; None: no log-probs."""
        raise NotImplementedError

    @property
    def rates_prompt(self) -> bool:
        """Whether the prompt's tokens get log-probs too."""
        return False

    @property
    def lists_token_ids(self) -> bool:
        """Whether choices name their tokens by ids."""
        return False

    def sampling_settings(self) -> dict[str, Any]:
        """Keyword arguments for `Sampling`, with OpenAI's defaults."""
        return {
            "temperature": self.used_temperature,
            "top_p": 1.0 if self.top_p is None else max(float(self.top_p), SMALLEST_TOP_P),
            "top_k": max(0, self.top_k or 0),
            "min_p": float(self.min_p or 0.0),
            "repetition_penalty": float(self.repetition_penalty or 1.0),
            "min_tokens": self.min_tokens or 0,
            "presence_penalty": float(self.presence_penalty or 0.0),
            "frequency_penalty": float(self.frequency_penalty or 0.0),
            "logit_bias": {
                int(token): float(bias) for token, bias in (self.logit_bias or {}).items()
            },
            "logprobs": self.alternatives,
            "repeatable": self.seed is not None,
        }


Choice = Literal["none", "auto", "required"] | ChosenFunction | Allowed | None
"""Whether a request wants calls, or of which functions; None: auto."""


class Calling(Generation, Templated):
    """A request that may offer tools."""

    parallel_tool_calls: bool | None = Field(
        None, description="false: at most one call; default: several"
    )

    @property
    def functions(self) -> Sequence[FunctionSpec]:
        """The functions of the request, offered or not."""
        raise NotImplementedError

    @property
    def choice(self) -> Choice:
        """Which of them to call."""
        raise NotImplementedError

    @model_validator(mode="after")
    def check_tools(self) -> Self:
        names = [function.name for function in self.functions]
        if len(set(names)) < len(names):
            raise contradiction("tools", "has two functions of one name")
        if not self.chosen_names <= set(names):
            raise contradiction("tool_choice", "names a function that is not among the tools")
        if self.choice == "required" and not names:
            raise contradiction("tool_choice", "needs tools to choose from")
        asked = self.asked_format
        if self.offered and asked is not None and asked.rule is None:
            raise contradiction(
                "tools",
                f"cannot be combined with {asked.field}: ask for JSON or for a choice of "
                "texts, or set "
                "tool_choice to none",
            )
        return self

    @property
    def offered(self) -> Sequence[FunctionSpec]:
        """The functions that the answer may call."""
        if chosen := self.chosen_names:
            return [one for one in self.functions if one.name in chosen]
        return [] if self.choice == "none" else self.functions

    @property
    def chosen_names(self) -> set[str]:
        """The functions that the choice names; empty: it names none."""
        if isinstance(self.choice, Allowed):
            return self.choice.names
        return {self.choice.name} if isinstance(self.choice, ChosenFunction) else set()

    @property
    def must_call(self) -> bool:
        """Whether the answer is calls and nothing else."""
        choice = self.choice.mode if isinstance(self.choice, Allowed) else self.choice
        return choice == "required" or isinstance(choice, ChosenFunction)

    @property
    def format(self) -> Format | None:
        """Calls where they are asked for; where the model decides, calls or what the request's own
        format says."""
        tools, asked = self.offered, self.asked_format
        single = self.parallel_tool_calls is False or isinstance(self.choice, ChosenFunction)
        most = 1 if single else MOST_CALLS
        grammar = partial(calls_grammar, tools, most=most)
        calls = Format("tools", grammar)
        if tools and self.must_call:
            return calls
        if tools and asked is not None and asked.rule is not None:
            rule = asked.rule
            return Format(asked.field, lambda own: grammar(own, answer=rule()), parts=(calls,))
        # a call that begins has to be one of the allowed ones
        if any(function.strict for function in tools) or isinstance(self.choice, Allowed):
            return Format("tools", partial(grammar, text=True))
        return asked

    def stops(self) -> StopStrings:
        """With a single call at most, its end ends the answer."""
        if not self.offered or self.parallel_tool_calls is not False:
            return super().stops()
        return FirstCall({function.name for function in self.offered}, self.stop_strings)

    def parser(self) -> ToolCallParser:
        """Takes the calls out of one answer's text."""
        most = 1 if self.parallel_tool_calls is False else None
        return ToolCallParser({function.name for function in self.offered}, most)

    @property
    def template_options(self) -> dict[str, Any]:
        tools = [function.plain() for function in self.functions]
        return super().template_options | ({"tools": tools} if self.offered else {})


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

    return_token_ids: bool | None = Field(
        None,
        description="true: `token_ids` of each choice are the tokens of its text, one that ended "
        "it included (vLLM's)",
    )
    return_tokens_as_token_ids: bool | None = Field(
        None, description="true: log-probs name tokens as token_id:5 (vLLM's)"
    )

    OFF = Generation.OFF | OTHER_FIELDS["completion"]

    @model_validator(mode="after")
    def check_budget(self) -> Self:
        if self.max_tokens == 0 and not self.echo:
            raise contradiction("max_tokens", "must be at least 1, or 0 together with echo")
        return self

    @property
    def alternatives(self) -> int | None:
        return self.logprobs

    @property
    def rates_prompt(self) -> bool:
        return bool(self.echo) and self.logprobs is not None

    @property
    def lists_token_ids(self) -> bool:
        return self.return_token_ids is True

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

    OFF = Generation.OFF | OTHER_FIELDS["chat"]

    tools: Tools | None = Field(None, description="functions that the answer may call")
    tool_choice: ToolChoice | None = Field(
        None,
        description=(
            "auto, the default: the model decides whether to call; required: it calls some; a "
            "function: that one; allowed_tools: some of these, by their mode; none"
        ),
    )

    @model_validator(mode="after")
    def check_logprobs(self) -> Self:
        if self.top_logprobs and not self.logprobs:
            raise contradiction("top_logprobs", "needs logprobs: true")
        return self

    @property
    def functions(self) -> Sequence[FunctionSpec]:
        return [tool.function for tool in self.tools or ()]

    @property
    def choice(self) -> Choice:
        chosen = self.tool_choice
        if isinstance(chosen, AllowedTools):
            return chosen.allowed_tools
        return chosen.function if isinstance(chosen, ChosenTool) else chosen

    @property
    def token_limit(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens

    @property
    def alternatives(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None
