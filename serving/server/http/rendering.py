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
from typing import Any, ClassVar, TypeVar, cast

from fastapi.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from draftwell.serving.runtime.logits import Rating
from draftwell.serving.runtime.session.stats import Stats
from draftwell.serving.server.http.conversation import AnswerChoice, Conversation
from draftwell.serving.server.http.errors import APIError
from draftwell.serving.server.http.prompts import on_thread
from draftwell.serving.server.http.requests import ChatRequest, CompletionRequest, Generation
from draftwell.serving.server.http.tool_calls import Piece, TextPiece, joined
from draftwell.serving.server.model.served_model import ServedModel
from draftwell.serving.server.scheduling.detokenize import TokenInfo
from draftwell.serving.server.scheduling.ticket import Delta, End

Json = dict[str, Any]
RatedToken = tuple[int, Rating | None]
"""Token id and its rating; None for a prompt's first token, which has no prediction."""
Found = tuple[AnswerChoice, Delta | End]
T = TypeVar("T")

LEAST_LOGPROB = -9999.0
"""What OpenAI writes for tokens that are ruled out; JSON has no −∞."""
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


def usage_of(prompt: int, completion: int, accepted: int, drafted: int, cached: int) -> Json:
    """Tokens of a request; a prompt with several answers counts once.

    Args:
        accepted, drafted: of the draft tokens, or of those of the request's `prediction` alone if
            it has one: part of the answer, and proposed.
        cached: of the prompt's tokens, those that a slot held of an earlier request, so that they
            were not read again.
    """
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": cached},
        "completion_tokens_details": {
            "accepted_prediction_tokens": accepted,
            "rejected_prediction_tokens": max(0, drafted - accepted),
        },
    }


def speculation_of(strategy: str, parts: Sequence[Stats]) -> Json:
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
        # that verified a draft, and how many of them accepted the token at each position; those of
        # a prediction or a format are among them
        "rounds": total.rounds,
        "accepted_at": [total.accepted_at[place] for place in sorted(total.judged_at)],
        # after the prompt's pass, and that if it verifies too
        "target_calls": total.target_calls,
        "acceptance_rate": own.acceptance_rate,
        "mean_acceptance_length": own.mean_acceptance_length,
        "first_token_seconds": round(total.first_token_seconds / len(parts), 6),
        "tokens_per_second": round(total.emitted / seconds, 3) if seconds else None,
    }


def trace_of(tokens: Sequence[TokenInfo], index: int) -> list[Json]:
    """Where tokens of a choice come from; their texts make up the answer's text."""
    return [{"text": token.text, "origin": token.origin, "index": index} for token in tokens]


def number(logprob: float) -> float:
    """A log-prob as JSON can hold it."""
    return max(logprob, LEAST_LOGPROB)


def chat_logprobs(
    tokens: Sequence[RatedToken],
    spell: Callable[[int], str],
    bytes_of: Callable[[int], list[int] | None],
) -> Json:
    """`{"content": [{"token", "logprob", "bytes", "top_logprobs"}]}`; natural logarithms of the
    target's distribution.

    Args:
        spell: token id → its text by itself, special tokens included.
        bytes_of: token id → the bytes of that text; None: it is a part of a character.
    """

    def entry(token: int, logprob: float) -> Json:
        return {"token": spell(token), "logprob": number(logprob), "bytes": bytes_of(token)}

    content = [
        entry(token, rating.logprob) | {"top_logprobs": [entry(*other) for other in rating.top]}
        for token, rating in tokens
        if rating is not None
    ]
    return {"content": content, "refusal": None}


def plain_logprobs(
    tokens: Sequence[RatedToken], spell: Callable[[int], str], offset: int = 0
) -> Json:
    """`{"tokens", "token_logprobs", "top_logprobs", "text_offset"}`, as in `chat_logprobs`; the
    token itself is listed in addition to the most likely ones.

    Args:
        offset: characters of the tokens that were listed before.
    """
    texts, offsets = [spell(token) for token, _ in tokens], []
    for text in texts:
        offsets.append(offset)
        offset += len(text)

    def top_of(text: str, rating: Rating) -> dict[str, float]:
        top: dict[str, float] = {}
        # parts of characters have the same spelling: the most likely one gets it
        for token, logprob in rating.top:
            top.setdefault(spell(token), number(logprob))
        top.setdefault(text, number(rating.logprob))
        return top

    ratings = [rating for _, rating in tokens]
    pairs = zip(texts, ratings, strict=True)
    return {
        "tokens": texts,
        "token_logprobs": [number(rating.logprob) if rating else None for rating in ratings],
        "top_logprobs": [top_of(text, rating) if rating else None for text, rating in pairs],
        "text_offset": offsets,
    }


