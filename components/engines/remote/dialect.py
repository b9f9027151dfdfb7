"""The protocol of an engine's API: what it says about itself, how it decodes token ids, and what
its metrics say."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, Protocol

from draftwell.components.engines.port import About, Answer
from draftwell.components.engines.remote.client import EngineClient
from draftwell.components.engines.remote.counters import Counters
from draftwell.serving.runtime.requests import Sampling

DialectName = Literal["vllm", "sglang", "llama.cpp", "draftwell", "openai"]


class Dialect(Protocol):
    """How one kind of server is spoken to.

    Raises:
        DraftwellError: (of every method) one line that says what is wrong and what to do.
    """

    switches_off: bool
    """Whether a request can ask for plain decoding."""

    @property
    def name(self) -> str:
        """Of the kind of server: one of `DialectName`, or a plug-in's own."""

    def about(self, client: EngineClient) -> About:
        """What the server says about itself."""

    def tokens_of(self, client: EngineClient, text: str) -> list[int] | None:
        """How the served model splits a text, without special tokens; None where it does not
        say."""

    def decode_one(
        self,
        client: EngineClient,
        ids: Sequence[int],
        sampling: Sampling,
        *,
        speculate: bool = True,
    ) -> Answer:
        """Decode one prompt.

        Args:
            ids: token ids of the prompt.
            speculate: False asks for plain decoding, where `switches_off`.
        """

    def counters(self, client: EngineClient) -> Counters:
        """What its metrics say now; where it has none, a `Counters` that says nothing."""
