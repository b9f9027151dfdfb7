"""OpenAI's Responses API without stored state: the request, the response object, and the events of its stream."""

from __future__ import annotations

import json
import uuid
from collections.abc import AsyncIterator, Sequence
from functools import partial
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, model_validator
from pydantic_core import PydanticCustomError

from serving.server.http.answer import PING, PING_SECONDS, Answer, Found
from serving.server.http.errors import APIError
from serving.server.http.formats import Format, TextFormat
from serving.server.http.responses import ChatShape
from serving.server.http.schemas import Generation, TemplateValues, Text, contradiction
from serving.server.scheduling.detokenize import TokenInfo
from serving.server.scheduling.ticket import Delta

LOGPROBS = "message.output_text.logprobs"
Included = Literal[
    "message.output_text.logprobs", "file_search_call.results", "web_search_call.results", "web_search_call.action.sources",
    "message.input_image.image_url", "computer_call_output.output.image_url", "code_interpreter_call.outputs",
    "reasoning.encrypted_content"]
"""OpenAI's values of `include`; all but the first are of tools, images and reasoning."""
Short = Annotated[str, StringConstraints(max_length=512)]


class InputPart(BaseModel):
    """A piece of a message's content; pieces of an earlier response are accepted as they came."""

    model_config = ConfigDict(strict=True, extra="ignore")

    type: Literal["input_text", "output_text", "refusal"]
    text: Text | None = None
    refusal: Text | None = None

    @model_validator(mode="after")
    def check_text(self) -> Self:
        if self.plain is None:
            raise PydanticCustomError("missing", "Field required: {name}", {"name": "refusal" if self.type == "refusal" else "text"})
        return self

    @property
    def plain(self) -> str | None:
        """What it says."""
        return self.refusal if self.type == "refusal" else self.text


class InputMessage(BaseModel):
    """One turn of a conversation; an item of an earlier response's output is one too."""

    model_config = ConfigDict(strict=True, extra="ignore")

    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: Text | Annotated[list[InputPart], Field(max_length=1024, fail_fast=True)]

    def plain(self) -> dict[str, str]:
        """Role and text, as chat templates take them."""
        text = self.content if isinstance(self.content, str) else "".join(part.plain or "" for part in self.content)
        return {"role": "system" if self.role == "developer" else self.role, "content": text}


class TextOptions(BaseModel):
    """`text` of a request: its format, and how long-winded it is, which is not for this server to set."""

    model_config = ConfigDict(strict=True, extra="forbid")

    format: TextFormat | None = None
    verbosity: Literal["medium"] | None = None


