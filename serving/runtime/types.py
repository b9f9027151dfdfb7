"""The ground of the runtime: requests, commands, drafts, verdicts, and the text being written.

A strategy is a generator. It yields `Forward` (or `Overlap` of generators) and is sent an `Output`; everything else
it does is plain Python on plain data. The engine alone decides where, when and with whom a forward runs.

Terms: *accepted* = a draft token kept; *recovered* = the token sampled from the target at a rejection; *bonus* = the token
sampled from the target behind a fully accepted draft; *rescued* = a draft token kept against the exact rule.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol, TypeVar

if TYPE_CHECKING:
    from torch import Tensor

Role = Literal["target", "draft", "qualifier", "draft_onnx", "shadow"]
"""What a model is to its pair. `draft_onnx` is the draft in ONNX Runtime, loaded for strategies that prefer it."""
SHADOW: Literal["shadow"] = "shadow"
"""The draft where it only reads along (shadow.py)."""
FinishReason = Literal["stop", "length"]
Origin = Literal["accepted", "rescued", "recovered", "target"]
"""Where a final token comes from: the draft (kept by the exact rule, or against it), or the target (at a rejection, or elsewhere: plain
decoding, the prompt's first token, a bonus)."""
T = TypeVar("T")


class DraftwellError(Exception):
    """A user's mistake or a refused input: one line that names the thing and the mend (the CLI exits with code 2)."""


class InvalidRequest(DraftwellError):
    """A prompt or a sampling parameter that no model could serve."""


class ContextTooLong(InvalidRequest):
    """Prompt plus requested tokens exceed what a model can read."""


class VocabularyMismatch(DraftwellError):
    """Two models of a pair do not share a tokenizer."""


class NotFinite(DraftwellError):
    """A model returned NaN or infinite logits."""


class OutOfMemory(DraftwellError):
    """The device has no room for a forward or for the slots."""


@dataclass(frozen=True)
class Sampling:
    """How a request's tokens are drawn.

    Args:
        max_tokens: tokens to emit at most, at least 1.
        temperature: 0 means greedy.
        top_k: keep the k most likely tokens, 0 keeps all.
        top_p: keep the smallest set with at least this probability, in (0, 1].
        seed: seed of all random streams of the request.
        stop_token_ids: tokens that end the text (EOS among them); the token itself is part of the output.
        banned_token_ids: tokens that neither draft nor target may produce.
        presence_penalty: subtracted once from the logit of every token that the output holds already (OpenAI's meaning).
        frequency_penalty: subtracted as often as the output holds the token. Prompt tokens never count for either.
        logit_bias: token → number added to its logit; kept as sorted pairs.
        repeatable: the client chose the seed to get the same answer again: a busy server leaves such a request's drafts alone.
        logprobs: rate every token by the target and name so many of the likeliest beside it; None: rate nothing, which costs nothing.
    """

    max_tokens: int = 128
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    stop_token_ids: frozenset[int] = frozenset()
    banned_token_ids: frozenset[int] = frozenset()
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] | tuple[tuple[int, float], ...] = ()
    repeatable: bool = False
    logprobs: int | None = None

    def __post_init__(self) -> None:
        pairs = self.logit_bias.items() if isinstance(self.logit_bias, Mapping) else self.logit_bias
        object.__setattr__(self, "logit_bias", tuple(sorted(pairs)))
        if self.max_tokens < 1:
            raise InvalidRequest(f"max_tokens must be at least 1, not {self.max_tokens}")
        if not 0 <= self.temperature < math.inf:
            raise InvalidRequest(f"temperature must be a finite number of at least 0, not {self.temperature}")
        if not 0 < self.top_p <= 1:
            raise InvalidRequest(f"top_p must be in (0, 1], not {self.top_p}")
        if self.top_k < 0:
            raise InvalidRequest(f"top_k must be at least 0, not {self.top_k}")
        if self.logprobs is not None and self.logprobs < 0:
            raise InvalidRequest(f"logprobs must be at least 0, not {self.logprobs}: leave it out for none")
        for name in ("presence_penalty", "frequency_penalty"):
            if not math.isfinite(getattr(self, name)):
                raise InvalidRequest(f"{name} must be a finite number, not {getattr(self, name)}")
        for token, bias in self.biases:
            if not math.isfinite(bias):
                raise InvalidRequest(f"logit_bias of token {token} must be a finite number, not {bias}: to forbid a token, ban it")

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def biases(self) -> tuple[tuple[int, float], ...]:
        """`logit_bias` as (token, number) pairs."""
        return self.logit_bias if isinstance(self.logit_bias, tuple) else tuple(self.logit_bias.items())

    @property
    def penalises(self) -> bool:
        """Whether the logits of a position depend on the output before it."""
        return self.presence_penalty != 0.0 or self.frequency_penalty != 0.0


