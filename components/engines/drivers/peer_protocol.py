"""The engine's side of the protocol: one JSON object per line, settings first, then a request for
every group of answers.

It needs nothing but the standard library: the interpreter is that of the engine's environment.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

Settings = dict[str, Any]
Request = dict[str, Any]
"""`prompts` (lists of token ids, sent at once), `max_tokens`, `stop_token_ids`, `temperature`,
`top_k`, `top_p`, `seed` (of the first prompt; the next has the next), `logprobs` (how many of the
likeliest tokens to name, or None)."""
Decode = Callable[[Request, "list[Tokens]"], None]
"""Called with a request and an object for each of its prompts: adds the new tokens to it as they
come."""


class Tokens:
    """The new tokens of a prompt, when they came, how drafts fared, and the likeliest tokens at
    each position."""

    def __init__(self) -> None:
        self.ids: list[int] = []
        self.started = time.perf_counter()
        self.first = self.last = 0.0
        self.accepted: list[int] = []
        self.drafted: list[int] = []
        self.top: list[list[tuple[int, float]]] = []

    def add(self, *tokens: int) -> None:
        """Note new tokens."""
        if not tokens:
            return
        self.last = time.perf_counter() - self.started
        if not self.ids:
            self.first = self.last
        self.ids += tokens

    def acceptance(self) -> dict[str, Any]:
        """Sums over `accepted` and `drafted`, which have an entry for each round that verified a
        draft."""
        longest = max(self.drafted, default=0)
        return {
            "rounds": len(self.drafted),
            "drafted": sum(self.drafted),
            "accepted": sum(self.accepted),
            "accepted_at": [sum(count > i for count in self.accepted) for i in range(longest)],
        }

    def answer(self, ratings: bool) -> dict[str, Any]:
        """The prompt's answer."""
        return {
            "tokens": self.ids,
            "seconds": self.last or time.perf_counter() - self.started,
            "first_token_seconds": self.first,
            "acceptance": self.acceptance(),
            "top_logprobs": self.top if ratings else None,
        }


def serve(start: Callable[[Settings], tuple[Decode, dict[str, Any]]]) -> None:
    """Answer until the input ends.

    Args:
        start: loads the model of the settings; returns what decodes, and `version` and `notes`.
    """
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # whatever a library prints goes to the log, not among the answers

    def say(message: dict[str, Any]) -> None:
        answers.write(json.dumps(message) + "\n")
        answers.flush()

    decode, about = start(json.loads(sys.stdin.readline()))
    say(about)
    for line in sys.stdin:
        request = json.loads(line)
        found = [Tokens() for _ in request["prompts"]]
        started = time.perf_counter()
        decode(request, found)
        seconds = time.perf_counter() - started
        say(
            {
                "seconds": seconds,
                "answers": [tokens.answer(request["logprobs"] is not None) for tokens in found],
            }
        )


def one_by_one(decode: Callable[[Sequence[int], Request, Tokens], None]) -> Decode:
    """A library that decodes one prompt at a time."""

    def all_of(request: Request, found: list[Tokens]) -> None:
        for place, (ids, tokens) in enumerate(zip(request["prompts"], found, strict=True)):
            decode(ids, {**request, "seed": request["seed"] + place}, tokens)

    return all_of
