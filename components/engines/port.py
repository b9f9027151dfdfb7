"""The port: what an engine must do so that it can be tuned, gated and benched; and what it says
about a decoded prompt."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any, Literal, Protocol

from pydantic import BaseModel, ConfigDict, Field

from draftwell.serving.runtime.requests import Sampling
from draftwell.serving.settings import Settings

TokenProb = tuple[int, float]
"""A token and its log-probability, natural logarithm."""


class EngineSettings(Settings):
    """What an engine is started with."""

    called, error_code = "engine setting", "bad_engine_setting"

    speculation: dict[str, Any] | None = Field(
        None, description="how it speculates, by its own keys; None: plain decoding"
    )
    slots: int = Field(1, ge=1, description="requests that it decodes at once, at most")
    context: int = Field(2048, ge=1, description="positions of a request: prompt and answer")


class Message(BaseModel):
    """What an engine says, also over a pipe."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class Capabilities(Message):
    """What an engine can do besides decoding; steps and commands ask this, and no class."""

    traces: bool = False
    """It says what draft and target think of every token, as traces hold it."""
    replay: bool = False
    """Its strategies run over traces, so that most settings need no run."""
    restart: bool = False
    """Another setting needs another start of it."""


EngineName = Literal["draftwell", "vllm"]
"""What the option `--engine` and the setting `engine` take."""
CAPABILITIES = {
    "draftwell": Capabilities(traces=True, replay=True),
    "vllm": Capabilities(restart=True),
}
"""Engine → what it can do."""


def capabilities(engine: str) -> Capabilities:
    """What an engine can do; one at an address can do nothing but decode."""
    return CAPABILITIES.get(engine, Capabilities())


LAUNCHED = {
    "vllm": ("ngram", "draft_model", "eagle3"),
    "sglang": ("ngram", "draft_model", "eagle3"),
    "llama.cpp": ("ngram", "draft_model"),
}
"""Engines that a launcher can tell how to speculate → methods that they have without packages or
plug-ins of their environment."""


class About(Message):
    """What an engine says about itself when it is ready."""

    version: str
    """Of the library, and of what it computes with."""
    device: str | None = None
    """That it computes on: cpu or cuda; None: it does not say."""
    notes: tuple[str, ...] = Field(
        (), strict=False, description="how it was run, for readers of its figures"
    )


class Acceptance(Message):
    """How drafts fared: sums over rounds in which the target verified a draft."""

    rounds: int = Field(0, ge=0)
    drafted: int = Field(0, ge=0, description="draft tokens that were verified")
    accepted: int = Field(0, ge=0)
    accepted_at: tuple[int, ...] = Field(
        (), strict=False, description="rounds that accepted the token at each position of the draft"
    )
    each: tuple[Annotated[tuple[int, int], Field(strict=False)], ...] = Field(
        (),
        strict=False,
        description="of a sum: of each of its answers, in their order, the rounds "
        "that accepted the first token, and all rounds",
    )

    @property
    def first(self) -> tuple[int, int]:
        """Rounds that accepted the first token, and all."""
        return (self.accepted_at[0] if self.accepted_at else 0), self.rounds

    @property
    def rate(self) -> float | None:
        """Accepted / drafted, 0 to 1; None where nothing was drafted."""
        return self.accepted / self.drafted if self.drafted else None

    @property
    def length(self) -> float | None:
        """Mean acceptance length, 1 + accepted / rounds (vLLM's convention); None where nothing was
        drafted."""
        return 1 + self.accepted / self.rounds if self.rounds else None

    @classmethod
    def of_histogram(
        cls, counts: Mapping[int, int] | Sequence[int], drafted: int = 0
    ) -> Acceptance:
        """Sums from how many rounds accepted 0, 1, 2, … draft tokens.

        >>> Acceptance.of_histogram([1, 2, 3], drafted=12).accepted_at
        (5, 3)
        """
        pairs = counts.items() if isinstance(counts, Mapping) else enumerate(counts)
        rounds = {accepted: int(times) for accepted, times in pairs}
        return cls(
            rounds=sum(rounds.values()),
            drafted=drafted,
            accepted=sum(accepted * times for accepted, times in rounds.items() if accepted > 0),
            accepted_at=tuple(
                sum(times for accepted, times in rounds.items() if accepted >= place)
                for place in range(1, max(rounds, default=0) + 1)
            ),
        )

    @classmethod
    def total(cls, parts: Iterable[Acceptance]) -> Acceptance:
        """Sums of several; `each` lists them, or what those that are sums list.

        >>> Acceptance.total(
        ...     [Acceptance(rounds=1, accepted_at=(1,)), Acceptance(rounds=2, accepted_at=(1, 1))]
        ... ).accepted_at
        (2, 1)
        """
        parts = list(parts)
        longest = max((len(part.accepted_at) for part in parts), default=0)
        at = (
            sum(part.accepted_at[i] for part in parts if i < len(part.accepted_at))
            for i in range(longest)
        )
        return cls(
            rounds=sum(part.rounds for part in parts),
            drafted=sum(part.drafted for part in parts),
            accepted=sum(part.accepted for part in parts),
            accepted_at=tuple(at),
            each=tuple(pair for part in parts for pair in (part.each or (part.first,))),
        )


class Answer(Message):
    """One decoded prompt; the clock is the engine's, so that no pipe is measured."""

    tokens: list[int]
    """New ones; at the end of text the stop token is the last."""
    seconds: float = Field(
        gt=0, description="from the request to its last token, the prompt's forward pass included"
    )
    first_token_seconds: float = Field(ge=0)
    acceptance: Acceptance = Acceptance()
    top_logprobs: list[list[TokenProb]] | None = Field(
        None,
        strict=False,
        description=(
            "for each token the likeliest ones with natural log-probabilities, the likeliest "
            "first; empty where the engine names none"
        ),
    )


class Decoded(Message):
    """A group of prompts that were sent at once."""

    seconds: float = Field(gt=0, description="until the last of them was complete")
    answers: list[Answer]

    @property
    def tokens(self) -> int:
        """New tokens of all answers."""
        return sum(len(answer.tokens) for answer in self.answers)


class Engine(Protocol):
    """Decodes token ids. After `stop` it can be started again, with other settings.

    Raises:
        DraftwellError: (of every method) one line that says what is wrong and what to do.
    """

    label: str

    def start(self, settings: EngineSettings) -> About:
        """Get ready to decode with these settings."""

    def decode(self, prompts: Sequence[Sequence[int]], sampling: Sampling) -> Decoded:
        """Decode prompts, all sent at once, at most as many as there are slots.

        Args:
            prompts: token ids.
            sampling: of the first prompt; each further prompt has the next seed. `logprobs` asks
                for `top_logprobs`.
        """

    def stop(self) -> None:
        """End it, with all that it started; harmless where it does not run."""
