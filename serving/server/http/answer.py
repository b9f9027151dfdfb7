"""The events of a conversation as JSON: in one object, or as server-sent events."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Sequence
from typing import Any

from fastapi.responses import JSONResponse, Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from serving.server.http.conversation import AnswerChoice, Conversation
from serving.server.http.errors import APIError
from serving.server.http.responses import ChatShape, Logprobs, RatedToken, Shape, Speculation, Usage, trace_of
from serving.server.http.schemas import Generation
from serving.server.model.served_model import ServedModel
from serving.server.scheduling.detokenize import TokenInfo
from serving.server.scheduling.ticket import Delta, End

STREAM_HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}


class Answer:
    """The events of a conversation as JSON, in one object or in pieces."""

    def __init__(self, served: ServedModel, conversation: Conversation, body: Generation, shape: Shape):
        self.served, self.conversation, self.body, self.shape = served, conversation, body, shape
        self.rated = body.alternatives is not None
        self.traced = body.decoding.trace is True
        self._logprobs: dict[int, Logprobs] = {c.index: shape.logprobs(served.token_text) for c in conversation.choices}
        self._begun: set[int] = set()

    async def whole(self) -> Response:
        """All choices in one object."""
        choices = self.conversation.choices
        texts: list[list[str]] = [[] for _ in choices]
        tokens: list[list[TokenInfo]] = [[] for _ in choices]
        try:
            while not self.conversation.over:
                choice, event = await self.conversation.next()
                if isinstance(event, Delta) and choice.shows:
                    texts[choice.index].append(event.text)
                    tokens[choice.index] += event.tokens
        finally:
            self.conversation.close()
        done = []
        for choice in choices:
            assert choice.end is not None
            rated = self._logprobs[choice.index].of(self._rated(choice, tokens[choice.index], first=True)) if self.rated else None
            reason = choice.end.finish_reason if choice.shows else "length"
            done.append(self.shape.whole(choice.index, choice.before + "".join(texts[choice.index]), reason, rated))
        trace = [entry for choice in choices for entry in trace_of(tokens[choice.index], choice.index)]
        fields = self._extension(self._stats() | ({"tokens": trace} if self.traced else {}))
        return JSONResponse(self.shape.answer(done, usage=self._usage().model_dump(), **fields))

    async def stream(self, first: tuple[AnswerChoice, Delta | End]) -> AsyncIterator[str]:
        """Server-sent events, from the first event of the conversation on."""
        usage: dict[str, Any] = {"usage": None} if self.body.wants_usage else {}
        choice, event = first
        try:
            while True:
                for chunk in self._chunks(choice, event):
                    yield sse(chunk | usage)
                if self.conversation.over:
                    break
                choice, event = await self.conversation.next()
        except APIError as error:
            yield sse(error.body)
            return
        if self.body.wants_usage:
            yield sse(self.shape.chunk(usage=self._usage().model_dump()))
        yield "data: [DONE]\n\n"

    def _chunks(self, choice: AnswerChoice, event: Delta | End) -> list[dict[str, Any]]:
        """The chunks of an event: the start of a choice, its text, or its end."""
        chunks = []
        index, first = choice.index, choice.index not in self._begun
        self._begun.add(index)
        if first and isinstance(self.shape, ChatShape):
            chunks.append(self.shape.chunk(self.shape.piece(index, "", first=True)))
        if isinstance(event, Delta):
            text, tokens = (event.text, event.tokens) if choice.shows else ("", ())
        else:
            text, tokens = "", ()
        if first:
            text = choice.before + text
        rated = self._rated(choice, tokens, first=first) if self.rated else []
        if text or rated or (tokens and self.traced):
            logprobs = self._logprobs[index].of(rated) if self.rated else None
            fields = self._extension({"tokens": trace_of(tokens, index)} if self.traced else {})
            chunks.append(self.shape.chunk(self.shape.piece(index, text, logprobs=logprobs), **fields))
        if isinstance(event, End):
            fields = self._extension(self._stats() if self.conversation.over else {})
            reason = event.finish_reason if choice.shows else "length"
            chunks.append(self.shape.chunk(self.shape.piece(index, None, reason), **fields))
        return chunks

    def _rated(self, choice: AnswerChoice, tokens: Sequence[TokenInfo], *, first: bool) -> list[RatedToken]:
        """Tokens with ratings: those of the prompt first, if it is echoed, then the choice's own."""
        own: list[RatedToken] = [(token.id, token.rating) for token in tokens]
        if first and choice.prompt_ratings:
            return [*zip(choice.prompt, choice.prompt_ratings, strict=True), *own]
        return own

    def _stats(self) -> dict[str, Any]:
        """Speculation statistics; empty if the client does not want them."""
        if self.body.decoding.stats is False:
            return {}
        choices = self.conversation.choices
        strategy = choices[0].ticket.strategy or self.served.strategy
        return Speculation.of(strategy.name, [choice.stats for choice in choices]).model_dump()

    def _extension(self, fields: dict[str, Any]) -> dict[str, Any]:
        return {"speculation": fields} if fields else {}

    def _usage(self) -> Usage:
        choices = self.conversation.choices
        prompts = sum(len(choice.prompt) for choice in choices) // (self.body.n or 1)
        accepted = sum(choice.text.accepted for choice in choices if choice.shows)
        return Usage.of(prompts, sum(choice.completion_tokens for choice in choices), accepted,
                        sum(choice.stats.drafted for choice in choices))


class EventStream(StreamingResponse):
    """Sends an answer in pieces. Its conversation is closed in any case, even if sending never began."""

    def __init__(self, answer: Answer, first: tuple[AnswerChoice, Delta | End]):
        super().__init__(answer.stream(first), media_type="text/event-stream", headers=STREAM_HEADERS)
        self._conversation = answer.conversation

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._conversation.close()


def sse(data: dict[str, Any]) -> str:
    """One server-sent event, in ASCII: some readers also split lines at U+2028 or U+0085."""
    return f"data: {json.dumps(data, separators=(',', ':'))}\n\n"
