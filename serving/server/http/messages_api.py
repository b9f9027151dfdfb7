"""Anthropic's Messages API, as vLLM serves it: a request becomes that of a chat, its answer content
blocks, whole or streamed. What a model of texts has no use for, such as thinking budgets and cache
marks, is left out; images and documents are refused."""

from __future__ import annotations

import json
import uuid
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Annotated, Any, Literal

from fastapi.exceptions import RequestValidationError
from pydantic import (
    BaseModel,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    ValidationError,
    model_validator,
)
from pydantic_core import PydanticCustomError

from draftwell.serving.server.http.conversation import AnswerChoice, Conversation
from draftwell.serving.server.http.errors import APIError, anthropic_body
from draftwell.serving.server.http.rendering import PING, ChatAnswer, Found, Json, sse
from draftwell.serving.server.http.requests import (
    MOST_TOOLS,
    ChatRequest,
    FunctionName,
    JsonObject,
    Label,
    Name,
    SpeculationOptions,
    StopString,
    Text,
    contradiction,
    type_of,
)
from draftwell.serving.server.http.tool_calls import Piece, TextPiece
from draftwell.serving.server.model.served_model import ServedModel
from draftwell.serving.server.scheduling.detokenize import TokenInfo
from draftwell.serving.server.scheduling.ticket import Delta, End

MOST_BLOCKS = 1024


class Part(BaseModel):
    """Base of what a request is made of; fields that it does not have are left out."""

    model_config = ConfigDict(strict=True, extra="ignore")


class TextBlock(Part):
    """A piece of text."""

    type: Literal["text"]
    text: Text


class ThinkingBlock(Part):
    """What an assistant thought; redacted thoughts have no text."""

    type: Literal["thinking", "redacted_thinking"]
    thinking: Text = ""


class UseBlock(Part):
    """A call that an assistant has made."""

    type: Literal["tool_use"]
    id: Label
    name: Label
    input: JsonObject


class OtherBlock(Part):
    """A block that no model of texts can read."""

    type: Label

    @model_validator(mode="after")
    def refuse(self) -> OtherBlock:
        message = "this model takes and writes text only: leave blocks of the type {kind} out"
        raise PydanticCustomError("unsupported_block", message, {"kind": self.type})


def block_kind(block: Any) -> str:
    """Which block it is; a tag has a bracket, so that `field_path` leaves it out."""
    kind = type_of(block)
    known = ("text", "thinking", "redacted_thinking", "tool_use", "tool_result")
    return f"[{kind.removeprefix('redacted_')}]" if kind in known else "[other]"


Texts = Annotated[
    list[
        Annotated[
            Annotated[TextBlock, Tag("[text]")] | Annotated[OtherBlock, Tag("[other]")],
            Discriminator(lambda one: "[text]" if block_kind(one) == "[text]" else "[other]"),
        ]
    ],
    Field(max_length=MOST_BLOCKS, fail_fast=True),
]


class ResultBlock(Part):
    """What a function that was called has returned."""

    type: Literal["tool_result"]
    tool_use_id: Label
    content: Text | Texts | None = None


Block = Annotated[
    Annotated[TextBlock, Tag("[text]")]
    | Annotated[ThinkingBlock, Tag("[thinking]")]
    | Annotated[UseBlock, Tag("[tool_use]")]
    | Annotated[ResultBlock, Tag("[tool_result]")]
    | Annotated[OtherBlock, Tag("[other]")],
    Discriminator(block_kind),
]


def joined(content: str | Sequence[Any] | None) -> str:
    """The text of a content."""
    if content is None or isinstance(content, str):
        return content or ""
    return "".join(block.text for block in content if isinstance(block, TextBlock))


class Turn(Part):
    """One turn of a conversation."""

    role: Literal["user", "assistant", "system"]
    content: Text | Annotated[list[Block], Field(max_length=MOST_BLOCKS, fail_fast=True)]

    def chat_messages(self) -> Iterator[Json]:
        """As a chat has it: results of calls are messages of their own, before the text."""
        blocks = [] if isinstance(self.content, str) else self.content
        results = [block for block in blocks if isinstance(block, ResultBlock)]
        for block in results:
            text = joined(block.content)
            yield {"role": "tool", "tool_call_id": block.tool_use_id, "content": text}
        said: Json = {"role": self.role, "content": joined(self.content)}
        if calls := [block for block in blocks if isinstance(block, UseBlock)]:
            said["tool_calls"] = [called(block) for block in calls]
        if thought := "".join(one.thinking for one in blocks if isinstance(one, ThinkingBlock)):
            said["reasoning"] = thought
        if said["content"] or not results:
            yield said