class ResponsesRequest(Generation):
    """Body of `POST /v1/responses`."""

    input: Text | Annotated[list[InputMessage], Field(min_length=1, max_length=2048, fail_fast=True)] = Field(
        description="text of a user, or messages")
    instructions: Text | None = Field(None, description="system message before the input")
    max_output_tokens: int | None = Field(None, ge=1, description="most tokens to generate; default: what the context leaves")
    top_logprobs: int | None = Field(None, ge=0, le=20, description="report this many of the most likely tokens at each position")
    include: Annotated[list[Included], Field(max_length=16)] | None = Field(
        None, description="message.output_text.logprobs: report the log-prob of every token; OpenAI's other values add nothing here")
    chat_template_kwargs: TemplateValues | None = Field(
        None, description="further values for the model's chat template, such as enable_thinking")
    metadata: Annotated[dict[Short, Short], Field(max_length=16)] | None = Field(None, description="returned as it is")
    text: TextOptions | None = Field(None, description="what the answer has to be: any text, a JSON object, or JSON by a schema")
    previous_response_id: str | None = None
    conversation: Any = None

    OFF: ClassVar[dict[str, tuple[Any, ...]]] = Generation.OFF | {
        "tools": ([],), "tool_choice": ("none", "auto"), "truncation": ("disabled",), "background": (False,), "prompt": (),
    }

    @model_validator(mode="after")
    def refuse_state(self) -> Self:
        for name in ("previous_response_id", "conversation"):
            if getattr(self, name) is not None:
                raise PydanticCustomError("unsupported_field", "this server keeps no responses, so it cannot continue one by {param}: send "
                                          "the earlier messages as input", {"param": name})
        if (self.n or 1) > 1 or self.max_tokens is not None:
            name = "max_tokens" if self.max_tokens is not None else "n"
            raise PydanticCustomError("unsupported_field", "a response does not take {param}: it is one answer of max_output_tokens",
                                      {"param": name})
        if self.response_format is not None:
            raise PydanticCustomError("unsupported_field", "a response does not take {param}: its format is in text",
                                      {"param": "response_format"})
        asked = next((name for name in self.FORMATS if getattr(self, name) is not None), None)
        if asked and self.text is not None and self.text.format is not None:
            raise contradiction(asked, "cannot be combined with text.format: ask for one format")
        return self

    @property
    def format(self) -> Format | None:
        own = self.text.format.format("text.format") if self.text is not None and self.text.format is not None else None
        return own or super().format

    @property
    def token_limit(self) -> int | None:
        return self.max_output_tokens

    @property
    def alternatives(self) -> int | None:
        return self.top_logprobs or 0 if self.top_logprobs or LOGPROBS in (self.include or ()) else None

    @property
    def template_options(self) -> dict[str, Any]:
        """Keyword arguments for `ServedModel.encode_chat`."""
        return {"values": self.chat_template_kwargs} if self.chat_template_kwargs else {}

    @property
    def messages(self) -> list[dict[str, Any]]:
        """The conversation as chat templates take it; instructions and a system message that begins the input are one."""
        turns = [{"role": "user", "content": self.input}] if isinstance(self.input, str) else [m.plain() for m in self.input]
        if not self.instructions:
            return turns
        if turns[0]["role"] == "system":
            return [{"role": "system", "content": f"{self.instructions}\n\n{turns[0]['content']}"}, *turns[1:]]
        return [{"role": "system", "content": self.instructions}, *turns]


class ResponseShape(ChatShape):
    """Id and date of a response."""

    prefix = "resp"