def piece_of(
    choice: AnswerChoice,
    said: Json,
    finish_reason: str | None = None,
    logprobs: Json | None = None,
) -> Json:
    """A choice of an answer or of a chunk."""
    ended = {"logprobs": logprobs, "finish_reason": finish_reason}
    return {"index": choice.index, **said, **ended}


class Answer:
    """The events of a conversation as JSON, in one object or in pieces; each endpoint has a class.

    Args:
        fingerprint: of model and settings, `system_fingerprint`.
    """

    prefix: ClassVar[str]
    object: ClassVar[str]
    chunk_object: ClassVar[str]

    def __init__(
        self, served: ServedModel, fingerprint: str, conversation: Conversation, body: Generation
    ):
        self.served, self.conversation, self.body = served, conversation, body
        self.fingerprint = fingerprint
        self.id, self.created = f"{self.prefix}-{uuid.uuid4().hex}", int(time.time())
        self.rated = body.alternatives is not None
        self.traced = body.decoding.trace is True
        self._begun: set[int] = set()
        self._told: Counter[int] = Counter()
        """Choice → tokens of the chunks so far."""

    async def whole(self) -> Response:
        """All choices in one object."""
        texts, tokens = await self.collect()

        def written() -> bytes:
            data = self._assembled(texts, tokens)
            return json.dumps(
                data, ensure_ascii=False, allow_nan=False, separators=(",", ":")
            ).encode()

        return Response(await self.apart(written, WRITERS), media_type="application/json")

    async def collect(self) -> tuple[list[str], list[list[TokenInfo]]]:
        """Text and tokens of every choice, once all have ended."""
        texts: list[list[str]] = [[] for _ in self.conversation.choices]
        tokens: list[list[TokenInfo]] = [[] for _ in self.conversation.choices]
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

    async def apart(self, write: Callable[[], T], pool: ThreadPoolExecutor = STREAMERS) -> T:
        """What `write` returns, in a thread where log-probs or origins of tokens are listed: tens
        of thousands may have to be spelt and written."""
        return await on_thread(pool, write) if self.rated or self.traced else write()

    def _assembled(
        self, texts: Sequence[str], tokens: Sequence[Sequence[TokenInfo]]
    ) -> dict[str, Any]:
        choices, trace = [], []
        for choice in self.conversation.choices:
            own = tokens[choice.index]
            logprobs = self._logprobs(choice, self._rated(choice, own, first=True))
            whole = self._choice(choice, choice.before + texts[choice.index], logprobs)
            choices.append(whole | self._ids(own))
            trace += trace_of(own, choice.index)
        fields = self._extension(self._stats() | ({"tokens": trace} if self.traced else {}))
        return self._envelope(self.object, choices) | {"usage": self._usage()} | fields

    async def stream(self, first: Found | None) -> AsyncIterator[str]:
        """Server-sent events, from the first event of the conversation on, with comments as `sent`
        has them."""
        try:
            async for piece in self.sent(first, self._events):
                yield piece
        except APIError as error:
            yield sse(error.body)
            return
        if self.body.wants_usage:
            yield sse(self._chunk() | {"usage": self._usage()})
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

    def _events(self, choice: AnswerChoice, event: Delta | End) -> str:
        """The chunks of an event as server-sent events; "" where there is none."""
        usage: Json = {"usage": None} if self.body.wants_usage else {}
        if self.body.wants_usage_so_far:
            prompt = len(choice.prompt)
            if isinstance(event, Delta) and choice.shows:
                self._told[choice.index] += len(event.tokens)
            tokens = self._told[choice.index]
            if isinstance(event, End):
                tokens = choice.completion_tokens
            usage["usage"] = {
                "prompt_tokens": prompt,
                "completion_tokens": tokens,
                "total_tokens": prompt + tokens,
            }
        return "".join(sse(chunk | usage) for chunk in self._chunks(choice, event))

    def _chunks(self, choice: AnswerChoice, event: Delta | End) -> list[Json]:
        """The chunks of an event: the start of a choice, its text, or its end."""
        first = choice.index not in self._begun
        self._begun.add(choice.index)
        text = ""
        tokens: Sequence[TokenInfo] = ()
        if isinstance(event, Delta) and choice.shows:
            text, tokens = event.text, event.tokens
        if first:
            text = choice.before + text
        rated = self._rated(choice, tokens, first=first)
        chunks = self._start(choice) if first else []
        if text or rated or (tokens and (self.traced or self.body.lists_token_ids)):
            trace = {"tokens": trace_of(tokens, choice.index)} if self.traced else {}
            said = self._said(choice, text, self._logprobs(choice, rated), bool(trace))
            for position, piece in enumerate(said):
                ids = {} if position else self._ids(tokens)
                extension = {} if position else self._extension(trace)
                chunks.append(self._chunk(piece | ids) | extension)
        if isinstance(event, End):
            chunks += [self._chunk(piece) for piece in self._rest(choice)]
            fields = self._extension(self._stats() if self.conversation.over else {})
            chunks.append(
                self._chunk(piece_of(choice, self._text(None), self._reason(choice))) | fields
            )
        return chunks

    def _ids(self, tokens: Sequence[TokenInfo]) -> Json:
        """The ids of tokens, if they were asked for."""
        return {"token_ids": [token.id for token in tokens]} if self.body.lists_token_ids else {}

    def _start(self, choice: AnswerChoice) -> list[Json]:
        """Chunks before a choice's first text."""
        return []

    def _text(self, text: str | None) -> Json:
        """What a choice of a chunk says; the last chunk has no text."""
        raise NotImplementedError

    def _choice(self, choice: AnswerChoice, text: str, logprobs: Json | None) -> Json:
        """A choice of the complete answer."""
        return piece_of(choice, self._text(text), self._reason(choice), logprobs)

    def _said(
        self, choice: AnswerChoice, text: str, logprobs: Json | None, traced: bool
    ) -> list[Json]:
        """Pieces of more text."""
        return [piece_of(choice, self._text(text), logprobs=logprobs)]

    def _rest(self, choice: AnswerChoice) -> list[Json]:
        """Pieces of what was held back until the end."""
        return []

    def _reason(self, choice: AnswerChoice) -> str:
        """Why a choice has ended."""
        assert choice.end is not None
        return choice.end.finish_reason if choice.shows else "length"

    def _logprobs(self, choice: AnswerChoice, tokens: Sequence[RatedToken]) -> Json | None:
        """Log-probs of a choice's next tokens; None where none were asked for."""
        if not self.rated:
            return None
        return chat_logprobs(tokens, self.served.token_text, self.served.token_bytes)

    def _rated(
        self, choice: AnswerChoice, tokens: Sequence[TokenInfo], *, first: bool
    ) -> list[RatedToken]:
        """Tokens with ratings, if they were asked for: those of the prompt first, if it is echoed,
        then the choice's own."""
        if not self.rated:
            return []
        own: list[RatedToken] = [(token.id, token.rating) for token in tokens]
        if first and choice.prompt_ratings:
            return [*zip(choice.prompt, choice.prompt_ratings, strict=True), *own]
        return own

    def _chunk(self, *choices: Json) -> Json:
        """A piece of a stream; the last one may have no choice, but usage."""
        return self._envelope(self.chunk_object, choices)

    def _envelope(self, kind: str, choices: Sequence[Json]) -> Json:
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.served.name,
            "system_fingerprint": self.fingerprint,
            "choices": choices,
        }

    def _stats(self) -> Json:
        """Speculation statistics; empty if the client does not want them."""
        if self.body.decoding.stats is False:
            return {}
        choices = self.conversation.choices
        strategy = choices[0].ticket.strategy or self.served.strategy
        return speculation_of(strategy.name, [choice.stats for choice in choices])

    def _extension(self, fields: Json) -> Json:
        return {"speculation": fields} if fields else {}

    def _usage(self) -> Json:
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
            drafted = sum(choice.stats.predicted for choice in choices)
        else:
            accepted = sum(choice.text.accepted for choice in choices if choice.shows)
            drafted = sum(choice.stats.drafted for choice in choices)
        return usage_of(prompts, tokens, accepted, drafted, cached)


