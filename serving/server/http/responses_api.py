"""OpenAI's Responses API without stored state: the request, the response object, and the events of
its stream."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Sequence
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, model_validator
from pydantic_core import PydanticCustomError

from draftwell.serving.server.http.answer import Answer, Found
from draftwell.serving.server.http.calling import Calling, Choice
from draftwell.serving.server.http.conversation import AnswerChoice
from draftwell.serving.server.http.errors import APIError
from draftwell.serving.server.http.fields import Text, contradiction
from draftwell.serving.server.http.formats import Format, TextFormat
from draftwell.serving.server.http.messages import TemplateValues
from draftwell.serving.server.http.response_input import (
    FunctionChoice,
    FunctionTools,
    Input,
    tools_of,
    turns_of,
)
from draftwell.serving.server.http.response_items import Event, OutputItems
from draftwell.serving.server.http.responses import ChatShape
from draftwell.serving.server.http.tools import Tool
from draftwell.serving.server.scheduling.detokenize import TokenInfo
from draftwell.serving.server.scheduling.ticket import Delta, End

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
    """`text` of a request: its format, and how long-winded it is, which is not for this server to
    set."""

    model_config = ConfigDict(strict=True, extra="forbid")

    format: TextFormat | None = None
    verbosity: Literal["medium"] | None = None


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
    chat_template_kwargs: TemplateValues | None = Field(
        None, description="further values for the model's chat template, such as enable_thinking"
    )
    metadata: Annotated[dict[Short, Short], Field(max_length=16)] | None = Field(
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
            "function: that one; none"
        ),
    )

    OFF: ClassVar[dict[str, tuple[Any, ...]]] = Calling.OFF | {
        "truncation": ("disabled",),
        "background": (False,),
        "prompt": (),
    }

    @model_validator(mode="after")
    def refuse_state(self) -> Self:
        for name in ("previous_response_id", "conversation"):
            if getattr(self, name) is not None:
                raise PydanticCustomError(
                    "unsupported_field",
                    "this server keeps no responses, so it cannot continue one by {param}: send "
                    "the earlier messages as input",
                    {"param": name},
                )
        if (self.n or 1) > 1 or self.max_tokens is not None:
            name = "max_tokens" if self.max_tokens is not None else "n"
            raise PydanticCustomError(
                "unsupported_field",
                "a response does not take {param}: it is one answer of max_output_tokens",
                {"param": name},
            )
        if self.response_format is not None:
            raise PydanticCustomError(
                "unsupported_field",
                "a response does not take {param}: its format is in text",
                {"param": "response_format"},
            )
        if self.decoding.trace:
            raise PydanticCustomError(
                "unsupported_field",
                "a response has no place for {param}: ask /v1/chat/completions for it",
                {"param": "speculation.trace"},
            )
        asked = next((name for name in self.FORMATS if getattr(self, name) is not None), None)
        if asked and self.text is not None and self.text.format is not None:
            raise contradiction(asked, "cannot be combined with text.format: ask for one format")
        return self

    @property
    def functions(self) -> list[Tool]:
        return tools_of(self.tools or ())

    @property
    def choice(self) -> Choice:
        return self.tool_choice

    @property
    def asked_format(self) -> Format | None:
        own = (
            self.text.format.format("text.format")
            if self.text is not None and self.text.format is not None
            else None
        )
        return own or super().asked_format

    @property
    def token_limit(self) -> int | None:
        return self.max_output_tokens

    @property
    def alternatives(self) -> int | None:
        return (
            self.top_logprobs or 0
            if self.top_logprobs or LOGPROBS in (self.include or ())
            else None
        )

    @property
    def template_options(self) -> dict[str, Any]:
        """Keyword arguments for `ServedModel.encode_chat`."""
        return self.tool_options | (
            {"values": self.chat_template_kwargs} if self.chat_template_kwargs else {}
        )

    @property
    def messages(self) -> list[dict[str, Any]]:
        """The conversation as chat templates take it; instructions and a system message that begins
        the input are one."""
        turns = (
            [{"role": "user", "content": self.input}]
            if isinstance(self.input, str)
            else turns_of(self.input)
        )
        if not self.instructions:
            return turns
        if turns[0]["role"] == "system":
            return [
                {"role": "system", "content": f"{self.instructions}\n\n{turns[0]['content']}"},
                *turns[1:],
            ]
        return [{"role": "system", "content": self.instructions}, *turns]


class ResponseShape(ChatShape):
    """Id and date of a response."""

    prefix = "resp"


class ResponseAnswer(Answer):
    """The events of a conversation as a response, whole or streamed."""

    body: ResponsesRequest

    def _assembled(
        self, texts: Sequence[str], tokens: Sequence[Sequence[TokenInfo]]
    ) -> dict[str, Any]:
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
            data = {"type": kind, "sequence_number": number} | fields
            number += 1
            return f"event: {kind}\ndata: {json.dumps(data, separators=(',', ':'))}\n\n"

        def written(found: Sequence[Event]) -> str:
            return "".join(event(kind, **fields) for kind, fields in found)

        begun, items = self._response("in_progress", []), self._items
        yield event("response.created", response=begun)
        yield event("response.in_progress", response=begun)
        yield written(items.begin())

        def told(_: AnswerChoice, found: Delta | End) -> str:
            return (
                written(items.push(found.text, self._listed(found.tokens)))
                if isinstance(found, Delta)
                else ""
            )

        def ending() -> str:
            last = written(items.finish(self._status))
            ended = self._ended(items)
            return last + event(f"response.{ended['status']}", response=ended)

        try:
            async for piece in self.sent(first, told):
                yield piece
        except APIError as error:
            said = error.body["error"]
            failed = {"code": failure_code(error), "message": said["message"]}
            yield event(
                "response.failed", response=self._response("failed", []) | {"error": failed}
            )
            return
        yield await self.apart(ending)

    @property
    def _format(self) -> dict[str, Any]:
        """The text's format, as OpenAI's clients read it."""
        asked = self.body.text.format if self.body.text is not None else None
        if asked is None or asked.type != "json_schema":
            return {"type": "text" if asked is None else asked.type}
        return {
            "type": asked.type,
            "name": asked.name,
            "schema": asked.json_schema or {},
            "strict": asked.strict,
        }

    @property
    def _items(self) -> OutputItems:
        """What makes items of the answer's text."""
        return OutputItems(self.shape.id, self.body.parser() if self.body.offered else None)

    @property
    def _status(self) -> Literal["completed", "incomplete"]:
        """Of the complete response and its last item."""
        end = self.conversation.choices[0].end
        assert end is not None
        return "incomplete" if end.finish_reason == "length" else "completed"

    def _listed(self, tokens: Sequence[TokenInfo]) -> list[dict[str, Any]]:
        """Log-probs of tokens, if they were asked for; unlike in a chat, bytes are always a
        list."""
        if not self.rated:
            return []
        entries = self._logprobs[0].of([(token.id, token.rating) for token in tokens])["content"]
        for entry in entries:
            for one in (entry, *entry["top_logprobs"]):
                one["bytes"] = one["bytes"] or []
        return list(entries)

    def _ended(self, items: OutputItems) -> dict[str, Any]:
        """The complete response."""
        status = self._status
        usage = self._usage()
        cached = usage.prompt_tokens_details.cached_tokens
        counts = {
            "input_tokens": usage.prompt_tokens,
            "input_tokens_details": {"cached_tokens": cached, "cache_write_tokens": 0},
            "output_tokens": usage.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": usage.total_tokens,
        }
        why = (
            {"incomplete_details": {"reason": "max_output_tokens"}}
            if status == "incomplete"
            else {}
        )
        return (
            self._response(status, items.items)
            | why
            | {"usage": counts}
            | self._extension(self._stats())
        )

    def _response(self, status: str, output: list[dict[str, Any]]) -> dict[str, Any]:
        body = self.body
        tools = [{"type": "function"} | tool.model_dump() for tool in body.tools or ()]
        choice = body.tool_choice or ("auto" if tools else "none")
        calls = {
            "tools": tools,
            "tool_choice": choice if isinstance(choice, str) else choice.model_dump(),
            "parallel_tool_calls": bool(tools) and body.parallel_tool_calls is not False,
        }
        return {
            "id": self.shape.id,
            "object": "response",
            "created_at": self.shape.created,
            "status": status,
            "error": None,
            "incomplete_details": None,
            "instructions": body.instructions,
            "metadata": body.metadata or {},
            "model": self.shape.model,
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
        } | calls


def failure_code(error: APIError) -> str:
    """OpenAI's code of a response that failed; other errors than the server's keep theirs, such as
    the client's own timeout."""
    if error.status == 429:
        return "rate_limit_exceeded"
    return (
        "server_error"
        if error.status >= 500
        else str(error.body["error"]["code"] or "invalid_prompt")
    )
