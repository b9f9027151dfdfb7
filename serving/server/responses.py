"""Answers in OpenAI's shape, with one extension: `speculation` says what speculative decoding brought."""

from __future__ import annotations

import time
import uuid
from abc import ABC, abstractmethod
from typing import Any, ClassVar

from pydantic import BaseModel, Field

from serving.runtime.strategies import Strategy
from serving.server.scheduler import End


class CompletionTokensDetails(BaseModel):
    """Draft tokens of the request: accepted + rejected = drafted."""

    accepted_prediction_tokens: int = Field(description="draft tokens that are part of the answer")
    rejected_prediction_tokens: int = Field(description="draft tokens that are not")


class Usage(BaseModel):
    """Tokens of a request."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    completion_tokens_details: CompletionTokensDetails

    @classmethod
    def of(cls, prompt_tokens: int, end: End) -> Usage:
        # a stop string may cut accepted tokens off again, and the first token never comes from a draft
        accepted = min(end.stats.accepted, max(0, end.completion_tokens - 1))
        details = CompletionTokensDetails(accepted_prediction_tokens=accepted, rejected_prediction_tokens=end.stats.drafted - accepted)
        return cls(prompt_tokens=prompt_tokens, completion_tokens=end.completion_tokens,
                   total_tokens=prompt_tokens + end.completion_tokens, completion_tokens_details=details)


class Speculation(BaseModel):
    """How an answer was decoded."""

    strategy: str
    acceptance_rate: float | None = Field(description="accepted / judged draft tokens; null when none was judged")
    target_calls: int = Field(description="forwards of the target model behind the prompt's, and the prompt's where it verifies too")
    drafted: int = Field(description="draft tokens proposed")
    accepted: int = Field(description="draft tokens kept by the strategy")

    @classmethod
    def of(cls, strategy: Strategy, end: End) -> Speculation:
        stats = end.stats
        return cls(strategy=strategy.name, acceptance_rate=stats.acceptance_rate, target_calls=stats.target_calls,
                   drafted=stats.drafted, accepted=stats.accepted)


class Shape(ABC):
    """The JSON of one answer, whole and in pieces; one object per request, so that all pieces share id and date."""

    prefix: ClassVar[str]
    object: ClassVar[str]
    chunk_object: ClassVar[str]

    def __init__(self, model: str):
        self.id = f"{self.prefix}-{uuid.uuid4().hex}"
        self.created = int(time.time())
        self.model = model

    @abstractmethod
    def whole(self, text: str, finish_reason: str) -> dict[str, Any]:
        """The one choice of a whole answer."""

    @abstractmethod
    def piece(self, text: str | None, finish_reason: str | None = None, *, first: bool = False) -> dict[str, Any]:
        """The one choice of a chunk; no text in the chunk that only tells the end."""

    def answer(self, text: str, end: End, usage: Usage, speculation: Speculation) -> dict[str, Any]:
        """A whole answer."""
        return self._envelope(self.object, [self.whole(text, end.finish_reason)]) | {
            "usage": usage.model_dump(), "speculation": speculation.model_dump()}

    def chunk(self, *choices: dict[str, Any], **fields: Any) -> dict[str, Any]:
        """A piece of a stream; the last one may have no choice, but usage."""
        return self._envelope(self.chunk_object, list(choices)) | fields

    def _envelope(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model, "choices": choices}


class ChatShape(Shape):
    """`chat.completion`"""

    prefix, object, chunk_object = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def whole(self, text: str, finish_reason: str) -> dict[str, Any]:
        message = {"role": "assistant", "content": text, "refusal": None}
        return {"index": 0, "message": message, "logprobs": None, "finish_reason": finish_reason}

    def piece(self, text: str | None, finish_reason: str | None = None, *, first: bool = False) -> dict[str, Any]:
        delta = ({"role": "assistant"} if first else {}) | ({} if text is None else {"content": text})
        return {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish_reason}


class CompletionShape(Shape):
    """`text_completion`"""

    prefix, object, chunk_object = "cmpl", "text_completion", "text_completion"

    def whole(self, text: str, finish_reason: str) -> dict[str, Any]:
        return self.piece(text, finish_reason)

    def piece(self, text: str | None, finish_reason: str | None = None, *, first: bool = False) -> dict[str, Any]:
        return {"index": 0, "text": text or "", "logprobs": None, "finish_reason": finish_reason}
