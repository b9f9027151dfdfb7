"""The peer's side of the protocol: one JSON object per line, settings first, then a request for every answer.

It needs nothing but the standard library: the interpreter is that of the peer's environment.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

Settings = dict[str, Any]
Decode = Callable[[Sequence[int], int, Sequence[int], "Tokens"], None]
"""Called with (prompt ids, max_tokens, stop token ids, tokens): adds the new tokens to `tokens` as they come."""
PR_SET_PDEATHSIG = 1


class Tokens:
    """The new tokens of a request, and when the first one came."""

    def __init__(self) -> None:
        self.ids: list[int] = []
        self.started = time.perf_counter()
        self.first = 0.0

    def add(self, *tokens: int) -> None:
        """Note new tokens."""
        if tokens and not self.ids:
            self.first = time.perf_counter() - self.started
        self.ids += tokens

    def answer(self) -> dict[str, Any]:
        """The request is over."""
        return {"seconds": time.perf_counter() - self.started, "tokens": self.ids, "first_token_seconds": self.first}


def serve(start: Callable[[Settings], tuple[Decode, dict[str, Any]]]) -> None:
    """Answer until the input ends.

    Args:
        start: loads the model of the settings; returns what decodes, and `version` and `notes`.
    """
    end_with_parent()
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # whatever a library prints goes to the log, not among the answers

    def say(message: dict[str, Any]) -> None:
        answers.write(json.dumps(message) + "\n")
        answers.flush()

    decode, about = start(json.loads(sys.stdin.readline()))
    say(about)
    for line in sys.stdin:
        request = json.loads(line)
        tokens = Tokens()
        decode(request["prompt_ids"], request["max_tokens"], request["stop_token_ids"], tokens)
        say(tokens.answer())


def end_with_parent() -> None:
    """Let the system kill this process when the bench is killed: stopped, it would not notice. Linux only."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
