"""An engine that is simulated: which tokens follow, how drafts fare, and what is counted."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from random import Random

VOCABULARY = 64


def letters(text: str) -> list[int]:
    """A text as tokens: its bytes, folded into the vocabulary."""
    return [byte % VOCABULARY for byte in text.encode()]


@dataclass
class SimulatedEngine:
    """Decodes by a law: the next token depends on the last one and on the length.

    Args:
        accepts: probability that a draft's token at each position is accepted after those before
            it; as long as drafts are. Empty: it does not speculate.
        step_seconds: that a round takes.
        cached: share of a prompt's tokens that is read from a cache.
        split: how it splits texts into tokens.
        stop: ends a text where it is the next token.
        start_seconds: Unix time of its start.
    """

    accepts: tuple[float, ...] = (0.8, 0.6, 0.4)
    step_seconds: float = 0.0
    cached: float = 0.0
    version: str = "0.32.0"
    split: Callable[[str], list[int]] = letters
    stop: int | None = None
    seed: int = 0
    start_seconds: float = 1_700_000_000.0
    requests: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    new_tokens: int = 0
    rounds: int = 0
    drafted: int = 0
    accepted_at: list[int] = field(default_factory=list)
    decode_seconds: float = 0.0
    running: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def __post_init__(self) -> None:
        self.accepted_at = self.accepted_at or [0] * len(self.accepts)

    @property
    def accepted(self) -> int:
        """Draft tokens that were accepted."""
        return sum(self.accepted_at)

    def next_token(self, ids: Sequence[int]) -> int:
        """The token that follows."""
        return (31 * ids[-1] + 7 * len(ids)) % VOCABULARY

    def text(self, prompt: Sequence[int], max_tokens: int) -> list[int]:
        """What it writes after a prompt, however it speculates."""
        ids = list(prompt)
        while len(ids) < len(prompt) + max_tokens:
            ids.append(self.next_token(ids))
            if ids[-1] == self.stop:
                break
        return ids[len(prompt) :]

    def decode(
        self, prompt: Sequence[int], max_tokens: int, *, speculate: bool = True
    ) -> tuple[list[list[int]], list[tuple[int, int]]]:
        """The tokens of each delivery, the first one's from the prompt; and of each round that
        verified a draft how many tokens were drafted and accepted."""
        text = self.text(prompt, max_tokens)
        random = Random(f"{self.seed} {list(prompt)}")
        deliveries, rounds, done = [text[:1]], [], 1
        while done < len(text):
            time.sleep(self.step_seconds)
            drafted = min(len(self.accepts) if speculate else 0, len(text) - done - 1)
            accepted = 0
            while accepted < drafted and random.random() < self.accepts[accepted]:
                accepted += 1
            if drafted:
                rounds.append((drafted, accepted))
            deliveries.append(text[done : done + accepted + 1])
            done += accepted + 1
        self.count(prompt, text, rounds)
        return deliveries, rounds

    def count(
        self, prompt: Sequence[int], text: Sequence[int], rounds: Sequence[tuple[int, int]]
    ) -> None:
        """Count a request that has ended."""
        with self.lock:
            self.requests += 1
            self.prompt_tokens += len(prompt)
            self.cached_tokens += int(self.cached * len(prompt))
            self.new_tokens += len(text)
            self.rounds += len(rounds)
            self.drafted += sum(drafted for drafted, _ in rounds)
            self.decode_seconds += 0.001 * max(1, len(text) - len(rounds))
            for _, accepted in rounds:
                for place in range(accepted):
                    self.accepted_at[place] += 1

    def histogram(self, rounds: Sequence[tuple[int, int]]) -> list[int]:
        """Of a request, rounds that accepted 0, 1, 2, … tokens."""
        counts = [0] * (len(self.accepts) + 1)
        for _, accepted in rounds:
            counts[accepted] += 1
        return counts