class CompletionAnswer(Answer):
    """`text_completion`"""

    prefix, object, chunk_object = "cmpl", "text_completion", "text_completion"

    def _text(self, text: str | None) -> Json:
        return {"text": text or ""}

    def _logprobs(self, choice: AnswerChoice, tokens: Sequence[RatedToken]) -> Json | None:
        if not self.rated:
            return None
        by_id = cast(CompletionRequest, self.body).return_tokens_as_token_ids
        spell = "token_id:{}".format if by_id else self.served.token_text
        listed = plain_logprobs(tokens, spell, choice.listed_characters)
        choice.listed_characters += sum(map(len, listed["tokens"]))
        return listed


class ChatAnswer(Answer):
    """`chat.completion`, in which functions may be called."""

    prefix, object, chunk_object = "chatcmpl", "chat.completion", "chat.completion.chunk"
    body: ChatRequest

    def __init__(
        self, served: ServedModel, fingerprint: str, conversation: Conversation, body: ChatRequest
    ):
        super().__init__(served, fingerprint, conversation, body)
        offered = conversation.choices if body.offered else ()
        self._parsers = {choice.index: body.parser() for choice in offered}

    def _start(self, choice: AnswerChoice) -> list[Json]:
        return [self._chunk(piece_of(choice, {"delta": {"role": "assistant", "content": ""}}))]

    def _text(self, text: str | None) -> Json:
        return {"delta": {} if text is None else {"content": text}}

    def _choice(self, choice: AnswerChoice, text: str, logprobs: Json | None) -> Json:
        message: Json = {"role": "assistant", "content": text, "refusal": None}
        if parser := self._parsers.get(choice.index):
            found = [*parser.push(text), *parser.finish()]
            if calls := joined(found):
                said = "".join(piece.text for piece in found if isinstance(piece, TextPiece))
                message |= {"content": said or None, "tool_calls": calls}
        return piece_of(choice, {"message": message}, self._reason(choice), logprobs)

    def _said(
        self, choice: AnswerChoice, text: str, logprobs: Json | None, traced: bool
    ) -> list[Json]:
        if choice.index not in self._parsers:
            return super()._said(choice, text, logprobs, traced)
        pieces = self._shaped(choice, self._parsers[choice.index].push(text))
        if not pieces and (logprobs is not None or traced):
            pieces = [piece_of(choice, self._text(""))]
        for piece in pieces[:1]:
            piece["logprobs"] = logprobs
        return pieces

    def _rest(self, choice: AnswerChoice) -> list[Json]:
        parser = self._parsers.get(choice.index)
        return self._shaped(choice, parser.finish()) if parser else []

    def _reason(self, choice: AnswerChoice) -> str:
        reason, parser = super()._reason(choice), self._parsers.get(choice.index)
        # a stop string of the client may have cut them
        complete = parser and parser.calls and not parser.within_arguments
        return "tool_calls" if reason == "stop" and complete else reason

    def _shaped(self, choice: AnswerChoice, found: Sequence[Piece]) -> list[Json]:
        """Pieces as choices of chunks."""
        return [
            piece_of(
                choice,
                self._text(piece.text)
                if isinstance(piece, TextPiece)
                else {"delta": {"tool_calls": [piece.delta]}},
            )
            for piece in found
        ]


class EventStream(StreamingResponse):
    """Sends an answer in pieces. Its conversation is closed in any case, even if sending never
    began."""

    def __init__(self, answer: Answer, first: Found | None):
        headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        super().__init__(answer.stream(first), media_type="text/event-stream", headers=headers)
        self._conversation = answer.conversation

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._conversation.close()


def sse(data: Json, kind: str | None = None) -> str:
    """One server-sent event, in ASCII: some readers also split lines at U+2028 or U+0085."""
    named = f"event: {kind}\n" if kind else ""
    return f"{named}data: {json.dumps(data, separators=(',', ':'))}\n\n"
