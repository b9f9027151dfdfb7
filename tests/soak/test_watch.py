"""The watchdog on live engines: silences are planted in our server with the default pair, and in
llama.cpp's server where one can be started, and each has to be named with its cause.

About 40 minutes on two idle cores; `make soak` runs it, `-s` shows what was found when. Time is
compressed: a look every eight seconds, and a baseline of 30 looks. DRAFTWELL_TEST_LLAMA names the
Python of an environment with xllamacpp, and is left out without it.
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

from draftwell.components.engines.remote.address import parse_address
from draftwell.components.watch.probes import code, prose, records
from draftwell.components.watch.report import alarm_line
from draftwell.flows.steps.remote.watch import Watch, look, open_watch
from tests.support.server.soak import default_bundle, served_bundle

pytestmark = [pytest.mark.soak, pytest.mark.timeout(3600)]

SECONDS = float(os.environ.get("DRAFTWELL_TEST_WINDOW_SECONDS", "8"))
LIMITS = "baseline_windows: 30\nwarm_up_seconds: 0\nquiet_days: 1\nlost_seconds: 30\n"
LOOKS = 30
"""Within which a planted silence has to be named."""
SHARED = "You answer briefly, in plain words, and never make anything up. " * 8
LETTERS_PER_TOKEN = 4
MOST_CLIENTS = 32


def ordinary(order: random.Random, length: int = 0) -> dict[str, Any]:
    """A request of the usual traffic, with a prompt of about so many tokens more."""
    part = order.choice((prose, code))
    place, text = order.randrange(1000), ""
    while len(text) < LETTERS_PER_TOKEN * max(length, 60):
        place += 1
        text += part(place)
    return {"prompt": SHARED + text, "max_tokens": 32, "temperature": 0}


def strange(order: random.Random) -> dict[str, Any]:
    """A request that drafts fare badly on: random words, sampled hot."""
    words = "".join(records(order.randrange(10**6)) for _ in range(6))
    seed = order.randrange(10**6)
    return {"prompt": SHARED + words, "max_tokens": 32, "temperature": 1.6, "seed": seed}


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
    for _ in range(3 * LOOKS):
        looks(watch, 1)
        if watch.baseline_file.exists():
            return watch.baseline_file
    raise AssertionError("no baseline")


def say(line: object) -> None:
    """What was found, for `-s`."""
    print(f"\n{time.strftime('%H:%M:%S')} {line}", file=sys.stderr, flush=True)


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bundle")
    return default_bundle(folder, "bfloat16", "vanilla_sd", {"num_speculative_tokens": 4})


OPTIONS = ("--slots", "4", "--max-context", "4608")


def test_our_server(bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Quiet traffic, contexts that grow, traffic that changes, and a cache that is off."""
    found: dict[str, str | None] = {}

    def planted(name: str, cause: str, url: str, *, more: Any = None, **traffic: Any) -> None:
        watch = watch_of(url, tmp_path / name, monkeypatch, baseline=str(baseline))
        with Traffic(url, **traffic).running() as clients:
            grow = None if more is None else (lambda place: more(clients, place))
            found[cause] = looks(watch, LOOKS, cause, grow)
        say(f"{name}: {found[cause]}")

    def longer(clients: Traffic, place: int) -> None:
        length = int(200 * 20 ** min(1.0, place / 10))
        clients.make = lambda order: ordinary(order, length)

    with served_bundle(bundle, *OPTIONS) as server:
        with Traffic(server.url).running():
            watch = watch_of(server.url, tmp_path / "baseline", monkeypatch)
            baseline = learn(watch)
            say(baseline.read_text())
            quiet = looks(watch, LOOKS)
            say(f"quiet: {quiet}")
        planted("context", "context_length", server.url, more=longer)
        planted("drift", "drift_of_traffic", server.url, make=strange)
    with served_bundle(bundle, *OPTIONS, "--prefix-caching", "off") as server:
        planted("cache", "prefix_cache", server.url)
    assert quiet is None
    assert all(found.values()), found


def test_speculation_that_does_not_pay_under_load(
    bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From one request to 32 at once: probes with and without speculation find the crossover."""
    with served_bundle(bundle, "--slots", "40", "--max-context", "512") as server:
        watch = watch_of(server.url, tmp_path, monkeypatch, probes_per_hour=3600)
        with Traffic(server.url, clients=1).running() as clients:
            learn(watch)

            def heavier(place: int) -> None:
                clients.clients = min(32, 2 ** (place // 3))

            found = looks(watch, 3 * LOOKS, "load_crossover", heavier)
    say(f"load: {found}")
    assert found is not None
    assert "load crossover" in found


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