@dataclass(frozen=True)
class Forward:
    """Feed `tokens` to `model`'s slot and return the last `keep` rows of logits.

    Args:
        model: role of the model within the pair.
        slot: the slot that the engine opened for this request.
        tokens: tokens behind the slot's current end, at least one.
        keep: number of trailing positions whose logits are wanted, at most `len(tokens)`.
        prefill: the slot was empty; such a forward is timed and counted apart.
        steps: rows to return, the last of `tokens` and so many less one tokens that follow it greedily, each chosen by the
            largest logit where the model computes; above 1 for models with `chains` alone, and with `keep` = 1.
    """

    model: Role
    slot: int
    tokens: tuple[int, ...]
    keep: int = 1
    prefill: bool = False
    steps: int = 1


class Output:
    """What a forward returns: distributions and last hidden states of the kept positions.

    A model whose head covers a part of the vocabulary gives the logits of that part; all others are −∞.

    Args:
        compact: `[keep, columns]` float32 logits, as the model gives them.
        hidden: `[keep, hidden]`, normalised last hidden states, or None where the model has none.
        support: `[columns]` ascending ids of the tokens that the columns are for; None: column i is token i.
        vocab_size: of the pair, needed with `support`.
    """

    def __init__(self, compact: Tensor, hidden: Tensor | None = None, support: Tensor | None = None, vocab_size: int = 0):
        self.compact, self.hidden, self.support, self.vocab_size = compact, hidden, support, vocab_size
        self._logits: Tensor | None = None

    @property
    def logits(self) -> Tensor:
        """`[keep, vocab]` float32, made when first looked at."""
        if self._logits is None:
            from serving.runtime.sampling import spread

            self._logits = spread(self.compact, self.support, self.vocab_size, -math.inf)
        return self._logits

    def __len__(self) -> int:
        return int(self.compact.shape[0])

    def last(self, count: int) -> Output:
        """The last `count` of the kept positions."""
        return self.part(len(self) - count, len(self)) if count < len(self) else self

    def part(self, start: int, end: int) -> Output:
        """The kept positions from `start` up to `end`."""
        states = None if self.hidden is None else self.hidden[start:end]
        return Output(self.compact[start:end], states, self.support, self.vocab_size)

    def rows(self, sampling: Sampling, written: Sequence[int] = ()) -> Rows:
        """The kept positions under a request's sampling parameters.

        Args:
            written: output and draft tokens before the token that the last row predicts, for penalties; the row before it
                counts one token fewer, and so on.
        """
        from serving.runtime.sampling import LogitRows

        if sampling.banned_token_ids or sampling.biases or sampling.penalises:  # they name tokens, of which some may have no column
            return LogitRows(self.logits, sampling, self.hidden, written)
        return LogitRows(self.compact, sampling, self.hidden, support=self.support, vocab_size=self.vocab_size)


class TokenFigures(NamedTuple):
    """What the raw distribution of a row says of one token, and of itself."""

    raw_prob: float
    confidence: float
    entropy: float
    rank: int
    """How many tokens have a larger raw probability."""


