"""Answers in OpenAI's format, with one extension: `speculation` reports statistics of speculative
decoding."""

from __future__ import annotations

import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

from pydantic import BaseModel, Field

from draftwell.serving.runtime.session.stats import Stats
from draftwell.serving.runtime.types import Rating
from draftwell.serving.server.scheduling.detokenize import TokenInfo

RatedToken = tuple[int, Rating | None]
"""Token id and its rating; None for a prompt's first token, which has no prediction."""
LEAST_LOGPROB = -9999.0
"""What OpenAI writes for tokens that are ruled out; JSON has no −∞."""


class CompletionTokensDetails(BaseModel):
    """Draft tokens of the request, or those of its `prediction` alone if it has one: accepted +
    rejected = drafted."""

    accepted_prediction_tokens: int = Field(description="draft tokens that are part of the answer")
    rejected_prediction_tokens: int = Field(description="draft tokens that are not")


class PromptTokensDetails(BaseModel):
    """What part of a prompt cost nothing."""

    cached_tokens: int = Field(
        description=(
            "prompt tokens that a slot held of an earlier request, so that they were not read again"
        )
    )


class Usage(BaseModel):
    """Tokens of a request; a prompt with several answers counts once."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails

    @classmethod
    def of(
        cls,
        prompt_tokens: int,
        completion_tokens: int,
        accepted: int,
        drafted: int,
        cached: int = 0,
    ) -> Usage:
        """
        Args:
            cached: of the prompt's tokens, those that were not read again.
            accepted: of the answer's tokens, those that came from the draft.
            drafted: draft tokens proposed.
        """
        details = CompletionTokensDetails(
            accepted_prediction_tokens=accepted,
            rejected_prediction_tokens=max(0, drafted - accepted),
        )
        return cls(
            prompt_tokens=prompt_tokens,
            completion_tokens=completion_tokens,
            total_tokens=prompt_tokens + completion_tokens,
            prompt_tokens_details=PromptTokensDetails(cached_tokens=cached),
            completion_tokens_details=details,
        )


class Speculation(BaseModel):
    """How an answer was decoded; sums over its choices. The counters may include a few tokens after
    a stop string."""

    strategy: str
    drafted: int = Field(
        description=(
            "draft tokens that the strategy proposed; these numbers leave a prediction's tokens out"
        )
    )
    judged: int = Field(
        description=(
            "draft tokens verified: the accepted ones and the first rejected one of each round"
        )
    )
    accepted: int = Field(
        description="draft tokens accepted by the strategy, rescued ones included"
    )
    rescued: int = Field(description="of these, tokens that the exact rule would have rejected")
    predicted: int = Field(description="tokens of the request's prediction that were proposed")
    predicted_accepted: int = Field(description="of these, accepted ones")
    forced: int = Field(
        description=(
            "tokens proposed because the answer's format leaves no choice; not among those drafted"
        )
    )
    accepted_by: dict[str, int] = Field(
        description="accepted tokens by what drafted them: the strategy (of hybrid text, head or "
        "draft), "
        "and prediction and grammar, which the other numbers leave out"
    )
    target_calls: int = Field(
        description=(
            "forward passes of the target after the prompt's, and the prompt's if it verifies too"
        )
    )
    acceptance_rate: float | None = Field(
        description="accepted / judged; null when nothing was judged"
    )
    mean_acceptance_length: float = Field(description="1 + accepted / rounds that drafted")
    first_token_seconds: float = Field(
        description=(
            "from when the request got a slot to its first token; with several choices the mean"
        )
    )
    tokens_per_second: float | None = Field(
        description="tokens of all choices / seconds of the longest one on its slot"
    )

    @classmethod
    def of(cls, strategy: str, parts: Sequence[Stats]) -> Speculation:
        """
        Args:
            parts: of each choice.
        """
        total, seconds = Stats.total(parts), max(part.wall_seconds for part in parts)
        own = total.own
        return cls(
            strategy=strategy,
            drafted=own.drafted,
            judged=own.judged,
            accepted=own.accepted,
            rescued=own.rescued,
            predicted=total.predicted,
            predicted_accepted=total.predicted_accepted,
            forced=total.forced,
            accepted_by={
                strategy if name == "strategy" else name: count
                for name, count in total.kept.items()
                if count
            },
            target_calls=total.target_calls,
            acceptance_rate=own.acceptance_rate,
            mean_acceptance_length=own.mean_acceptance_length,
            first_token_seconds=round(total.first_token_seconds / len(parts), 6),
            tokens_per_second=round(total.emitted / seconds, 3) if seconds else None,
        )


def trace_of(tokens: Sequence[TokenInfo], index: int) -> list[dict[str, Any]]:
    """Where tokens of a choice come from; their texts make up the answer's text."""
    return [{"text": token.text, "origin": token.origin, "index": index} for token in tokens]


