"""Answers in OpenAI's format, in one object or as server-sent events, with one extension:
`speculation` reports statistics of speculative decoding. Calls of tools are taken out of the text.
"""

from __future__ import annotations

import asyncio
import json
import time
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, ClassVar, TypeVar

from fastapi.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from draftwell.serving.runtime.session.stats import Stats
from draftwell.serving.runtime.types import Rating
from draftwell.serving.server.http.conversation import AnswerChoice, Conversation
from draftwell.serving.server.http.errors import APIError
from draftwell.serving.server.http.requests import ChatRequest, Generation
from draftwell.serving.server.http.tool_calls import Call, Piece, TextPiece
from draftwell.serving.server.model.served_model import ServedModel
from draftwell.serving.server.scheduling.detokenize import TokenInfo
from draftwell.serving.server.scheduling.ticket import Delta, End

RatedToken = tuple[int, Rating | None]
"""Token id and its rating; None for a prompt's first token, which has no prediction."""
LEAST_LOGPROB = -9999.0
"""What OpenAI writes for tokens that are ruled out; JSON has no −∞."""


def usage_of(
    prompt_tokens: int, completion_tokens: int, accepted: int, drafted: int, cached: int
) -> dict[str, Any]:
    """Tokens of a request; a prompt with several answers counts once.

    Args:
        accepted, drafted: of the draft tokens, or of those of the request's `prediction` alone if
            it has one: part of the answer, and proposed.
        cached: of the prompt's tokens, those that a slot held of an earlier request, so that they
            were not read again.
    """
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": cached},
        "completion_tokens_details": {
            "accepted_prediction_tokens": accepted,
            "rejected_prediction_tokens": max(0, drafted - accepted),
        },
    }


def speculation_of(strategy: str, parts: Sequence[Stats]) -> dict[str, Any]:
    """How an answer was decoded (docs/server.md): sums over its choices. The counters may include a
    few tokens after a stop string.

    Args:
        parts: of each choice.
    """
    total, seconds = Stats.total(parts), max(part.wall_seconds for part in parts)
    own = total.own
    accepted_by = {
        strategy if name == "strategy" else name: count
        for name, count in total.kept.items()
        if count
    }
    return {
        "strategy": strategy,
        # of the strategy: a prediction's tokens, and those that a format left no choice for, are
        # counted apart
        "drafted": own.drafted,
        "judged": own.judged,  # the accepted ones and the first rejected one of each round
        "accepted": own.accepted,
        "rescued": own.rescued,  # of these, tokens that the exact rule would have rejected
        "predicted": total.predicted,
        "predicted_accepted": total.predicted_accepted,
        "forced": total.forced,
        "accepted_by": accepted_by,
        # after the prompt's pass, and that if it verifies too
        "target_calls": total.target_calls,
        "acceptance_rate": own.acceptance_rate,
        "mean_acceptance_length": own.mean_acceptance_length,
        "first_token_seconds": round(total.first_token_seconds / len(parts), 6),
        "tokens_per_second": round(total.emitted / seconds, 3) if seconds else None,
    }


def trace_of(tokens: Sequence[TokenInfo], index: int) -> list[dict[str, Any]]:
    """Where tokens of a choice come from; their texts make up the answer's text."""
    return [{"text": token.text, "origin": token.origin, "index": index} for token in tokens]


class ChatLogprobs:
    """`{"content": [{"token", "logprob", "bytes", "top_logprobs"}]}` of one choice's tokens;
    natural logarithms of the target's distribution.

    Args:
        spell: token id → its text by itself, special tokens included.
    """

    def __init__(self, spell: Callable[[int], str]):
        self.spell = spell

    def of(self, tokens: Sequence[RatedToken]) -> dict[str, Any]:
        content = [
            self._entry(token, rating.logprob)
            | {"top_logprobs": [self._entry(*other) for other in rating.top]}
            for token, rating in tokens
            if rating is not None
        ]
        return {"content": content, "refusal": None}

    def _entry(self, token: int, logprob: float) -> dict[str, Any]:
        text = self.spell(token)
        # else a part of a character, whose bytes the decoder does not give
        whole = "\ufffd" not in text
        return {
            "token": text,
            "logprob": number(logprob),
            "bytes": list(text.encode()) if whole else None,
        }


