"""What an answer has to be: OpenAI's `response_format`, and the names that vLLM has for it."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    JsonValue,
    StringConstraints,
    model_validator,
)
from pydantic_core import PydanticCustomError

from draftwell.serving.runtime.grammar import guidance
from draftwell.serving.server.http.bounds import few_values
from draftwell.serving.server.http.characters import whole_characters, whole_values

MOST_TEXTS = 900
"""Texts of a choice: each is a reading (`guidance.MOST_ITEMS`), and tools beside them are further
ones."""
Definition = Annotated[
    str,
    StringConstraints(min_length=1, max_length=guidance.LONGEST_DEFINITION),
    AfterValidator(whole_characters),
]
JsonObject = Annotated[
    dict[str, JsonValue], BeforeValidator(few_values), AfterValidator(whole_values)
]
Schema = JsonObject | bool | Definition
ShortName = Annotated[str, StringConstraints(max_length=256)]
ChoiceText = Annotated[str, StringConstraints(max_length=4096), AfterValidator(whole_characters)]
Choices = Annotated[list[ChoiceText], Field(min_length=1, max_length=MOST_TEXTS)]


@dataclass(frozen=True)
class Format:
    """What an answer has to be.

    Args:
        field: the request field that asks for it.
        define: returns the grammar's definition; raises InvalidRequest. Its argument says of a text
            whether it is a token of its own, which is written as text.
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

    name: ShortName = "answer"
    description: Annotated[str, StringConstraints(max_length=8192)] | None = None
    json_schema: JsonObject | None = Field(None, alias="schema")
    strict: bool | None = None


class ResponseFormat(BaseModel):
    """OpenAI's `response_format`."""

    model_config = ConfigDict(strict=True, extra="forbid")

    type: Literal["text", "json_object", "json_schema"]
    json_schema: NamedSchema | None = None

    @model_validator(mode="after")
    def check_schema(self) -> Self:
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise PydanticCustomError(
                "format", "json_schema belongs to the type json_schema, and to no other"
            )
        return self

    def format(self, field: str) -> Format | None:
        """What it asks for; None: any text."""
        if self.type == "text":
            return None
        return json_format(field, self.json_schema.json_schema if self.json_schema else None)


class TextFormat(NamedSchema):
    """`text.format` of the Responses API, where the schema stands beside its type."""

    type: Literal["text", "json_object", "json_schema"]

    def format(self, field: str) -> Format | None:
        """What it asks for; None: any text."""
        return (
            None
            if self.type == "text"
            else json_format(field, self.json_schema if self.type == "json_schema" else None)
        )


class StructuredOutputs(BaseModel):
    """vLLM's `structured_outputs`: one of these."""

    model_config = ConfigDict(strict=True, extra="forbid", populate_by_name=True)

    KINDS: ClassVar[tuple[str, ...]] = ("json", "regex", "choice", "grammar", "json_object")

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
    disable_additional_properties: Literal[False] | None = Field(
        None, description="only false or null: write it into the schema"
    )
    structural_tag: None = Field(None, description="only null, as vLLM's own class sends it")

    @model_validator(mode="after")
    def check_one(self) -> Self:
        if len(self.asked) != 1:
            raise PydanticCustomError(
                "format", "takes exactly one of json, regex, choice, grammar and json_object"
            )
        return self

    @property
    def asked(self) -> list[str]:
        """Which kinds it names."""
        values = (self.json_, self.regex, self.choice, self.grammar, self.json_object or None)
        return [kind for kind, value in zip(self.KINDS, values, strict=True) if value is not None]

    def format(self, field: str, *, within: bool = True) -> Format:
        """What it asks for.

        Args:
            within: the field has the kind within it.
        """
        kind = self.asked[0]
        place = f"{field}.{kind}" if within else field
        if kind in ("json", "json_object"):
            space = (
                ""
                if self.disable_any_whitespace
                else self.whitespace_pattern or guidance.WHITESPACE
            )
            return json_format(place, self.json_ if kind == "json" else None, space)
        if self.regex is not None:
            pattern = self.regex
            return Format(place, lambda _: guidance.regex(pattern))
        if self.choice is not None:
            texts = self.choice
            return Format(
                place, lambda _: guidance.choice(texts), lambda: guidance.alternatives(texts)
            )
        assert self.grammar is not None
        rules = self.grammar
        return Format(place, lambda _: guidance.context_free(rules))


def json_format(field: str, schema: Any, whitespace: str = guidance.WHITESPACE) -> Format:
    """JSON by a schema, as an object or as text; None: any JSON object."""

    def wanted() -> dict[str, Any] | bool:
        wanted: Any = {"type": "object"} if schema is None else schema
        if isinstance(wanted, str):
            try:
                wanted = json.loads(wanted)
            except (ValueError, RecursionError) as error:
                raise guidance.refused(f"the schema is no JSON: {error}") from error
        if not isinstance(wanted, dict | bool):
            raise guidance.refused("a JSON schema is an object")
        return wanted

    return Format(
        field,
        lambda _: guidance.json_schema(wanted(), whitespace),
        lambda: guidance.json_rule(wanted(), whitespace),
    )
