"""OpenAI's Responses API without stored state: what a request may hold (messages, calls and their
results, tools), the response object with its items, and the events of its stream."""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Annotated, Any, Literal, Self

from pydantic import (
    BaseModel,
    ConfigDict,
    Discriminator,
    Field,
    StringConstraints,
    Tag,
    model_validator,
)
from pydantic_core import PydanticCustomError

from draftwell.serving.server.http.conversation import AnswerChoice
from draftwell.serving.server.http.errors import TOO_MANY_REQUESTS, APIError
from draftwell.serving.server.http.rendering import Answer, Found, Json, sse
from draftwell.serving.server.http.requests import (
    MOST_TOOLS,
    OTHER_FIELDS,
    Allowed,
    CalledFunction,
    Calling,
    Choice,
    ChosenFunction,
    Content,
    Format,
    FunctionSpec,
    Label,
    PastCall,
    Text,
    TextFormat,
    at_most,
    check_arguments,
    choice_kind,
    contradiction,
    text_of,
    type_of,
)
from draftwell.serving.server.http.tool_calls import Call, Piece, TextPiece, ToolCallParser
from draftwell.serving.server.scheduling.detokenize import TokenInfo
from draftwell.serving.server.scheduling.ticket import Delta, End

MOST_ITEMS = 2048


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
            "content": text_of(self.content),
        }


class InputCall(CalledFunction):
    """A call of an earlier response."""

    type: Literal["function_call"]
    call_id: Label | None = None

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
    call_id: Label | None = None
    output: Content

    def plain(self) -> dict[str, Any]:
        """A turn of the tool, as chat templates take it."""
        answered = {"tool_call_id": self.call_id} if self.call_id else {}
        return {"role": "tool", "content": text_of(self.output), **answered}


class OtherItem(BaseModel):
    """An item that is left out, or refused by its type."""

    model_config = ConfigDict(strict=True, extra="ignore")

    type: Label = "item_reference"
    id: Any = None

    @model_validator(mode="after")
    def check_type(self) -> Self:
        reference = self.type == "item_reference"
        if self.type in OTHER_FIELDS["items"] or (
            reference and str(self.id).startswith("rs_")
        ):  # a thought
            return self
        mend = "this server keeps no items: send {kind}" if reference else "{kind} is not known"
        what = "the item itself" if reference else self.type
        raise PydanticCustomError("unsupported_item", mend, {"kind": what, "part": "type"})


def kind_of(item: Any) -> str:
    """Which item it is; a tag has a bracket, so that `field_path` leaves it out."""
    kind = type_of(item)
    if kind is None and isinstance(item, dict) and "id" in item and "role" not in item:
        return "[other]"  # a reference may leave its type out
    if kind in ("function_call", "function_call_output"):
        return f"[{kind}]"
    return "[message]" if kind in (None, "message") else "[other]"


Item = Annotated[
    Annotated[InputMessage, Tag("[message]")]
    | Annotated[InputCall, Tag("[function_call]")]
    | Annotated[InputResult, Tag("[function_call_output]")]
    | Annotated[OtherItem, Tag("[other]")],
    Discriminator(kind_of),
]
Input = Text | Annotated[list[Item], Field(min_length=1, max_length=MOST_ITEMS, fail_fast=True)]


class FunctionKind(BaseModel):
    """The only kind of tool; here its fields stand beside its type, which is looked at first."""

    type: Literal["function"]


class FunctionTool(FunctionSpec, FunctionKind):
    """A function that may be called."""


class ChosenTool(ChosenFunction, FunctionKind):
    """A function that has to be called."""


FunctionTools = Annotated[list[FunctionTool], Field(max_length=MOST_TOOLS)]


class AllowedTools(Allowed):
    """A choice of the functions that may be called; the others stay in the prompt."""

    type: Literal["allowed_tools"]
    tools: Annotated[list[ChosenTool], Field(min_length=1, max_length=MOST_TOOLS)]

    @property
    def names(self) -> set[str]:
        return {tool.name for tool in self.tools}


FunctionChoice = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag("[word]")]
    | Annotated[ChosenTool, Tag("[function]")]
    | Annotated[AllowedTools, Tag("[allowed]")],
    Discriminator(choice_kind),
]


def turns_of(
    items: Sequence[InputMessage | InputCall | InputResult | OtherItem],
) -> list[dict[str, Any]]:
    """The conversation as chat templates take it: calls in a row, and those that follow an
    assistant's text, are one turn."""
    turns: list[dict[str, Any]] = []
    for item in items:
        if isinstance(item, OtherItem):
            continue
        if isinstance(item, InputCall) and turns and turns[-1]["role"] == "assistant":
            turns[-1].setdefault("tool_calls", []).extend(item.plain()["tool_calls"])
        else:
            turns.append(item.plain())
    return turns