class PlainLogprobs:
    """`{"tokens", "token_logprobs", "top_logprobs", "text_offset"}`, as in `ChatLogprobs`; the
    token itself is listed in addition to the most likely ones."""

    def __init__(self, spell: Callable[[int], str]):
        self.spell, self._offset = spell, 0

    def of(self, tokens: Sequence[RatedToken]) -> dict[str, Any]:
        texts = [self.spell(token) for token, _ in tokens]
        offsets = []
        for text in texts:
            offsets.append(self._offset)
            self._offset += len(text)
        ratings = [rating for _, rating in tokens]
        return {
            "tokens": texts,
            "token_logprobs": [number(r.logprob) if r else None for r in ratings],
            "top_logprobs": [
                self._top(text, r) if r else None for text, r in zip(texts, ratings, strict=True)
            ],
            "text_offset": offsets,
        }

    def _top(self, text: str, rating: Rating) -> dict[str, float]:
        top: dict[str, float] = {}
        for token, logprob in rating.top:
            # parts of characters have the same spelling: the most likely one gets it
            top.setdefault(self.spell(token), number(logprob))
        top.setdefault(text, number(rating.logprob))
        return top


def number(logprob: float) -> float:
    """A log-prob as JSON can hold it."""
    return max(logprob, LEAST_LOGPROB)


class Envelope:
    """What all pieces of one answer share: id, date, model.

    Args:
        fingerprint: of model and settings, `system_fingerprint`.
    """

    prefix: ClassVar[str]
    object: ClassVar[str]
    chunk_object: ClassVar[str]

    def __init__(self, model: str, fingerprint: str):
        self.id = f"{self.prefix}-{uuid.uuid4().hex}"
        self.created = int(time.time())
        self.model, self.fingerprint = model, fingerprint

    def answer(self, choices: list[dict[str, Any]], **fields: Any) -> dict[str, Any]:
        """A complete answer."""
        return self._envelope(self.object, choices) | fields

    def chunk(self, *choices: dict[str, Any], **fields: Any) -> dict[str, Any]:
        """A piece of a stream; the last one may have no choice, but usage."""
        return self._envelope(self.chunk_object, list(choices)) | fields

    def _envelope(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": self.fingerprint,
            "choices": choices,
        }


class ChatShape(Envelope):
    """`chat.completion`"""

    prefix, object, chunk_object = "chatcmpl", "chat.completion", "chat.completion.chunk"
    logprobs = ChatLogprobs

    def whole(
        self, index: int, text: str, finish_reason: str, logprobs: dict[str, Any] | None
    ) -> dict[str, Any]:
        """A choice of a complete answer."""
        message = {"role": "assistant", "content": text, "refusal": None}
        return choice_of(index, {"message": message}, finish_reason, logprobs)

    def piece(
        self,
        index: int,
        text: str | None,
        finish_reason: str | None = None,
        logprobs: dict[str, Any] | None = None,
        **delta: Any,
    ) -> dict[str, Any]:
        """A choice of a chunk; the last chunk has no text.

        Args:
            delta: what else it says, such as a role or pieces of tool calls.
        """
        said = delta if text is None else delta | {"content": text}
        return choice_of(index, {"delta": said}, finish_reason, logprobs)


