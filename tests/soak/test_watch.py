"""The watchdog on live engines: silences are planted in our server with a tiny pair, and in
llama.cpp's server where one can be started, and each has to be named with its cause.

Some minutes; `make soak` runs it, `-s` shows what was found when. Time is compressed: a look every
second and a half. DRAFTWELL_TEST_LLAMA names the Python of an environment with xllamacpp;
llama.cpp is left out without it.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from draftwell.components.engines.remote.address import parse_address
from draftwell.components.watch.report import alarm_line
from draftwell.flows.steps.remote.watch import Watch, look, open_watch
from draftwell.serving.runtime.strategies import build_strategy
from tests.support.server.served_pair import TunedModel, serving, tiny_pair

pytestmark = [pytest.mark.soak, pytest.mark.timeout(3600)]

SECONDS = float(os.environ.get("DRAFTWELL_TEST_WINDOW_SECONDS", "1.5"))
LIMITS = "baseline_windows: 70\nwarm_up_seconds: 0\nquiet_days: 1\nlost_seconds: 30\n"
LOOKS = 30
"""Within which a planted silence has to be named."""
MOST_CLIENTS = 32


def ordinary(order: random.Random) -> dict[str, Any]:
    """A request to the default pair."""
    who = order.choice(["a cat", "a dog", "a king", "two friends", "an old man"])
    return {"prompt": f"Once upon a time {who}", "max_tokens": 8, "temperature": 0}


@dataclass
class Traffic:
    """Clients that ask one thing after another, until the block is left."""

    url: str
    make: Callable[[random.Random], dict[str, Any]] = ordinary
    clients: int = 2
    end: threading.Event = field(default_factory=threading.Event)

    @contextmanager
    def running(self) -> Iterator[Traffic]:
        """Ask meanwhile."""
        with httpx.Client(timeout=300) as http:
            name = http.get(f"{self.url}/v1/models").json()["data"][0]["id"]
            threads = [
                threading.Thread(target=self.ask, args=(i, http, name)) for i in range(MOST_CLIENTS)
            ]
            for thread in threads:
                thread.start()
            try:
                yield self
            finally:
                self.end.set()
                for thread in threads:
                    thread.join()

    def ask(self, number: int, http: httpx.Client, name: str) -> None:
        """One client; those above `clients` wait."""
        order = random.Random(number)
        while not self.end.is_set():
            if number >= self.clients:
                self.end.wait(0.5)
                continue
            try:
                body = {"model": name, **self.make(order)}
                http.post(f"{self.url}/v1/completions", json=body)
            except httpx.HTTPError:
                self.end.wait(1)


def watch_of(url: str, folder: Path, monkeypatch: pytest.MonkeyPatch, **more: Any) -> Watch:
    """A watch with a home of its own."""
    monkeypatch.setenv("DRAFTWELL_HOME", str(folder))
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "limits.yaml").write_text(LIMITS)
    return open_watch(parse_address(url), None, limits=folder / "limits.yaml", **more)


def looks(
    watch: Watch, count: int, until: str | None = None, step: Callable[[int], None] | None = None
) -> str | None:
    """Look so many times, or until an alarm of a cause stands; returns the last alarm's line."""
    found = None
    for place in range(count):
        begun = time.monotonic()
        if step is not None:
            step(place)
        report = look(watch, patient=True)
        for alarm in report.alarms:
            found = f"look {place + 1}: {alarm_line(alarm)}"
            if until in (alarm.cause, *alarm.or_else):
                return found
        time.sleep(max(0.0, SECONDS - (time.monotonic() - begun)))
    return found


def learn(watch: Watch) -> Path:
    """Look until there is a baseline."""
    for _ in range(6 * LOOKS):
        looks(watch, 1)
        if watch.baseline_file.exists():
            return watch.baseline_file
    raise AssertionError("no baseline")


def say(line: object) -> None:
    """What was found, for `-s`."""
    print(f"\n{time.strftime('%H:%M:%S')} {line}", file=sys.stderr, flush=True)


def small(order: random.Random, shared: str = "You are brief. " * 6) -> dict[str, Any]:
    """A request to the tiny pair."""
    letters = "".join(order.choice("abcdefghij klm") for _ in range(40))
    return {"prompt": shared + letters, "max_tokens": 24, "temperature": 0}


def unlike(order: random.Random) -> dict[str, Any]:
    """A request that begins as no other."""
    return small(order, "".join(order.choice("xyz QWERT") for _ in range(90)))


def test_our_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Quiet traffic, prompts that no cache holds, and a draft that becomes noise."""
    pair = tiny_pair(4, context=1024)
    strategy = build_strategy("vanilla_sd", {"num_speculative_tokens": 4})

    def noise(place: int) -> None:
        if place == 8:
            with torch.no_grad():
                for weight in pair.modules["draft"].parameters():
                    weight.copy_(0.35 * torch.randn_like(weight))

    with serving(TunedModel("tiny", pair, strategy, 4)) as (url, _):
        with Traffic(url, small).running():
            watch = watch_of(url, tmp_path / "quiet", monkeypatch)
            baseline = str(learn(watch))
            quiet = looks(watch, LOOKS)
        watch = watch_of(url, tmp_path / "cache", monkeypatch, baseline=baseline)
        with Traffic(url, unlike).running():
            cache = looks(watch, LOOKS, "prefix_cache")
        watch = watch_of(url, tmp_path / "noise", monkeypatch, baseline=baseline)
        with Traffic(url, small).running():
            dead = looks(watch, LOOKS, "dead_draft", noise)
    say(f"quiet: {quiet}; cache: {cache}; noise: {dead}")
    assert quiet is None
    assert cache is not None
    assert "prefix cache" in cache
    assert dead is not None
    assert "dead draft" in dead


LLAMA = os.environ.get("DRAFTWELL_TEST_LLAMA")


@contextmanager
def llama_server(model: Path, draft: Path | None, port: int) -> Iterator[str]:
    """llama.cpp's server, from xllamacpp."""
    script = Path(__file__).parents[1] / "support" / "watch" / "llama_server.py"
    command = [str(LLAMA), str(script), str(model), str(draft or "-"), str(port)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield process.stdout.readline().strip()
        finally:
            process.kill()


@pytest.mark.skipif(LLAMA is None, reason="DRAFTWELL_TEST_LLAMA names no Python with xllamacpp")
def test_llama_cpp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A draft of noise behind the same address."""
    from tests.support.watch.llama_models import draft_files

    model, draft, noise = draft_files(tmp_path)
    with ExitStack() as stack:
        url = stack.enter_context(llama_server(model, draft, 20411))
        with Traffic(url).running():
            watch = watch_of(url, tmp_path / "home", monkeypatch)
            learn(watch)
            quiet = looks(watch, LOOKS)
            say(f"llama.cpp, quiet: {quiet}")
    with ExitStack() as stack:
        url = stack.enter_context(llama_server(model, noise, 20411))
        with Traffic(url).running():
            found = looks(watch, LOOKS, "dead_draft")
    say(f"llama.cpp, noise: {found}")
    assert quiet is None
    assert found is not None
    assert "dead draft" in found