Event = tuple[str, Json]
"""Kind and fields of a stream's event."""
Status = Literal["in_progress", "completed", "incomplete"]


class OutputItems:
    """Makes the items of one response.

    Args:
        response: its id, which the items' ids are made of.
        parser: takes calls out of the text; None: all of it is one message.

    >>> items = OutputItems("resp-1", ToolCallParser({"add"}))
    >>> found = items.push('Well: <tool_call>{"name": "add", "arguments": {"a"', []) + items.push(
    ...     ": 1}}</tool_call>", []
    ... )
    >>> [
    ...     kind.removeprefix("response.") for kind, _ in found + items.finish("completed")
    ... ]  # doctest: +NORMALIZE_WHITESPACE
    ['output_item.added', 'content_part.added', 'output_text.delta', 'output_text.done',
    'content_part.done', 'output_item.done',
     'output_item.added', 'function_call_arguments.delta', 'function_call_arguments.delta',
     'function_call_arguments.done', 'output_item.done']
    >>> [item["type"] for item in items.items]
    ['message', 'function_call']
    """

    def __init__(self, response: str, parser: ToolCallParser | None = None):
        self.items: list[Json] = []
        self._response, self._parser = response, parser
        self._open = False  # whether the last item may grow
        self._logprobs: list[Json] = []  # of tokens whose text is not said yet

    def push(self, text: str, logprobs: Sequence[Json]) -> list[Event]:
        """What more text gives; log-probs of its tokens are listed where it is a message's."""
        self._logprobs += logprobs
        if self._parser is not None:
            return self._events(self._parser.push(text))
        return self._events([TextPiece(text)] if text or logprobs else [])

    def finish(self, status: Status) -> list[Event]:
        """The rest, when no text follows; without any text it is an empty message.

        Args:
            status: of the last item.
        """
        # by a stop string: no call to make
        cut = self._parser is not None and self._parser.within_arguments
        events = self._events(self._parser.finish()) if self._parser is not None else []
        if not self.items:
            events += self._begin_message()
        return [*events, *self._close("incomplete" if cut else status)]

    def begin(self) -> list[Event]:
        """The beginning of a message, where the answer can be nothing else."""
        return [] if self._parser is not None else [*self._begin_message()]

    def _events(self, pieces: Sequence[Piece]) -> list[Event]:
        events: list[Event] = []
        for piece in pieces:
            events += (
                self._said(piece.text) if isinstance(piece, TextPiece) else self._called(piece)
            )
        return events

    def _said(self, text: str) -> Iterator[Event]:
        if not self._open or self.items[-1]["type"] != "message":
            yield from self._close()
            yield from self._begin_message()
        part, logprobs, self._logprobs = self.items[-1]["content"][0], self._logprobs, []
        part["text"] += text
        part["logprobs"] += logprobs
        yield self._event("output_text.delta", content_index=0, delta=text, logprobs=logprobs)

    def _called(self, call: Call) -> Iterator[Event]:
        self._logprobs = []
        if call.id is not None:
            yield from self._close()
            yield self._begin("fc", "function_call", call_id=call.id, name=call.name, arguments="")
        if call.arguments:
            self.items[-1]["arguments"] += call.arguments
            yield self._event("function_call_arguments.delta", delta=call.arguments)

    def _begin_message(self) -> Iterator[Event]:
        yield self._begin("msg", "message", role="assistant", content=[])
        self.items[-1]["content"] = [text_part()]
        yield self._event("content_part.added", content_index=0, part=text_part())

    def _begin(self, prefix: str, kind: str, **fields: Any) -> Event:
        made_of = f"{self._response} {len(self.items)}"
        name = f"{prefix}_{uuid.uuid5(uuid.NAMESPACE_OID, made_of).hex}"
        self.items.append({"id": name, "status": "in_progress", "type": kind, **fields})
        self._open = True
        return self._item_event("added")

    def _close(self, status: Status = "completed") -> Iterator[Event]:
        """End the last item, if it may grow."""
        if not self._open:
            return
        self._open, item = False, self.items[-1]
        item["status"] = status
        if item["type"] == "message":
            part = item["content"][0]
            said = {"text": part["text"], "logprobs": part["logprobs"]}
            yield self._event("output_text.done", content_index=0, **said)
            yield self._event("content_part.done", content_index=0, part=part)
        else:
            called = {"name": item["name"], "arguments": item["arguments"]}
            yield self._event("function_call_arguments.done", **called)
        yield self._item_event("done")

    def _item_event(self, kind: str) -> Event:
        fields = {"output_index": len(self.items) - 1, "item": dict(self.items[-1])}
        return f"response.output_item.{kind}", fields

    def _event(self, kind: str, **fields: Any) -> Event:
        """An event about the last item."""
        place = {"item_id": self.items[-1]["id"], "output_index": len(self.items) - 1}
        return f"response.{kind}", place | fields


