"""What every dialect does with the events of an answer: tokens, when they came, the likeliest ones,
and whether all came that should."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from draftwell.components.engines.port import Acceptance, Answer, TokenProb
from draftwell.components.engines.remote.client import EngineClient
from draftwell.serving.errors import DraftwellError
from draftwell.serving.runtime.requests import Sampling

LEAST_SECONDS = 1e-6
"""Of an answer; a clock may stand still for that long."""


@dataclass
class Collected:
    """An answer while it comes."""

    tokens: list[int] = field(default_factory=list)
    first: float = 0.0
    last: float = 0.0
    top: list[list[TokenProb]] = field(default_factory=list)
    acceptance: Acceptance = field(default_factory=Acceptance)
    finish: str | None = None
    """`stop` or `length`, when it is over."""
    extras: dict[str, Any] = field(default_factory=dict)
    """What the engine said besides."""
    claimed: int | None = None
    """How many tokens the engine says that it wrote."""

    def add(self, at: float, tokens: Sequence[int]) -> None:
        """Note tokens that came at `at` seconds after the request."""
        if not tokens:
            return
        self.last = at
        if not self.tokens:
            self.first = at
        self.tokens += tokens

    def cut(self, count: int) -> None:
        """End the answer after so many of its tokens, at a token that ends the text."""
        del self.tokens[count:], self.top[count:]
        self.finish = "stop"

    def answer(self, client: EngineClient, sampling: Sampling) -> Answer:
        """The whole answer.

        Raises:
            DraftwellError: it ended early (`engine_broke_off`), holds no token ids
                (`engine_no_tokens`), or fewer than the engine counts or was asked for
                (`engine_fewer_tokens`), or more (`engine_bad_answer`).
        """
        count, rated = len(self.tokens), sampling.logprobs is not None
        if self.finish not in ("stop", "length"):
            why = f"({self.finish})" if self.finish else "without saying why"
            raise DraftwellError(
                f"{client.url} ended an answer after {count} tokens {why}: look at "
                "its log, then run the same again",
                code="engine_broke_off",
            )
        if not self.tokens:
            raise DraftwellError(
                f"{client.url} answers without token ids, so that nothing can be counted or "
                "compared: this needs vLLM, SGLang, llama.cpp's server or ours",
                code="engine_no_tokens",
            )
        # at the end of a text, an engine may count a stop token that it does not show
        wanted = sampling.max_tokens if self.finish == "length" else (self.claimed or 1) - 1
        if count < wanted:
            raise DraftwellError(
                f"{client.url} answered {count} tokens of {wanted}: is its own limit lower, or "
                "does a proxy shorten answers? Ask for fewer with max_tokens",
                code="engine_fewer_tokens",
            )
        most = min(sampling.max_tokens, self.claimed or sampling.max_tokens)
        if count > most:
            raise DraftwellError(
                f"{client.url} answered {count} tokens where {most} were asked for or counted: "
                "its version streams tokens in a way that is not known here",
                code="engine_bad_answer",
            )
        if rated and len(self.top) != count:
            raise DraftwellError(
                f"{client.url} gave log-probabilities of {len(self.top)} of {count} tokens: leave "
                "logprobs out",
                code="engine_no_logprobs",
            )
        return Answer(
            tokens=self.tokens,
            seconds=max(self.last, LEAST_SECONDS),
            first_token_seconds=self.first,
            acceptance=self.acceptance,
            top_logprobs=self.top if rated else None,
        )


def token_list(found: Any) -> list[int] | None:
    """Token ids as an engine lists them; None where it does not."""
    if not isinstance(found, list) or not all(isinstance(token, int) for token in found):
        return None
    return found
