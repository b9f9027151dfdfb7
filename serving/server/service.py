"""From a checked request to an answer: prompt to tokens, a ticket through the scheduler, events to JSON."""

from __future__ import annotations

import asyncio
import json
import secrets
from collections.abc import AsyncIterator, Sequence
from types import TracebackType
from typing import Any, Self

from fastapi import Request
from fastapi.responses import JSONResponse, Response, StreamingResponse

from serving.runtime.types import ContextTooLong, DraftwellError, Sampling
from serving.server.detokenize import TextStream
from serving.server.errors import APIError, internal_error
from serving.server.responses import ChatShape, CompletionShape, Shape, Speculation, Usage
from serving.server.scheduler import Cancelled, Delta, End, Event, Failure, Scheduler, SchedulerClosed, Ticket
from serving.server.schemas import ChatRequest, CompletionRequest, Generation
from serving.server.served import ServedModel

DEFAULT_COMPLETION_TOKENS = 16
"""OpenAI's default of `max_tokens` for plain completions; a chat may fill the context."""

STREAM_HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
CLIENT_CLOSED_REQUEST = 499


class Conversation:
    """A ticket's events on asyncio's side. Leaving the context, or the client going away, cancels the ticket."""

    def __init__(self, scheduler: Scheduler, request: Request):
        self._scheduler, self._request = scheduler, request
        self._loop = asyncio.get_running_loop()
        self._events: asyncio.Queue[Event] = asyncio.Queue()
        self._ticket: Ticket | None = None

    def submit(self, prompt: Sequence[int], sampling: Sampling, text: TextStream) -> None:
        """Queue the request; raises APIError 503 when the server is going down."""
        self._ticket = Ticket(prompt, sampling, text, self._deliver)
        try:
            self._scheduler.submit(self._ticket)
        except SchedulerClosed as error:
            raise APIError(503, str(error)) from error

    async def next(self) -> Event:
        """The next event."""
        return await self._events.get()

    async def __aenter__(self) -> Self:
        self._watcher = asyncio.create_task(self._cancel_when_gone())
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._watcher.cancel()
        if self._ticket:
            self._ticket.cancel()

    def _deliver(self, event: Event) -> None:
        try:
            self._loop.call_soon_threadsafe(self._events.put_nowait, event)
        except RuntimeError:  # the loop is closed: nobody listens any more
            if self._ticket:
                self._ticket.cancel()

    async def _cancel_when_gone(self) -> None:
        while (await self._request.receive())["type"] != "http.disconnect":
            pass
        if self._ticket:
            self._ticket.cancel()