def text_part() -> Json:
    """A message's content, empty as yet."""
    return {"type": "output_text", "text": "", "annotations": [], "logprobs": []}


LOGPROBS = "message.output_text.logprobs"
Included = Literal[
    "message.output_text.logprobs",
    "file_search_call.results",
    "web_search_call.results",
    "web_search_call.action.sources",
    "message.input_image.image_url",
    "computer_call_output.output.image_url",
    "code_interpreter_call.outputs",
    "reasoning.encrypted_content",
]
"""OpenAI's values of `include`; all but the first are of tools, images and reasoning."""
Short = Annotated[str, StringConstraints(max_length=512)]


class TextOptions(BaseModel):
    """`text` of a request: its format, and how long-winded it is to be, which changes nothing."""

    model_config = ConfigDict(strict=True, extra="forbid")

    format: TextFormat | None = None
    verbosity: Literal["low", "medium", "high"] | None = None


class ResponsesRequest(Calling):
    """Body of `POST /v1/responses`."""

    input: Input = Field(
        description="text of a user, or messages, calls of earlier responses and their results"
    )
    instructions: Text | None = Field(None, description="system message before the input")
    max_output_tokens: int | None = Field(
        None, ge=1, description="most tokens to generate; default: what the context leaves"
    )
    top_logprobs: int | None = Field(
        None, ge=0, le=20, description="report this many of the most likely tokens at each position"
    )
    include: Annotated[list[Included], Field(max_length=16)] | None = Field(
        None,
        description=(
            "message.output_text.logprobs: report the log-prob of every token; OpenAI's other "
            "values add nothing here"
        ),
    )
    metadata: Annotated[dict[Short, Short], Field(max_length=16), at_most(16)] | None = Field(
        None, description="returned as it is"
    )
    text: TextOptions | None = Field(
        None, description="what the answer has to be: any text, a JSON object, or JSON by a schema"
    )
    previous_response_id: str | None = None
    conversation: Any = None

    tools: FunctionTools | None = Field(None, description="functions that the answer may call")
    tool_choice: FunctionChoice | None = Field(
        None,
        description=(
            "auto, the default: the model decides whether to call; required: it calls some; a "
            "function: that one; allowed_tools: some of these, by their mode; none"
        ),
    )

    OFF = Calling.OFF | OTHER_FIELDS["response"]

    @model_validator(mode="after")
    def check_calls(self) -> Self:
        check_arguments(item for item in self.input if isinstance(item, InputCall))
        if self.input and all(isinstance(item, OtherItem) for item in self.input):
            raise contradiction("input", "holds nothing to answer: send a message")
        return self

    @model_validator(mode="after")
    def refuse_state(self) -> Self:
        trace = {"speculation.trace": self.decoding.trace or None}
        for message, given in (
            (
                "this server keeps no responses, so it cannot continue one by {param}: send the "
                "earlier messages as input",
                {
                    "previous_response_id": self.previous_response_id,
                    "conversation": self.conversation,
                },
            ),
            (
                "a response does not take {param}: it is one answer of max_output_tokens",
                {"max_tokens": self.max_tokens, "n": None if self.n == 1 else self.n},
            ),
            (
                "a response does not take {param}: its format is in text",
                {"response_format": self.response_format},
            ),
            ("a response has no place for {param}: ask /v1/chat/completions for it", trace),
        ):
            for name, value in given.items():
                if value is not None:
                    raise PydanticCustomError("unsupported_field", message, {"param": name})
        if self.format_fields and self.text_format is not None:
            asked = self.format_fields[0]
            raise contradiction(asked, "cannot be combined with text.format: ask for one format")
        return self

    @property
    def functions(self) -> Sequence[FunctionSpec]:
        return self.tools or ()

    @property
    def choice(self) -> Choice:
        return self.tool_choice

    @property
    def asked_format(self) -> Format | None:
        own = self.text_format and self.text_format.format("text.format")
        return own or super().asked_format

    @property
    def text_format(self) -> TextFormat | None:
        """The text's format, where it names one."""
        return self.text.format if self.text else None

    @property
    def token_limit(self) -> int | None:
        return self.max_output_tokens

    @property
    def alternatives(self) -> int | None:
        listed = self.top_logprobs or LOGPROBS in (self.include or ())
        return (self.top_logprobs or 0) if listed else None

    @property
    def messages(self) -> list[dict[str, Any]]:
        """The conversation as chat templates take it; instructions and a system message that begins
        the input are one."""
        if isinstance(self.input, str):
            turns = [{"role": "user", "content": self.input}]
        else:
            turns = turns_of(self.input)
        if not self.instructions:
            return turns
        instructions = self.instructions
        if turns[0]["role"] == "system":
            instructions += f"\n\n{turns.pop(0)['content']}"
        return [{"role": "system", "content": instructions}, *turns]