class Logprobs(ABC):
    """Log-probs of one choice's tokens in OpenAI's shape; natural logarithms of the target's
    distribution.

    Args:
        spell: token id → its text by itself, special tokens included.
    """

    def __init__(self, spell: Callable[[int], str]):
        self.spell = spell

    @abstractmethod
    def of(self, tokens: Sequence[RatedToken]) -> dict[str, Any]:
        """Log-probs of the next tokens."""


class ChatLogprobs(Logprobs):
    """`{"content": [{"token", "logprob", "bytes", "top_logprobs"}]}`"""

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


class PlainLogprobs(Logprobs):
    """`{"tokens", "token_logprobs", "top_logprobs", "text_offset"}`; the token itself is listed in
    addition to the most likely ones."""

    def __init__(self, spell: Callable[[int], str]):
        super().__init__(spell)
        self._offset = 0

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


class Shape(ABC):
    """The JSON of one answer, complete and in pieces; one object per request, so that all pieces
    share id and date.

    Args:
        fingerprint: of model and settings, `system_fingerprint`.
    """

    prefix: ClassVar[str]
    object: ClassVar[str]
    chunk_object: ClassVar[str]
    logprobs: ClassVar[type[Logprobs]]

    def __init__(self, model: str, fingerprint: str):
        self.id = f"{self.prefix}-{uuid.uuid4().hex}"
        self.created = int(time.time())
        self.model, self.fingerprint = model, fingerprint

    @abstractmethod
    def whole(
        self, index: int, text: str, finish_reason: str, logprobs: dict[str, Any] | None
    ) -> dict[str, Any]:
        """A choice of a complete answer."""

    @abstractmethod
    def piece(
        self,
        index: int,
        text: str | None,
        finish_reason: str | None = None,
        logprobs: dict[str, Any] | None = None,
        *,
        first: bool = False,
    ) -> dict[str, Any]:
        """A choice of a chunk; the last chunk has no text."""

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


class ChatShape(Shape):
    """`chat.completion`"""

    prefix, object, chunk_object, logprobs = (
        "chatcmpl",
        "chat.completion",
        "chat.completion.chunk",
        ChatLogprobs,
    )

    def whole(
        self, index: int, text: str, finish_reason: str, logprobs: dict[str, Any] | None
    ) -> dict[str, Any]:
        message = {"role": "assistant", "content": text, "refusal": None}
        return {
            "index": index,
            "message": message,
            "logprobs": logprobs,
            "finish_reason": finish_reason,
        }

    def piece(
        self,
        index: int,
        text: str | None,
        finish_reason: str | None = None,
        logprobs: dict[str, Any] | None = None,
        *,
        first: bool = False,
    ) -> dict[str, Any]:
        delta = ({"role": "assistant"} if first else {}) | (
            {} if text is None else {"content": text}
        )
        return {
            "index": index,
            "delta": delta,
            "logprobs": logprobs,
            "finish_reason": finish_reason,
        }

    def calls(
        self, index: int, calls: Sequence[dict[str, Any]], logprobs: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """A choice of a chunk with pieces of tool calls."""
        return {
            "index": index,
            "delta": {"tool_calls": list(calls)},
            "logprobs": logprobs,
            "finish_reason": None,
        }


class CompletionShape(Shape):
    """`text_completion`"""

    prefix, object, chunk_object, logprobs = (
        "cmpl",
        "text_completion",
        "text_completion",
        PlainLogprobs,
    )

    def whole(
        self, index: int, text: str, finish_reason: str, logprobs: dict[str, Any] | None
    ) -> dict[str, Any]:
        return self.piece(index, text, finish_reason, logprobs)

    def piece(
        self,
        index: int,
        text: str | None,
        finish_reason: str | None = None,
        logprobs: dict[str, Any] | None = None,
        *,
        first: bool = False,
    ) -> dict[str, Any]:
        return {
            "index": index,
            "text": text or "",
            "logprobs": logprobs,
            "finish_reason": finish_reason,
        }