class ResponseAnswer(Answer):
    """The events of a conversation as a response, whole or streamed."""

    body: ResponsesRequest

    def _assembled(self, texts: Sequence[str], tokens: Sequence[Sequence[TokenInfo]]) -> dict[str, Any]:
        return self._ended(texts[0], self._listed(tokens[0]))

    async def stream(self, first: Found | None) -> AsyncIterator[str]:
        """Server-sent events as OpenAI's clients read them, each with its number; a comment wherever there is none for `PING_SECONDS`."""
        number = 0

        def event(kind: str, **fields: Any) -> str:
            nonlocal number
            data = {"type": kind, "sequence_number": number} | fields
            number += 1
            return f"event: {kind}\ndata: {json.dumps(data, separators=(',', ':'))}\n\n"

        begun = self._response("in_progress", [])
        item = {"item_id": self._item_id, "output_index": 0, "content_index": 0}
        yield event("response.created", response=begun)
        yield event("response.in_progress", response=begun)
        yield event("response.output_item.added", output_index=0, item=self._item("in_progress", []))
        yield event("response.content_part.added", **item, part=part_of("", []))
        texts, listed = list[str](), list[dict[str, Any]]()

        def written(delta: Delta) -> str:
            more = self._listed(delta.tokens)
            texts.append(delta.text)
            listed.extend(more)
            return event("response.output_text.delta", **item, delta=delta.text, logprobs=more) if delta.text or more else ""

        def ending() -> str:
            text = "".join(texts)
            ended = self._ended(text, listed)
            return (event("response.output_text.done", **item, text=text, logprobs=listed)
                    + event("response.content_part.done", **item, part=part_of(text, listed))
                    + event("response.output_item.done", output_index=0, item=ended["output"][0])
                    + event(f"response.{ended['status']}", response=ended))

        found = first
        try:
            while True:
                if found is None:
                    yield PING
                elif isinstance(found[1], Delta) and (piece := await self.apart(partial(written, found[1]))):
                    yield piece
                if self.conversation.over:
                    break
                found = await self.conversation.next(PING_SECONDS)
        except APIError as error:
            said = error.body["error"]
            failed = {"code": failure_code(error), "message": said["message"]}
            yield event("response.failed", response=self._response("failed", []) | {"error": failed})
            return
        yield await self.apart(ending)

    @property
    def _format(self) -> dict[str, Any]:
        """The text's format, as OpenAI's clients read it."""
        asked = self.body.text.format if self.body.text is not None else None
        if asked is None or asked.type != "json_schema":
            return {"type": "text" if asked is None else asked.type}
        return {"type": asked.type, "name": asked.name, "schema": asked.json_schema or {}, "strict": asked.strict}

    @property
    def _item_id(self) -> str:
        return f"msg_{uuid.uuid5(uuid.NAMESPACE_OID, self.shape.id).hex}"

    def _listed(self, tokens: Sequence[TokenInfo]) -> list[dict[str, Any]]:
        """Log-probs of tokens, if they were asked for; unlike in a chat, bytes are always a list."""
        if not self.rated:
            return []
        entries = self._logprobs[0].of([(token.id, token.rating) for token in tokens])["content"]
        for entry in entries:
            for one in (entry, *entry["top_logprobs"]):
                one["bytes"] = one["bytes"] or []
        return list(entries)

    def _ended(self, text: str, logprobs: list[dict[str, Any]]) -> dict[str, Any]:
        """The complete response."""
        end = self.conversation.choices[0].end
        assert end is not None
        status = "incomplete" if end.finish_reason == "length" else "completed"
        usage = self._usage()
        cached = usage.prompt_tokens_details.cached_tokens
        counts = {"input_tokens": usage.prompt_tokens, "input_tokens_details": {"cached_tokens": cached, "cache_write_tokens": 0},
                  "output_tokens": usage.completion_tokens, "output_tokens_details": {"reasoning_tokens": 0},
                  "total_tokens": usage.total_tokens}
        why = {"incomplete_details": {"reason": "max_output_tokens"}} if status == "incomplete" else {}
        output = [self._item(status, [part_of(text, logprobs)])]
        return self._response(status, output) | why | {"usage": counts} | self._extension(self._stats())

    def _item(self, status: str, content: list[dict[str, Any]]) -> dict[str, Any]:
        return {"id": self._item_id, "type": "message", "role": "assistant", "status": status, "content": content}

    def _response(self, status: str, output: list[dict[str, Any]]) -> dict[str, Any]:
        body = self.body
        return {"id": self.shape.id, "object": "response", "created_at": self.shape.created, "status": status, "error": None,
                "incomplete_details": None, "instructions": body.instructions, "metadata": body.metadata or {}, "model": self.shape.model,
                "output": output, "parallel_tool_calls": False, "temperature": body.used_temperature,
                "top_p": 1.0 if body.top_p is None else body.top_p, "tool_choice": "none", "tools": [],
                "max_output_tokens": body.max_output_tokens, "previous_response_id": None, "store": False, "background": False,
                "text": {"format": self._format}, "truncation": "disabled", "top_logprobs": body.top_logprobs or 0, "usage": None}


def failure_code(error: APIError) -> str:
    """OpenAI's code of a response that failed; other errors than the server's keep theirs, such as the client's own timeout."""
    if error.status == 429:
        return "rate_limit_exceeded"
    return "server_error" if error.status >= 500 else str(error.body["error"]["code"] or "invalid_prompt")


def part_of(text: str, logprobs: list[dict[str, Any]]) -> dict[str, Any]:
    """A message's content."""
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}
