"""Streams beside everything that a client may send to cost the others time or memory."""

from __future__ import annotations

import json
import multiprocessing
import random
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.server.bundles import make_bundle, save_tiny_models
from tests.support.server.server_process import entry_with, server_process, wait_until

ALLOWED = 64
"""MiB of bodies."""
STALL = 0.25
HEAD = (
    b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    b"Transfer-Encoding: chunked\r\n\r\n"
)
PLAIN: dict[str, Any] = {"model": "tiny", "prompt": "hello", "max_tokens": 2}
LONG: dict[str, Any] = PLAIN | {"max_tokens": 900, "ignore_eos": True, "stream": True}


def connect(url: str) -> socket.socket:
    host, port = url.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)), timeout=60)


def send_endlessly(url: str, piece: bytes) -> None:
    """64 MiB of a body, as far as the server takes them."""
    chunk = piece * (2**16 // len(piece))
    with connect(url) as connection, suppress(OSError):
        connection.sendall(HEAD)
        for _ in range(2**26 // len(chunk)):
            connection.sendall(b"%x\r\n%s\r\n" % (len(chunk), chunk))


def malformed(count: int) -> Iterator[bytes]:
    """Bodies that are broken in random places."""
    draw = random.Random(0)
    right = json.dumps(PLAIN | {"logit_bias": {"1": 2}, "stop": ["a"]}).encode()
    for _ in range(count):
        body = bytearray(right)
        for _ in range(3):
            body[draw.randrange(len(body))] = draw.randrange(1, 256)
        yield bytes(body)


def attack(url: str, say: Callable[[str], None]) -> None:
    """In a process of its own: whatever it costs must not stall the reader of the streams.

    Args:
        say: called with what comes next.
    """
    say("half open")
    with ExitStack() as held, httpx.Client(base_url=url, timeout=100) as http:
        for _ in range(500):
            held.enter_context(connect(url)).sendall(HEAD[:40])
        say("slow readers")
        for _ in range(8):
            slow = held.enter_context(connect(url))
            body = json.dumps(LONG).encode()
            slow.sendall(HEAD + b"%x\r\n%s\r\n0\r\n\r\n" % (len(body), body))
        for piece in (b"[" * 8, b'{"":', b"[],", b'{"":0},', b'"' + b"\\" * 7):
            say(f"64 MiB of {piece!r}")
            send_endlessly(url, piece)
        heavy: Iterable[dict[str, Any]] = (
            PLAIN | {"user": "x" * (8 * 2**20 - 200)},
            PLAIN | {"metadata": {str(i): i for i in range(8000)}},
            PLAIN | {"logit_bias": {f"-{i}": "a" for i in range(16_000)}},
            PLAIN | {"prompt": [[1] * 1000] * 128},
            {"model": "tiny", "messages": [{"role": "user", "content": "a" * 400_000}]},
        )
        for body in heavy:
            content = json.dumps(body).encode()
            say(f"six of {content[-50:]!r}, {len(content)} bytes")
            with ExitStack() as together:
                for _ in range(6):
                    one = together.enter_context(connect(url))
                    with suppress(OSError):
                        one.sendall(HEAD + b"%x\r\n%s\r\n0\r\n\r\n" % (len(content), content))
                time.sleep(1)
        say("malformed")
        for content in malformed(2000):
            answer = http.post(
                "/v1/completions", content=content, headers={"Content-Type": "application/json"}
            )
            assert answer.status_code < 500, (content, answer.text)


@contextmanager
def streams(url: str, count: int, gaps: list[tuple[float, float]]) -> Iterator[None]:
    """So many streams, one after another each; when a piece of one came, and how long after the one
    before, goes to `gaps`."""
    stop = threading.Event()

    def read() -> None:
        with httpx.Client(base_url=url, timeout=100) as http:
            while not stop.is_set():
                with http.stream("POST", "/v1/completions", json=LONG) as answer:
                    assert answer.status_code == 200
                    last = None
                    for _ in answer.iter_raw():
                        now = time.monotonic()
                        if last is not None:
                            gaps.append((now, now - last))
                        last = now

    threads = [threading.Thread(target=read) for _ in range(count)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        stop.set()
        for thread in threads:
            thread.join()


def memory_of(pid: int) -> float:
    """MiB that a process has in memory now."""
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.partition("VmRSS:")[2].split()[0]) / 1024


@pytest.mark.slow
@pytest.mark.timed
def test_eight_streams_go_on_beside_hostile_clients(tmp_path: Path) -> None:
    models = save_tiny_models(tmp_path / "models", context=1024)
    bundle = make_bundle(tmp_path / "bundle", models, "autoregressive")
    options = ["--port", "0", "--slots", "24"]
    gaps: list[tuple[float, float]] = []
    with server_process(
        [*entry_with(bodies_bytes=ALLOWED << 20), "--bundle", str(bundle), *options]
    ) as (process, url):
        wait_until(lambda: httpx.get(f"{url}/ready").status_code == 200, "ready")
        with streams(url, 8, gaps):
            time.sleep(3)
            before = most = memory_of(process.pid)
            begun = [("calm", 0.0)]
            context = multiprocessing.get_context("spawn")
            said = context.SimpleQueue()
            attacker = context.Process(target=attack, args=(url, said.put))
            attacker.start()
            while attacker.is_alive():
                while not said.empty():
                    begun.append((said.get(), time.monotonic()))
                most = max(most, memory_of(process.pid))
                time.sleep(0.02)
        assert attacker.exitcode == 0
    longest = dict.fromkeys((what for what, _ in begun), 0.0)
    for when, gap in gaps:
        what = max((start, what) for what, start in begun if start <= when)[1]
        longest[what] = max(longest[what], gap)
    print(f"memory +{most - before:.0f} MiB; longest gaps: {json.dumps(longest, indent=1)}")
    assert max(longest.values()) < STALL
    assert most - before < 1.1 * ALLOWED