class Service:
    """Answers requests for one served model."""

    def __init__(self, served: ServedModel, scheduler: Scheduler):
        self.served, self.scheduler = served, scheduler

    async def chat(self, body: ChatRequest, request: Request) -> Response:
        """Answer `/v1/chat/completions`."""
        self._check_model(body.model)
        try:
            prompt = await asyncio.to_thread(self.served.encode_chat, [m.plain() for m in body.messages])
        except DraftwellError as error:
            raise APIError(400, str(error), param="messages") from error
        return await self._respond(body, request, prompt, "messages", ChatShape(self.served.name), None)

    async def complete(self, body: CompletionRequest, request: Request) -> Response:
        """Answer `/v1/completions`."""
        self._check_model(body.model)
        prompt = body.single_prompt()
        if prompt is None:
            raise APIError(400, "this server takes one prompt per request: send one request for each", param="prompt")
        if isinstance(prompt, str):
            prompt = await asyncio.to_thread(self.served.encode, prompt)
        elif any(not 0 <= token < self.served.vocab_size for token in prompt):
            raise APIError(400, f"token ids must be from 0 to {self.served.vocab_size - 1}", param="prompt")
        shape = CompletionShape(self.served.name)
        return await self._respond(body, request, prompt, "prompt", shape, DEFAULT_COMPLETION_TOKENS)

    def _check_model(self, name: str) -> None:
        if name != self.served.name:
            raise APIError(404, f"the model '{name}' does not exist: this server has '{self.served.name}'", param="model",
                           code="model_not_found")

    async def _respond(self, body: Generation, request: Request, prompt: list[int], field: str, shape: Shape,
                       default_tokens: int | None) -> Response:
        sampling = self._sampling(body, len(prompt), field, default_tokens)
        text = TextStream(self.served.decode, body.stop_strings)
        conversation = Conversation(self.scheduler, request)
        if body.stream:
            if not self.scheduler.accepts:
                raise APIError(503, "the server is shutting down")
            events = self._stream(conversation, prompt, sampling, text, shape, body.wants_usage)
            return StreamingResponse(events, media_type="text/event-stream", headers=STREAM_HEADERS)
        return await self._whole(conversation, prompt, sampling, text, shape)

    def _sampling(self, body: Generation, prompt_tokens: int, field: str, default_tokens: int | None) -> Sampling:
        """The request's sampling parameters; a budget that was not given is what the context leaves."""
        room = self.served.max_context - prompt_tokens
        if prompt_tokens == 0:
            raise APIError(400, "the prompt is empty: give at least one token", param=field)
        budget = body.token_limit or min(room, default_tokens or room)
        if budget > room or room < 1:
            wanted = f"{prompt_tokens} in the {field}" + (f", {body.token_limit} to generate" if body.token_limit else "")
            raise APIError(400, f"this model's maximum context length is {self.served.max_context} tokens, and you asked for more "
                                f"({wanted}): shorten the {field} or the completion", param=field, code="context_length_exceeded")
        seed = secrets.randbits(63) if body.seed is None else body.seed
        return self.served.pair.sampling(max_tokens=budget, seed=seed, **body.sampling_settings())

    async def _whole(self, conversation: Conversation, prompt: list[int], sampling: Sampling, text: TextStream, shape: Shape) -> Response:
        pieces = []
        async with conversation:
            conversation.submit(prompt, sampling, text)
            while isinstance(event := await conversation.next(), Delta):
                pieces.append(event.text)
        if isinstance(event, End):
            return JSONResponse(shape.answer("".join(pieces), event, *self._account(prompt, event)))
        raise self._error(event)

    async def _stream(self, conversation: Conversation, prompt: list[int], sampling: Sampling, text: TextStream, shape: Shape,
                      with_usage: bool) -> AsyncIterator[str]:
        usage_field: dict[str, Any] = {"usage": None} if with_usage else {}
        async with conversation:
            try:
                conversation.submit(prompt, sampling, text)
                if isinstance(shape, ChatShape):
                    yield sse(shape.chunk(shape.piece("", first=True), **usage_field))
                while isinstance(event := await conversation.next(), Delta):
                    yield sse(shape.chunk(shape.piece(event.text), **usage_field))
                if not isinstance(event, End):
                    raise self._error(event)
            except APIError as error:
                yield sse(error.body)
                return
        usage, speculation = self._account(prompt, event)
        yield sse(shape.chunk(shape.piece(None, event.finish_reason), speculation=speculation.model_dump(), **usage_field))
        if with_usage:
            yield sse(shape.chunk(usage=usage.model_dump()))
        yield "data: [DONE]\n\n"

    def _account(self, prompt: list[int], end: End) -> tuple[Usage, Speculation]:
        return Usage.of(len(prompt), end), Speculation.of(self.served.strategy, end)

    def _error(self, event: Event) -> APIError:
        if isinstance(event, Failure) and isinstance(event.error, ContextTooLong):
            return APIError(400, str(event.error), code="context_length_exceeded")
        if isinstance(event, Failure):
            return internal_error(event.error)
        assert isinstance(event, Cancelled)
        if self.scheduler.accepts:
            return APIError(CLIENT_CLOSED_REQUEST, "the client closed the request")
        return APIError(503, "the server is shutting down")


def sse(data: dict[str, Any]) -> str:
    """One server-sent event."""
    return f"data: {json.dumps(data, ensure_ascii=False, separators=(',', ':'))}\n\n"
