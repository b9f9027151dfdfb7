"""An engine that needs no library: it answers over the real protocol, by a clock of its own, or
misbehaves as it is told.

The setting `fault`, or the variable FAKE_PEER_FAULT, says how it misbehaves: a word, or
`word@method` for one way to speculate. The variable FAKE_ENGINE_SPEEDS says how fast it is: JSON,
`method`, `method:k` or `method:k@requests` → times plain decoding. FAKE_ENGINE_ACCEPTED says how
many tokens of an answer's two drafts are kept: JSON, such as [2, 1].
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "components" / "engines" / "drivers"))

import peer_protocol
from peer_protocol import Decode, Request, Settings, Tokens, serve

SECONDS = 0.01
"""Of the own clock, for a token of plain decoding."""
LAST_WORDS = {
    "memory": "ValueError: No available memory for the cache blocks. Try increasing it.",
    "plugin": (
        "Traceback (most recent call last):\nModuleNotFoundError: No module named "
        "'arctic_inference'"
    ),
}


def start(settings: Settings) -> tuple[Decode, dict[str, Any]]:
    """Load nothing."""
    speculation = settings.get("speculation") or {}
    fault, _, where = (settings.get("fault") or os.environ.get("FAKE_PEER_FAULT") or "").partition(
        "@"
    )
    if where not in ("", speculation.get("method", "off")):
        fault = ""
    print("a library says hello")  # must not be taken for an answer
    if fault in LAST_WORDS:
        sys.exit(LAST_WORDS[fault])
    if fault == "cache" and not os.environ.get("VLLM_DISABLE_COMPILE_CACHE"):
        print(
            "WARNING Compiling model again due to a load failure from a file",
            file=sys.stderr,
            flush=True,
        )
        os.abort()
    if fault == "start":
        raise RuntimeError("no such\nmodel")
    if fault == "slow":
        time.sleep(3600)
    if fault == "spin":
        threading.Thread(target=spin, daemon=True).start()
    clock = [0.0]
    if fault != "spin":
        peer_protocol.time = SimpleNamespace(perf_counter=lambda: clock[0])  # type: ignore[assignment]

    requests = count(1)

    def decode(request: Request, found: list[Tokens]) -> None:
        if fault == "die" or (fault == "die later" and next(requests) == 3):
            os._exit(3)
        if fault == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if fault == "hang":
            time.sleep(3600)
        pace = SECONDS / speed_of(speculation, len(found))
        for ids, tokens in zip(request["prompts"], found, strict=True):
            begun = clock[0]
            answer(ids, request, tokens, clock, pace * (1 + len(ids) % 3 / 50))
            if tokens is not found[-1]:
                clock[0] = begun  # at once
        if fault == "wrong":
            found[0].ids = ["x"]  # type: ignore[list-item]
        if fault == "lossy" and speculation:
            found[0].ids[-1] = 1 + found[0].ids[-1]

    note = f"fake: {settings['threads']} threads, OMP_NUM_THREADS={os.environ['OMP_NUM_THREADS']}"
    return decode, {
        "version": "fake 1.0",
        "notes": [note],
        "device": os.environ.get("FAKE_ENGINE_DEVICE", "cpu"),
    }


def answer(
    ids: list[int], request: Request, tokens: Tokens, clock: list[float], pace: float
) -> None:
    """The prompt again and again."""
    for i in range(request["max_tokens"]):
        clock[0] += pace
        tokens.add(ids[i % len(ids)])
        if request["logprobs"]:
            tokens.top.append([(tokens.ids[-1], -0.1), (tokens.ids[-1] + 1, -2.5)])
        if tokens.ids[-1] in request["stop_token_ids"]:
            break
    tokens.drafted, tokens.accepted = (
        [2, 2],
        json.loads(os.environ.get("FAKE_ENGINE_ACCEPTED", "[2, 1]")),
    )


def speed_of(speculation: dict[str, Any], requests: int) -> float:
    """Times plain decoding."""
    speeds = json.loads(os.environ.get("FAKE_ENGINE_SPEEDS", "{}"))
    name, k = speculation.get("method", "off"), speculation.get("num_speculative_tokens", 0)
    for first, last, lengths in speculation.get("num_speculative_tokens_per_batch_size", []):
        if first <= requests <= last:
            k = lengths
    if k == 0:
        return float(speeds.get(f"{name}:0@{requests}", speeds.get("off", 1.0)))
    named = (f"{name}:{k}@{requests}", f"{name}:{k}", name)
    return float(next((speeds[key] for key in named if key in speeds), 0.9))


def spin() -> None:
    """As threads of OpenMP that wait for work."""
    while True:
        pass


if __name__ == "__main__":
    serve(start)
