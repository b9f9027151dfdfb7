"""A request: how its tokens are drawn, and the text that is being written."""

from __future__ import annotations

import hashlib
import math
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Literal

from draftwell.serving.errors import InvalidRequest

if TYPE_CHECKING:
    from draftwell.serving.runtime.grammar.masks import Grammar

FinishReason = Literal["stop", "length"]


@dataclass(frozen=True)
class Sampling:
    """How a request's tokens are drawn.

    Args:
        max_tokens: tokens to emit at most, at least 1.
        temperature: 0 means greedy.
        top_k: keep the k most likely tokens, 0 keeps all.
        top_p: keep the smallest set with at least this probability, in (0, 1].
        min_p: keep the tokens with at least this share of the likeliest one's probability, in [0,
            1]; 0 keeps all.
        seed: seed of all random streams of the request.
        stop_token_ids: tokens that end the text (EOS among them); the token itself is part of the
            output.
        min_tokens: tokens that the output has before a stop token may come.
        banned_token_ids: tokens that neither draft nor target may produce.
        presence_penalty: subtracted once from the logit of every token that the output holds
            already (OpenAI's meaning).
        frequency_penalty: subtracted as often as the output holds the token. Prompt tokens never
            count for either.
        repetition_penalty: what the logit of a token that prompt or output holds is divided by if
            it is positive, else multiplied by; above 0, 1 changes nothing (Keskar 2019; as in
            transformers and vLLM).
        logit_bias: token → number added to its logit; kept as sorted pairs.
        repeatable: the answer shall be the same again, because the client chose the seed.
        coupled: of a sampled request: the seed alone says which token is drawn at a position,
            whatever was drafted there. The engine asks `Strategy.couples`.
        prediction: tokens of the answer that the client expects, which are drafted where they fit
            (drafting/prediction.py); whatever they are, the output follows the same distribution.
        grammar: what the output has to be; every token of target and drafts follows it. It ends
            with one of `stop_token_ids`.
        draft_forced: draft what the grammar leaves no choice about; never changes the output's
            distribution.
        logprobs: rate every token by the target and name so many of the likeliest alongside it;
            None: rate nothing, which costs nothing.
    """

    max_tokens: int = 128
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    stop_token_ids: frozenset[int] = frozenset()
    banned_token_ids: frozenset[int] = frozenset()
    min_tokens: int = 0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] | tuple[tuple[int, float], ...] = ()
    repeatable: bool = False
    coupled: bool = False
    logprobs: int | None = None
    prediction: tuple[int, ...] = field(default=(), repr=False)
    grammar: Grammar | None = field(default=None, repr=False)
    draft_forced: bool = True

    def __post_init__(self) -> None:
        pairs = self.logit_bias.items() if isinstance(self.logit_bias, Mapping) else self.logit_bias
        object.__setattr__(self, "logit_bias", tuple(sorted(pairs)))
        if self.max_tokens < 1:
            raise InvalidRequest(f"max_tokens must be at least 1, not {self.max_tokens}")
        if not 0 <= self.temperature < math.inf:
            raise InvalidRequest(
                f"temperature must be a finite number of at least 0, not {self.temperature}"
            )
        if not 0 < self.top_p <= 1:
            raise InvalidRequest(f"top_p must be in (0, 1], not {self.top_p}")
        if self.top_k < 0:
            raise InvalidRequest(f"top_k must be at least 0, not {self.top_k}")
        if not 0 <= self.min_p <= 1:
            raise InvalidRequest(f"min_p must be in [0, 1], not {self.min_p}")
        if not 0 <= self.min_tokens <= self.max_tokens:
            raise InvalidRequest(
                f"min_tokens must be from 0 to max_tokens ({self.max_tokens}), not "
                f"{self.min_tokens}"
            )
        if not 0 < self.repetition_penalty < math.inf:
            raise InvalidRequest(
                "repetition_penalty must be a finite number above 0, not "
                f"{self.repetition_penalty}: 1 changes nothing"
            )
        if self.logprobs is not None and self.logprobs < 0:
            raise InvalidRequest(
                f"logprobs must be at least 0, not {self.logprobs}: leave it out for none"
            )
        for name in ("presence_penalty", "frequency_penalty"):
            if not math.isfinite(getattr(self, name)):
                raise InvalidRequest(f"{name} must be a finite number, not {getattr(self, name)}")
        for token, bias in self.biases:
            if not math.isfinite(bias):
                raise InvalidRequest(
                    f"logit_bias of token {token} must be a finite number, not {bias}: to "
                    "forbid a token, ban it"
                )

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def has_choice(self) -> bool:
        """Whether the target has one token at each position, which a draft meets or misses."""
        return self.greedy or self.coupled

    @property
    def warpers(self) -> tuple[float, int, float, float]:
        """What makes warped probabilities of logits."""
        return self.temperature, self.top_k, self.top_p, self.min_p

    @property
    def biases(self) -> tuple[tuple[int, float], ...]:
        """`logit_bias` as (token, number) pairs."""
        return (
            self.logit_bias
            if isinstance(self.logit_bias, tuple)
            else tuple(self.logit_bias.items())
        )

    @property
    def penalises(self) -> bool:
        """Whether the logits of a position depend on the tokens before it: by a penalty, because
        stop tokens may not come yet, or by a grammar."""
        counts = (
            self.presence_penalty != 0.0
            or self.frequency_penalty != 0.0
            or self.repetition_penalty != 1.0
        )
        return counts or self.grammar is not None or bool(self.min_tokens and self.stop_token_ids)


class Text:
    """Prompt and output of a request; only final tokens are ever appended.

    >>> text = Text([5, 6], Sampling(max_tokens=3, stop_token_ids=frozenset({9})))
    >>> text.append([7, 9, 8]), text.output, text.finish_reason
    (2, [7, 9], 'stop')
    """

    def __init__(self, prompt: Sequence[int], sampling: Sampling):
        if not prompt:
            raise InvalidRequest(
                "the prompt is empty: give at least one token", code="empty_prompt"
            )
        self.ids = list(prompt)
        self.prompt_length = len(prompt)
        self.sampling = sampling
        self.finish_reason: FinishReason | None = None

    @cached_property
    def prompt_digest(self) -> bytes:
        """The same for equal prompts, and for no others."""
        return hashlib.sha256(array("q", self.ids[: self.prompt_length])).digest()

    @property
    def output(self) -> list[int]:
        return self.ids[self.prompt_length :]

    @property
    def output_length(self) -> int:
        """Tokens of `output`, which is a copy."""
        return len(self.ids) - self.prompt_length

    @property
    def remaining(self) -> int:
        """Tokens that may still be emitted."""
        return self.sampling.max_tokens - self.output_length

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None

    def append(self, tokens: Sequence[int]) -> int:
        """Append final tokens up to the first stop token or the budget; return how many were
        taken."""
        taken = 0
        for token in tokens:
            if self.finished:
                break
            self.ids.append(token)
            taken += 1
            if token in self.sampling.stop_token_ids:
                self.finish_reason = "stop"
            elif self.remaining == 0:
                self.finish_reason = "length"
        return taken
