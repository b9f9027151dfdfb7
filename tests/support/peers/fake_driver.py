"""A peer that needs no library: it answers over the real protocol, or misbehaves as the setting `fault` says."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "components" / "bench" / "peers" / "drivers"))

from peer_protocol import Decode, Settings, Tokens, serve


def start(settings: Settings) -> tuple[Decode, dict[str, Any]]:
    """Load nothing."""
    fault = settings.get("fault") or os.environ.get("FAKE_PEER_FAULT")
    print("a library says hello")  # must not be taken for an answer
    if fault == "start":
        raise RuntimeError("no such\nmodel")
    if fault == "spin":
        threading.Thread(target=spin, daemon=True).start()

    def decode(ids: Sequence[int], max_tokens: int, stops: Sequence[int], tokens: Tokens) -> None:
        if fault == "die":
            os._exit(3)
        if fault == "hang":
            time.sleep(3600)
        for i in range(max_tokens):
            tokens.add(ids[i % len(ids)] if fault != "wrong" else "x")  # type: ignore[arg-type]
            if tokens.ids[-1] in stops:
                return

    note = f"fake: {settings['threads']} threads, OMP_NUM_THREADS={os.environ['OMP_NUM_THREADS']}"
    return decode, {"version": "fake 1.0", "notes": [note]}


def spin() -> None:
    """As threads of OpenMP that wait for work."""
    while True:
        pass


if __name__ == "__main__":
    serve(start)
