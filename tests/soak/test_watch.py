"""The watchdog on live engines: silences are planted in our server with a tiny pair, and in
llama.cpp's server where one can be started, and each has to be named with its cause.

`make soak` runs it, `-s` shows what was found when. Time is compressed: our server's is that of a
device that works a minute in a second or two, and llama.cpp is looked at every second and a half.
DRAFTWELL_TEST_LLAMA names the Python of an environment with xllamacpp; without it llama.cpp is left
out.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field
from itertools import cycle
from pathlib import Path
from typing import Any

import httpx
import pytest

from draftwell.components.engines.remote.address import EngineAddress, parse_address
from draftwell.components.watch.report import alarm_line
from draftwell.flows.steps.remote.watch import Watch, look, open_watch
from draftwell.serving.server import app
from draftwell.serving.server.model.strategy_pool import PLAIN
from tests.support.watch.live_engine import (
    KNOWN,
    UNKNOWN,
    DeviceClock,
    LiveEngine,
    devices,
    live_engine,
    noise_for,
    prompt,
)

pytestmark = [pytest.mark.soak, pytest.mark.timeout(3600)]

SECONDS = 1.5
LIMITS = "baseline_windows: 70\nwarm_up_seconds: 0\nquiet_days: 1\nlost_seconds: 30\n"
LOOKS = 30
QUIET_MINUTES = 600
DOCUMENTED = {
    "dead_draft": 12,
    "prefix_cache": 12,
    "drift_of_traffic": 60,
    "context_length": 90,
    "build_change": 90,
    "load_crossover": 120,
}
"""Cause → minutes after which it is named, as docs/watchdog_judgement.md has them."""
PROBES, FEW_PROBES = 120, 24
"""An hour: one with each look, also without speculation; and as many as the guide names."""
BEFORE = 45
"""Minutes before traffic changes, in which each fixed prompt is asked two times."""
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


def watch_of(
    url: str,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    plain: EngineAddress | None = None,
    **more: Any,
) -> Watch:
    """A watch with a home of its own."""
    monkeypatch.setenv("DRAFTWELL_HOME", str(folder))
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "limits.yaml").write_text(LIMITS)
    return open_watch(parse_address(url), plain, limits=folder / "limits.yaml", **more)


def looks(
    watch: Watch,
    minutes: int,
    until: str | None = None,
    step: Callable[[int], None] | None = None,
    *,
    minute: float = 60.0,
    sure: bool = True,
) -> str | None:
    """Look each minute, or until an alarm of a cause stands, that names no other or, unless it has
    to be sure, another too; returns the last alarm's line.

    Args:
        minute: its seconds on the watch's clock.
    """
    found, begun = None, watch.clock()
    while (place := int((watch.clock() - begun) / minute)) < minutes:
        if step is not None:
            step(place)
        report = look(watch, patient=True)
        for alarm in report.alarms:
            line = alarm_line(alarm)
            if found is None or line.split(" since")[0] not in found:
                say(f"minute {place}: {line}")
            found = f"minute {place}: {line}"
            causes = (alarm.cause, *alarm.or_else)
            if until in causes and (len(causes) == 1 or not sure):
                return found
        while watch.clock() < begun + minute * (place + 1):
            time.sleep(0.02)
    return found


def learn(watch: Watch, step: Callable[[int], None] | None = None, minute: float = 60.0) -> Path:
    """Look until there is a baseline."""
    for _ in range(200):
        looks(watch, 1, step=step, minute=minute)
        if watch.baseline_file.exists():
            return watch.baseline_file
    raise AssertionError("no baseline")


def say(line: object) -> None:
    """What was found, for `-s`."""
    print(f"\n{time.strftime('%H:%M:%S')} {line}", file=sys.stderr, flush=True)


class Live:
    """Our server, its traffic and its baseline. A baseline's load moves between two and six
    clients, as that of a day does."""

    def __init__(self, engine: LiveEngine, clocks: dict[str, DeviceClock], folder: Path):
        self.engine, self.clocks, self.folder = engine, clocks, folder
        self.baseline: str | None = None

    @contextmanager
    def watched(self, name: str, **more: Any) -> Iterator[tuple[Watch, Traffic]]:
        """A watch with a home of its own and the baseline, while four clients ask."""
        url = self.engine.url
        with (
            pytest.MonkeyPatch.context() as patch,
            Traffic(url, prompted(), clients=4).running() as traffic,
            closing(
                watch_of(url, self.folder / name, patch, baseline=self.baseline, **more)
            ) as watch,
        ):
            watch.clock = self.engine.clock.now
            yield watch, traffic


def vary(traffic: Traffic) -> Callable[[int], None]:
    """The load of an ordinary day, three looks each."""
    loads = cycle(map(int, "444333222333444666"))

    def step(place: int) -> None:
        traffic.clients = next(loads)

    return step


def prompted(length: int = 200, share: float = 0.0) -> Callable[[random.Random], dict[str, Any]]:
    """Requests with prompts of so many tokens, this share of them in letters that the draft does
    not know."""

    def make(order: random.Random) -> dict[str, Any]:
        kind = UNKNOWN if order.random() < share else KNOWN
        text = prompt(order, length, kind)
        return {"prompt": text, "max_tokens": 24, "temperature": 0}

    return make


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    """A server that is well, and a baseline of it."""
    with devices() as clocks, live_engine(clocks) as engine:
        found = Live(engine, clocks, tmp_path_factory.mktemp("live"))
        with found.watched("baseline") as (watch, traffic):
            found.baseline = str(learn(watch, vary(traffic)))
        yield found


def test_ten_quiet_hours(live: Live) -> None:
    with live.watched("quiet", probes_per_hour=FEW_PROBES) as (watch, traffic):
        found = looks(watch, QUIET_MINUTES, step=vary(traffic))
    assert found is None


def test_the_prefix_cache_is_off(live: Live) -> None:
    def off(place: int) -> None:
        if place >= 5:
            live.engine.scheduler._prompt_sharing = "off"

    try:
        with live.watched("cache") as (watch, _):
            found = looks(watch, DOCUMENTED["prefix_cache"] + 5, "prefix_cache", off)
    finally:
        live.engine.scheduler._prompt_sharing = "tenant"
    assert_named(found, "prefix cache")


def test_a_draft_of_noise(live: Live) -> None:
    planted: list[int] = []
    with ExitStack() as stack:

        def noise(place: int) -> None:
            if place >= 5 and not planted:
                planted.append(place)
                stack.enter_context(noise_for(live.engine.pair.modules["draft"]))

        with live.watched("noise") as (watch, _):
            found = looks(watch, DOCUMENTED["dead_draft"] + 5, "dead_draft", noise)
    assert_named(found, "dead draft")


def test_prompts_grow(live: Live) -> None:
    """From 200 tokens to 3,900 in an hour; fixed prompts of two lengths tell that it is this."""
    with live.watched("context", probes_per_hour=PROBES) as (watch, traffic):

        def grow(place: int) -> None:
            part = min(max(place - BEFORE, 0) / 60, 1)
            traffic.make = prompted(round(200 * (3900 / 200) ** part))

        found = looks(watch, BEFORE + DOCUMENTED["context_length"], "context_length", grow)
    assert_named(found, "context length")


def test_traffic_changes_its_kind(live: Live) -> None:
    """In an hour, to prompts that the draft does not know; fixed prompts stay as they were."""
    with live.watched("drift", probes_per_hour=PROBES) as (watch, traffic):

        def drift(place: int) -> None:
            traffic.make = prompted(share=min(max(place - BEFORE, 0) / 60, 1))

        found = looks(watch, BEFORE + DOCUMENTED["drift_of_traffic"], "drift_of_traffic", drift)
    assert_named(found, "drift of traffic")


def test_a_slower_version(live: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a tenth."""

    def replace(place: int) -> None:
        if place >= 5:
            live.engine.clock.slower = 1.1
            monkeypatch.setattr(app, "own_version", lambda: "next")

    try:
        with live.watched("build") as (watch, _):
            found = looks(watch, DOCUMENTED["build_change"] + 5, "build_change", replace)
    finally:
        live.engine.clock.slower = 1.0
    assert_named(found, "build change")