class Rating(NamedTuple):
    """What the target thinks of a token: natural logarithms of its raw probabilities (temperature 1, bans applied, before penalties,
    biases, top-k and top-p), whatever the strategy."""

    logprob: float
    top: tuple[tuple[int, float], ...] = ()
    """The likeliest tokens of the position with theirs, best first."""


class Emitted(NamedTuple):
    """A final token as a request hands it out.

    Args:
        rating: where the request asked for log-probs.
    """

    id: int
    origin: Origin = "target"
    rating: Rating | None = None


class Recorder(Protocol):
    """Sees what the models of one request say."""

    def saw(self, role: Role, sequence: Sequence[int], output: Output, steps: int) -> None:
        """A forward of draft or target is over; must not raise.

        Args:
            sequence: text and draft that the model has read now; its list may grow, what is in it stays.
            output: what it says at its last positions, each about the token that comes next.
            steps: as in `Forward`: behind `sequence` the model has read its own greedy tokens, one fewer.
        """


class Rows(Protocol):
    """Distributions of consecutive positions of one model: *warped* for sampling and judging, *raw* for the rest."""

    sampling: Sampling

    def __len__(self) -> int: ...

    @property
    def top(self) -> list[int]:
        """The most likely token of each row."""

    def probs(self, row: int) -> Tensor:
        """Warped probabilities `[vocab]` float32 of a row."""

    def raw(self, row: int) -> Tensor:
        """Raw probabilities `[vocab]` float32 (temperature 1, bans applied) of a row."""

    def raw_logprobs(self, row: int) -> Tensor:
        """Natural logarithms `[vocab]` float32 of a row's raw probabilities."""

    def raw_logit(self, row: int, token: int) -> float:
        """Raw logit of a token."""

    def confidence(self, row: int) -> float:
        """C: the largest raw probability of a row."""

    def raw_prob(self, row: int, token: int) -> float:
        """Raw probability of a token."""

    def entropy(self, row: int) -> float:
        """Entropy of the raw distribution of a row, in nats."""

    def token_figures(self, row: int, token: int) -> TokenFigures:
        """Raw probability and rank of a token, and C and entropy of its row, at the price of one of them."""

    def hidden(self, row: int) -> Tensor:
        """Last hidden state `[hidden]` of a row."""

    def sample(self, row: int, stream: Stream) -> int:
        """Draw from the warped distribution of a row; a greedy request consumes no randomness."""


class Stream(Protocol):
    """A private source of random decisions."""

    def draw(self, probs: Tensor) -> int:
        """Draw a token from `probs` `[vocab]`, which need not be normalised."""

    def accepts(self, target_prob: float, draft_prob: float) -> bool:
        """True with probability min(1, target_prob / draft_prob)."""


Step = Generator["Forward | Overlap", Any, T]
"""A generator of commands that ends with a value of type T."""


class Overlap:
    """Generators that run at once; the reply is the tuple of their return values.

    Sides that wait for the same model are run as one batch, sides that wait for different models side by side.
    """

    def __init__(self, *sides: Generator[Any, Any, Any]):
        self.sides = sides


@dataclass
class Draft:
    """Tokens proposed for verification.

    Args:
        tokens: the proposed ids, in order.
        rows: for each token the one-row distribution it was drawn from; empty for a deterministic proposal (n-gram,
            ranked candidates), whose distribution is one-hot.
        confidence: C of each token's distribution, where the drafter computes it (METHODS, "Two pairs").
        cut: a busy server's limit ended it, so its length says nothing of the stop policy.
    """

    tokens: list[int] = field(default_factory=list)
    rows: list[Rows] = field(default_factory=list)
    confidence: list[float] = field(default_factory=list)
    cut: bool = field(default=False, compare=False)

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, part: slice) -> Draft:
        return Draft(self.tokens[part], self.rows[part], self.confidence[part])

    def __add__(self, other: Draft) -> Draft:
        return Draft(self.tokens + other.tokens, self.rows + other.rows, self.confidence + other.confidence)