class CompletionShape(Envelope):
    """`text_completion`"""

    prefix, object, chunk_object = "cmpl", "text_completion", "text_completion"
    logprobs = PlainLogprobs

    def piece(
        self,
        index: int,
        text: str | None,
        finish_reason: str | None = None,
        logprobs: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        """A choice of an answer or of a chunk."""
        return choice_of(index, {"text": text or ""}, finish_reason, logprobs)

    whole = piece


Shape = ChatShape | CompletionShape
"""The JSON of one answer, complete and in pieces; one object per request."""


def choice_of(
    index: int, said: dict[str, Any], finish_reason: str | None, logprobs: dict[str, Any] | None
) -> dict[str, Any]:
    """A choice, whole or in a chunk."""
    return {"index": index, **said, "logprobs": logprobs, "finish_reason": finish_reason}


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
        self._logprobs: dict[int, ChatLogprobs | PlainLogprobs] = {
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
        return self.shape.answer(done, usage=self._usage(), **fields)

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
            yield sse(self.shape.chunk(usage=self._usage()))
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
            chunks.append(self.shape.chunk(self.shape.piece(index, "", role="assistant")))
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
        return speculation_of(strategy.name, [choice.stats for choice in choices])

    def _extension(self, fields: dict[str, Any]) -> dict[str, Any]:
        return {"speculation": fields} if fields else {}

    def _usage(self) -> dict[str, Any]:
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
            return usage_of(
                prompts, tokens, accepted, sum(choice.stats.predicted for choice in choices), cached
            )
        accepted = sum(choice.text.accepted for choice in choices if choice.shows)
        return usage_of(
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


class ToolAnswer(Answer):
    """The events of a conversation in which functions may be called."""

    shape: ChatShape

    def __init__(
        self, served: ServedModel, conversation: Conversation, body: ChatRequest, shape: ChatShape
    ):
        super().__init__(served, conversation, body, shape)
        self._parsers = {choice.index: body.parser() for choice in conversation.choices}

    def _whole(
        self, choice: AnswerChoice, text: str, logprobs: dict[str, Any] | None
    ) -> dict[str, Any]:
        parser = self._parsers[choice.index]
        found = [*parser.push(text), *parser.finish()]
        whole = self.shape.whole(choice.index, text, self._reason(choice), logprobs)
        if calls := joined(found):
            said = "".join(piece.text for piece in found if isinstance(piece, TextPiece))
            whole["message"] |= {"content": said or None, "tool_calls": calls}
        return whole

    def _said(
        self,
        choice: AnswerChoice,
        text: str,
        logprobs: dict[str, Any] | None,
        fields: dict[str, Any],
    ) -> list[dict[str, Any]]:
        pieces = self._shaped(choice, self._parsers[choice.index].push(text))
        if not pieces:
            if logprobs is None and not fields:
                return []
            pieces = [self.shape.piece(choice.index, "")]
        pieces[0]["logprobs"] = logprobs
        return [
            self.shape.chunk(piece, **(fields if number == 0 else {}))
            for number, piece in enumerate(pieces)
        ]

    def _rest(self, choice: AnswerChoice) -> list[dict[str, Any]]:
        return [
            self.shape.chunk(piece)
            for piece in self._shaped(choice, self._parsers[choice.index].finish())
        ]

    def _reason(self, choice: AnswerChoice) -> str:
        reason, parser = super()._reason(choice), self._parsers[choice.index]
        # a stop string of the client may have cut them
        complete = parser.calls and not parser.within_arguments
        return "tool_calls" if reason == "stop" and complete else reason

    def _shaped(self, choice: AnswerChoice, found: Sequence[Piece]) -> list[dict[str, Any]]:
        """Pieces as choices of chunks."""
        return [
            self.shape.piece(choice.index, piece.text)
            if isinstance(piece, TextPiece)
            else self.shape.piece(choice.index, None, tool_calls=[piece.delta])
            for piece in found
        ]


def joined(pieces: Sequence[Piece]) -> list[dict[str, Any]]:
    """Complete calls from their pieces."""
    calls: list[dict[str, Any]] = []
    for piece in pieces:
        if not isinstance(piece, Call):
            continue
        if piece.id is not None:
            calls.append(
                {
                    "id": piece.id,
                    "type": "function",
                    "function": {"name": piece.name, "arguments": ""},
                }
            )
        calls[piece.index]["function"]["arguments"] += piece.arguments
    return calls