def test_load_grows(live: Live) -> None:
    """From 1 client to 32 in an hour, at a plain server too."""
    with ExitStack() as stack:
        plain = stack.enter_context(live_engine(live.clocks, PLAIN)).url
        other = stack.enter_context(Traffic(plain, prompted(), clients=1).running())
        more = {"plain": parse_address(plain), "probes_per_hour": PROBES}
        watch, traffic = stack.enter_context(live.watched("load", **more))

        def grow(place: int) -> None:
            traffic.clients = other.clients = round(MOST_CLIENTS ** min(place / 60, 1))

        found = looks(watch, DOCUMENTED["load_crossover"], "load_crossover", grow)
    assert_named(found, "load crossover")


def assert_named(found: str | None, cause: str) -> None:
    """The alarm that stood last is of this cause alone."""
    assert found is not None
    assert f": {cause} since" in found


LLAMA = os.environ.get("DRAFTWELL_TEST_LLAMA")


@contextmanager
def llama_server(model: Path, draft: Path, port: int) -> Iterator[str]:
    """llama.cpp's server, from xllamacpp."""
    script = Path(__file__).parents[1] / "support" / "watch" / "llama_server.py"
    speculation = ["--spec-type", "draft-simple", "--spec-draft-model", str(draft)]
    command = [str(LLAMA), str(script), str(model), str(port), *speculation]
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
    with (
        llama_server(model, draft, 20411) as url,
        Traffic(url).running(),
        closing(watch_of(url, tmp_path / "home", monkeypatch)) as watch,
    ):
        learn(watch, minute=SECONDS)
        quiet = looks(watch, LOOKS, minute=SECONDS)
    with llama_server(model, noise, 20411) as url, Traffic(url).running(), closing(watch):
        found = looks(watch, LOOKS, "dead_draft", minute=SECONDS, sure=False)
    assert quiet is None
    assert found is not None
    assert "dead draft" in found