def called(block: UseBlock) -> Json:
    """A call as a chat has it."""
    function = {"name": block.name, "arguments": json.dumps(block.input)}
    return {"id": block.id, "type": "function", "function": function}


class FunctionTool(Part):
    """A function that may be called; there are no tools of the server's."""

    name: FunctionName
    description: str | None = None
    input_schema: JsonObject
    strict: bool | None = None

    def plain(self) -> Json:
        """As a chat has it."""
        function = {"name": self.name, "parameters": self.input_schema}
        about = {"description": self.description, "strict": self.strict}
        return {"type": "function", "function": function | about}


class ToolChoice(Part):
    """Whether to call functions, or which."""

    type: Literal["auto", "any", "tool", "none"]
    name: FunctionName | None = None
    disable_parallel_tool_use: bool | None = None

    @model_validator(mode="after")
    def check_name(self) -> ToolChoice:
        if self.type == "tool" and self.name is None:
            raise contradiction("tool_choice", "of the type tool needs a name")
        return self

    def plain(self) -> str | Json:
        """As a chat has it."""
        if self.type == "tool":
            return {"type": "function", "function": {"name": self.name}}
        return "required" if self.type == "any" else self.type


class OutputFormat(Part):
    """JSON by a schema."""

    type: Literal["json_schema"]
    json_schema: JsonObject = Field(alias="schema")


class OutputConfig(Part):
    """What the answer has to be; efforts change nothing."""

    format: OutputFormat | None = None


class CountRequest(Part):
    """Body of `POST /v1/messages/count_tokens`."""

    model: Name
    messages: Annotated[list[Turn], Field(min_length=1, max_length=2048, fail_fast=True)]
    system: Text | Texts | None = None
    tools: Annotated[list[FunctionTool], Field(max_length=MOST_TOOLS)] | None = None
    tool_choice: ToolChoice | None = None

    def chat(self, **more: Any) -> ChatRequest:
        """The same request of a chat.

        Raises:
            RequestValidationError: it cannot be one; names the field.
        """
        first = [{"role": "system", "content": joined(self.system)}] if self.system else []
        turns, places = first, list[tuple[str | int, ...]](("system",) for _ in first)
        for index, turn in enumerate(self.messages):
            said = list(turn.chat_messages())
            turns += said
            places += [("messages", index, "content") for _ in said]
        asked: Json = {"model": self.model, "messages": turns, **more}
        if self.messages[-1].role == "assistant":
            asked["continue_final_message"] = True
        if self.tools:
            asked["tools"] = [tool.plain() for tool in self.tools]
        if choice := self.tool_choice:
            asked["tool_choice"] = choice.plain()
            asked["parallel_tool_calls"] = False if choice.disable_parallel_tool_use else None
        try:
            return ChatRequest.model_validate(asked)
        except ValidationError as error:
            found = error.errors()
            for one in found:
                match one["loc"]:
                    case ("messages", int(index), *_):
                        one["loc"] = ("body", *places[index])
                    case place:
                        one["loc"] = ("body", *place)
            raise RequestValidationError(found) from error


class MessagesRequest(CountRequest):
    """Body of `POST /v1/messages`."""

    max_tokens: int = Field(ge=1, description="most tokens to generate")
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    stop_sequences: Annotated[list[StopString], Field(max_length=16)] | None = None
    stream: bool | None = None
    output_config: OutputConfig | None = None
    speculation: SpeculationOptions | None = Field(
        None, description="Draftwell's extension, as in a chat, but without trace"
    )

    @model_validator(mode="after")
    def refuse_trace(self) -> MessagesRequest:
        if self.speculation and self.speculation.trace:
            message = "a message has no place for {param}: ask /v1/chat/completions for it"
            raise PydanticCustomError("unsupported_field", message, {"param": "speculation.trace"})
        return self

    def chat(self, **more: Any) -> ChatRequest:
        asked: Json = {
            "max_tokens": self.max_tokens,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": self.top_k,
            "stop": self.stop_sequences,
            "stream": self.stream,
            "speculation": self.speculation,
        }
        if self.output_config and (wanted := self.output_config.format):
            named = {"name": "answer", "schema": wanted.json_schema}
            asked["response_format"] = {"type": "json_schema", "json_schema": named}
        return super().chat(**asked, **more)


