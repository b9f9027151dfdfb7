"""The events of a conversation as JSON: in one object, or as server-sent events."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

from fastapi.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from draftwell.serving.server.http.conversation import AnswerChoice, Conversation
from draftwell.serving.server.http.errors import APIError
from draftwell.serving.server.http.generation import Generation
from draftwell.serving.server.http.responses import (
    ChatShape,
    Logprobs,
    RatedToken,
    Shape,
    Speculation,
    Usage,
    trace_of,
)
from draftwell.serving.server.model.served_model import ServedModel
from draftwell.serving.server.scheduling.detokenize import TokenInfo
from draftwell.serving.server.scheduling.ticket import Delta, End

Found = tuple[AnswerChoice, Delta | End]
T = TypeVar("T")

PING_SECONDS = 15.0
"""How long a stream may be silent: proxies and clients close connections that are so for a minute
or less."""
PING = ": ping\n\n"
"""A comment, which readers of server-sent events skip."""
WRITERS, STREAMERS = (
    ThreadPoolExecutor(2, thread_name_prefix=name) for name in ("answer", "stream")
)
"""Threads of whole answers, and of the events of streams: these do not wait for answers of seconds,
nor for prompts to be encoded."""
STREAM_HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}


class Answer:
    """The events of a conversation as JSON, in one object or in pieces."""

    def __init__(
        self, served: ServedModel, conversation: Conversation, body: Generation, shape: Shape
    ):
        self.served, self.conversation, self.body, self.shape = served, conversation, body, shape
        self.rated = body.alternatives is not None
        self.traced = body.decoding.trace is True
        self._logprobs: dict[int, Logprobs] = {
            c.index: shape.logprobs(served.token_text) for c in conversation.choices
        }
        self._begun: set[int] = set()
        self._told: Counter[int] = Counter()
        """Choice → tokens of the chunks so far."""

    async def collect(self) -> tuple[list[str], list[list[TokenInfo]]]:
        """Text and tokens of every choice, once all have ended."""
        choices = self.conversation.choices
        texts: list[list[str]] = [[] for _ in choices]
        tokens: list[list[TokenInfo]] = [[] for _ in choices]
        try:
            while not self.conversation.over:
                found = await self.conversation.next()
                assert found is not None
                choice, event = found
                if isinstance(event, Delta) and choice.shows:
                    texts[choice.index].append(event.text)
                    tokens[choice.index] += event.tokens
        finally:
            self.conversation.close()
        return ["".join(pieces) for pieces in texts], tokens

    async def whole(self) -> Response:
        """All choices in one object."""
        texts, tokens = await self.collect()

        def written() -> bytes:
            return as_json(self._assembled(texts, tokens)).encode()

        return Response(await self.apart(written, WRITERS), media_type="application/json")

    async def apart(self, write: Callable[[], T], pool: ThreadPoolExecutor = STREAMERS) -> T:
        """What `write` returns, in a thread where log-probs or origins of tokens are listed: tens
        of thousands may have to be spelt and written."""
        if not self.rated and not self.traced:
            return write()
        return await asyncio.get_running_loop().run_in_executor(pool, write)

    def _assembled(
        self, texts: Sequence[str], tokens: Sequence[Sequence[TokenInfo]]
    ) -> dict[str, Any]:
        choices = self.conversation.choices
        done = []
        for choice in choices:
            rated = (
                self._logprobs[choice.index].of(
                    self._rated(choice, tokens[choice.index], first=True)
                )
                if self.rated
                else None
            )
            done.append(self._whole(choice, choice.before + texts[choice.index], rated))
        trace = [
            entry for choice in choices for entry in trace_of(tokens[choice.index], choice.index)
        ]
        fields = self._extension(self._stats() | ({"tokens": trace} if self.traced else {}))
        return self.shape.answer(done, usage=self._usage().model_dump(), **fields)

    async def stream(self, first: Found | None) -> AsyncIterator[str]:
        """Server-sent events, from the first event of the conversation on, with comments as `sent`
        has them."""
        try:
            async for piece in self.sent(first, self._pieces):
                yield piece
        except APIError as error:
            yield sse(error.body)
            return
        if self.body.wants_usage:
            yield sse(self.shape.chunk(usage=self._usage().model_dump()))
        yield "data: [DONE]\n\n"

    async def sent(
        self, first: Found | None, write: Callable[[AnswerChoice, Delta | End], str]
    ) -> AsyncIterator[str]:
        """What `write` makes of the conversation's events; a comment wherever nothing is sent for
        `PING_SECONDS`, also where events have come of which nothing may be shown yet, such as the
        parts of a call."""
        clock = asyncio.get_running_loop().time
        found, due = first, clock() + PING_SECONDS
        while True:
            piece = await self.apart(partial(write, *found)) if found is not None else ""
            if piece or found is None or clock() >= due:
                yield piece or PING
                due = clock() + PING_SECONDS
            if self.conversation.over:
                return
            found = await self.conversation.next(due - clock())

    def _pieces(self, choice: AnswerChoice, event: Delta | End) -> str:
        """The chunks of an event as server-sent events; "" where there is none."""
        usage: dict[str, Any] = {"usage": None} if self.body.wants_usage else {}
        if self.body.wants_usage_so_far:
            prompt = len(choice.prompt)
            self._told[choice.index] += (
                len(event.tokens) if isinstance(event, Delta) and choice.shows else 0
            )
            tokens = (
                choice.completion_tokens if isinstance(event, End) else self._told[choice.index]
            )
            usage = {
                "usage": {
                    "prompt_tokens": prompt,
                    "completion_tokens": tokens,
                    "total_tokens": prompt + tokens,
                }
            }
        return "".join(sse(chunk | usage) for chunk in self._chunks(choice, event))

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
            chunks += self._said(choice, text, logprobs, fields)
        if isinstance(event, End):
            chunks += self._rest(choice)
            fields = self._extension(self._stats() if self.conversation.over else {})
            chunks.append(
                self.shape.chunk(self.shape.piece(index, None, self._reason(choice)), **fields)
            )
        return chunks

    def _whole(
        self, choice: AnswerChoice, text: str, logprobs: dict[str, Any] | None
    ) -> dict[str, Any]:
        """A choice of the complete answer."""
        return self.shape.whole(choice.index, text, self._reason(choice), logprobs)

    def _said(
        self,
        choice: AnswerChoice,
        text: str,
        logprobs: dict[str, Any] | None,
        fields: dict[str, Any],
    ) -> list[dict[str, Any]]:
        """Chunks of more text."""
        return [self.shape.chunk(self.shape.piece(choice.index, text, logprobs=logprobs), **fields)]

    def _rest(self, choice: AnswerChoice) -> list[dict[str, Any]]:
        """Chunks of what was held back until the end."""
        return []

    def _reason(self, choice: AnswerChoice) -> str:
        """Why a choice has ended."""
        assert choice.end is not None
        return choice.end.finish_reason if choice.shows else "length"

    def _rated(
        self, choice: AnswerChoice, tokens: Sequence[TokenInfo], *, first: bool
    ) -> list[RatedToken]:
        """Tokens with ratings: those of the prompt first, if it is echoed, then the choice's
        own."""
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
        choices, count = self.conversation.choices, self.body.n or 1
        prompts = sum(len(choice.prompt) for choice in choices) // count
        together = [choices[first : first + count] for first in range(0, len(choices), count)]
        # what one of them has read was read
        cached = sum(min(choice.stats.cached_tokens for choice in same) for same in together)
        tokens = sum(choice.completion_tokens for choice in choices)
        if self.body.prediction is not None:  # of the client's prediction alone
            accepted = sum(
                min(choice.stats.predicted_accepted, choice.completion_tokens) for choice in choices
            )
            return Usage.of(
                prompts, tokens, accepted, sum(choice.stats.predicted for choice in choices), cached
            )
        accepted = sum(choice.text.accepted for choice in choices if choice.shows)
        return Usage.of(
            prompts, tokens, accepted, sum(choice.stats.drafted for choice in choices), cached
        )


class EventStream(StreamingResponse):
    """Sends an answer in pieces. Its conversation is closed in any case, even if sending never
    began."""

    def __init__(self, answer: Answer, first: Found | None):
        super().__init__(
            answer.stream(first), media_type="text/event-stream", headers=STREAM_HEADERS
        )
        self._conversation = answer.conversation

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._conversation.close()


def sse(data: dict[str, Any]) -> str:
    """One server-sent event, in ASCII: some readers also split lines at U+2028 or U+0085."""
    return f"data: {json.dumps(data, separators=(',', ':'))}\n\n"


def as_json(data: dict[str, Any]) -> str:
    """JSON as of the server's other answers."""
    return json.dumps(data, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