@dataclass
class Verdict:
    """What an acceptance rule decided about a draft.

    Args:
        accepted: number of leading draft tokens kept (rescued ones included).
        token: the token sampled from the target behind them, or None when the text ended inside the draft.
        judged: number of draft tokens looked at: the kept ones and the first rejected.
        rescued_at: places of the draft tokens kept against the exact rule.
    """

    accepted: int
    token: int | None
    judged: int
    rescued_at: Sequence[int] = ()

    @property
    def rejected(self) -> bool:
        return self.judged > self.accepted

    @property
    def rescued(self) -> int:
        """How many were kept against the exact rule."""
        return len(self.rescued_at)

    @property
    def origins(self) -> list[Origin]:
        """Of the kept tokens, and of the one behind them if there is one.

        >>> Verdict(accepted=2, token=9, judged=3, rescued_at=[1]).origins
        ['accepted', 'rescued', 'recovered']
        """
        kept: list[Origin] = ["rescued" if i in self.rescued_at else "accepted" for i in range(self.accepted)]
        if self.token is not None:
            kept.append("recovered" if self.rejected else "target")
        return kept


@dataclass
class Choice:
    """What a rule decided about alternatives for one position.

    Args:
        rank: index of the candidate kept, or None.
        token: the candidate kept, or the token sampled from the target in its place.
        tested: candidates looked at.
    """

    rank: int | None
    token: int
    tested: int


class Text:
    """Prompt and output of a request; only final tokens are ever appended.

    >>> text = Text([5, 6], Sampling(max_tokens=3, stop_token_ids=frozenset({9})))
    >>> text.append([7, 9, 8]), text.output, text.finish_reason
    (2, [7, 9], 'stop')
    """

    def __init__(self, prompt: Sequence[int], sampling: Sampling):
        if not prompt:
            raise InvalidRequest("the prompt is empty: give at least one token")
        self.ids = list(prompt)
        self.prompt_length = len(prompt)
        self.sampling = sampling
        self.finish_reason: FinishReason | None = None

    @property
    def output(self) -> list[int]:
        return self.ids[self.prompt_length :]

    @property
    def remaining(self) -> int:
        """Tokens that may still be emitted."""
        return self.sampling.max_tokens - (len(self.ids) - self.prompt_length)

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None

    def append(self, tokens: Sequence[int]) -> int:
        """Append final tokens up to the first stop token or the budget; return how many were taken."""
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


class Model(Protocol):
    """A model over slots. `module_model.ModuleModel`, the ONNX and the table model implement it.

    A slot is one request's view: tokens are fed in order, `rollback` forgets the last ones.
    """

    vocab_size: int
    max_context: int

    def open(self) -> int:
        """Take a free slot of length 0."""

    def close(self, slot: int) -> None:
        """Give the slot back."""

    def rollback(self, slot: int, length: int) -> None:
        """Forget everything behind the first `length` tokens of a slot."""

    def open_branch(self) -> int:
        """Take a slot for a further sequence of a request that has a slot already; there is always one."""

    def fork(self, source: int, into: int, length: int, known: int = 0) -> None:
        """Make slot `into` hold the first `length` tokens of slot `source`, and nothing else; the first `known` it holds already."""

    def forward(self, rows: Sequence[Forward]) -> list[Output]:
        """Run all rows as one ragged batch; at most one row per slot."""


class StopPolicy(Protocol):
    """Decides when a draft is long enough; one object serves one request.

    It may read the draft's own distributions and tokens, never the uniforms or the target of this round. The token it
    looked at stays in the draft: dropping it would bias the output (METHODS, condition 2).
    """

    def start(self) -> None:
        """A new draft begins."""

    def stop_before(self, row: Rows) -> bool:
        """Whether to stop before a token is drawn from the one-row `row`; the draft may then be empty."""

    def stop_after(self, row: Rows, token: int) -> bool:
        """Whether to stop behind `token`, drawn from the one-row `row`."""