class ResponseAnswer(Answer):
    """The events of a conversation as a response, whole or streamed."""

    prefix = "resp"
    body: ResponsesRequest

    def _assembled(self, texts: Sequence[str], tokens: Sequence[Sequence[TokenInfo]]) -> Json:
        items = self._items
        if self.rated:
            for token in tokens[0]:
                items.push(token.text, self._listed([token]))
        else:
            items.push(texts[0], [])
        items.finish(self._status)
        return self._ended(items)

    async def stream(self, first: Found | None) -> AsyncIterator[str]:
        """Server-sent events as OpenAI's clients read them, each with its number, and comments as
        `sent` has them."""
        number = 0

        def event(kind: str, **fields: Any) -> str:
            nonlocal number
            number += 1
            return sse({"type": kind, "sequence_number": number - 1} | fields, kind)

        def written(found: Sequence[Event]) -> str:
            return "".join(event(kind, **fields) for kind, fields in found)

        begun, items = self._response("in_progress", []), self._items
        yield event("response.created", response=begun)
        yield event("response.in_progress", response=begun)
        yield written(items.begin())

        def told(_: AnswerChoice, found: Delta | End) -> str:
            if isinstance(found, End):
                return ""
            return written(items.push(found.text, self._listed(found.tokens)))

        def ending() -> str:
            last = written(items.finish(self._status))
            ended = self._ended(items)
            return last + event(f"response.{ended['status']}", response=ended)

        try:
            async for piece in self.sent(first, told):
                yield piece
        except APIError as error:
            failed = {"code": failure_code(error), "message": error.body["error"]["message"]}
            yield event("response.failed", response=self._response("failed", [], error=failed))
            return
        yield await self.apart(ending)

    @property
    def _format(self) -> Json:
        """The text's format, as OpenAI's clients read it."""
        asked = self.body.text_format
        if asked is None or asked.type != "json_schema":
            return {"type": asked.type if asked else "text"}
        schema = asked.json_schema or {}
        return {"type": asked.type, "name": asked.name, "schema": schema, "strict": asked.strict}

    @property
    def _items(self) -> OutputItems:
        """What makes items of the answer's text."""
        return OutputItems(self.id, self.body.parser() if self.body.offered else None)

    @property
    def _status(self) -> Literal["completed", "incomplete"]:
        """Of the complete response and its last item."""
        end = self.conversation.choices[0].end
        assert end is not None
        return "incomplete" if end.finish_reason == "length" else "completed"

    def _listed(self, tokens: Sequence[TokenInfo]) -> list[Json]:
        """Log-probs of tokens, if they were asked for; unlike in a chat, bytes are always a
        list."""
        choice = self.conversation.choices[0]
        listed = self._logprobs(choice, self._rated(choice, tokens, first=False))
        entries: list[Json] = listed["content"] if listed else []
        for entry in entries:
            for one in (entry, *entry["top_logprobs"]):
                one["bytes"] = one["bytes"] or []
        return entries

    def _ended(self, items: OutputItems) -> Json:
        """The complete response."""
        status, usage = self._status, self._usage()
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        counts = {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": {"cached_tokens": cached, "cache_write_tokens": 0},
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": usage["total_tokens"],
        }
        why = {"reason": "max_output_tokens"} if status == "incomplete" else None
        response = self._response(status, items.items, incomplete_details=why, usage=counts)
        return response | self._extension(self._stats())

    def _response(self, status: str, output: list[Json], **fields: Any) -> Json:
        body = self.body
        tools = [{"type": "function"} | tool.model_dump() for tool in body.tools or ()]
        choice = body.tool_choice or ("auto" if tools else "none")
        response = {
            "id": self.id,
            "object": "response",
            "created_at": self.created,
            "status": status,
            "error": None,
            "incomplete_details": None,
            "instructions": body.instructions,
            "metadata": body.metadata or {},
            "model": self.served.name,
            "output": output,
            "temperature": body.used_temperature,
            "top_p": 1.0 if body.top_p is None else body.top_p,
            "max_output_tokens": body.max_output_tokens,
            "previous_response_id": None,
            "store": False,
            "background": False,
            "text": {"format": self._format},
            "truncation": "disabled",
            "top_logprobs": body.top_logprobs or 0,
            "usage": None,
            "tools": tools,
            "tool_choice": choice if isinstance(choice, str) else choice.model_dump(),
            "parallel_tool_calls": bool(tools) and body.parallel_tool_calls is not False,
        }
        return response | fields


def failure_code(error: APIError) -> str:
    """OpenAI's code of a response that failed; other errors than the server's keep theirs, such as
    the client's own timeout."""
    if error.status == TOO_MANY_REQUESTS:
        return "rate_limit_exceeded"
    return "server_error" if error.status >= 500 else error.code or "invalid_prompt"