class MessageAnswer(ChatAnswer):
    """The events of a conversation as a message of content blocks."""

    def __init__(
        self, served: ServedModel, fingerprint: str, conversation: Conversation, body: ChatRequest
    ):
        super().__init__(served, fingerprint, conversation, body)
        self.id = f"msg_{uuid.uuid4().hex}"
        self.blocks: list[Json] = []
        self._arguments = ""  # of the call that is open, as JSON

    def _assembled(self, texts: Sequence[str], tokens: Sequence[Sequence[TokenInfo]]) -> Json:
        _ = [*self._pushed(texts[0]), *self._finished()]
        return self._message(self.blocks) | self._ended() | self._extension(self._stats())

    async def stream(self, first: Found | None) -> AsyncIterator[str]:
        """Server-sent events as Anthropic's clients read them; a ping wherever nothing is sent for
        long."""
        begun = self._message([]) | {"usage": self._counts() | {"output_tokens": 0}}
        yield event("message_start", message=begun) + event("ping")
        try:
            async for piece in self.sent(first, self._written):
                yield event("ping") if piece == PING else piece
        except APIError as error:
            yield sse(anthropic_body(error), "error")
            return
        ended = self._ended()
        usage = ended.pop("usage")
        last = self._extension(self._stats())
        yield event("message_delta", delta=ended, usage=usage, **last) + event("message_stop")

    def _written(self, choice: AnswerChoice, found: Delta | End) -> str:
        return "".join(self._finished() if isinstance(found, End) else self._pushed(found.text))

    def _pushed(self, text: str) -> Iterator[str]:
        """The events of more text."""
        parser = self._parsers.get(0)
        pieces: Sequence[Piece] = [TextPiece(text)] if text else []
        for piece in parser.push(text) if parser else pieces:
            yield from self._added(piece)

    def _finished(self) -> Iterator[str]:
        """The events of the rest, when no text follows; without any it is an empty text."""
        for piece in self._parsers[0].finish() if self._parsers else ():
            yield from self._added(piece)
        if not self.blocks:
            yield from self._block_begun({"type": "text", "text": ""})
        yield from self._block_ended()

    def _added(self, piece: Piece) -> Iterator[str]:
        if isinstance(piece, TextPiece):
            if not self.blocks or self.blocks[-1]["type"] != "text":
                yield from self._block_begun({"type": "text", "text": ""})
            self.blocks[-1]["text"] += piece.text
            yield self._delta("text_delta", text=piece.text)
            return
        if piece.id is not None:
            yield from self._block_begun(
                {"type": "tool_use", "id": piece.id, "name": piece.name, "input": {}}
            )
        if piece.arguments:
            self._arguments += piece.arguments
            yield self._delta("input_json_delta", partial_json=piece.arguments)

    def _block_begun(self, block: Json) -> Iterator[str]:
        yield from self._block_ended()
        self.blocks.append(block)
        yield event("content_block_start", index=len(self.blocks) - 1, content_block=block)

    def _block_ended(self) -> Iterator[str]:
        """The end of the last block."""
        if not self.blocks:
            return
        if self._arguments:
            self.blocks[-1]["input"] = read_arguments(self._arguments)
            self._arguments = ""
        yield event("content_block_stop", index=len(self.blocks) - 1)

    def _delta(self, kind: str, **fields: str) -> str:
        delta = {"type": kind, **fields}
        return event("content_block_delta", index=len(self.blocks) - 1, delta=delta)

    def _message(self, blocks: Sequence[Json]) -> Json:
        return {
            "id": self.id,
            "type": "message",
            "role": "assistant",
            "model": self.served.name,
            "content": list(blocks),
            "stop_reason": None,
            "stop_sequence": None,
        }

    def _ended(self) -> Json:
        """Why the message has ended, and what it took."""
        choice = self.conversation.choices[0]
        reason, found = self._reason(choice), choice.text.stop_string
        kinds = {"length": "max_tokens", "tool_calls": "tool_use"}
        stop = "stop_sequence" if reason == "stop" and found is not None else "end_turn"
        return {
            "stop_reason": kinds.get(reason, stop),
            "stop_sequence": found if stop == "stop_sequence" else None,
            "usage": self._counts(),
        }

    def _counts(self) -> Json:
        """Tokens so far; `input_tokens` are those of the prompt that were not cached."""
        usage = self._usage()
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        return {
            "input_tokens": usage["prompt_tokens"] - cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": cached,
            "output_tokens": usage["completion_tokens"],
        }


def event(kind: str, **fields: Any) -> str:
    """One event of a stream."""
    return sse({"type": kind, **fields}, kind)


def read_arguments(text: str) -> Json:
    """Arguments of a call; none where the answer was cut within them."""
    try:
        read = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return read if isinstance(read, dict) else {}
