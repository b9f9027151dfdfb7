"""A forward pass that does not end: clients are answered in time, probes say so, and the process
ends by itself or by SIGTERM within its bound."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from draftwell.serving.server import lifecycle, watchdog as watchdog_module
from draftwell.serving.server.app import create_app
from draftwell.serving.server.deployment.deployment import Deployment, NoAnswerInTime
from draftwell.serving.server.deployment.deployments import Deployments
from draftwell.serving.server.lifecycle import FLUSH_SECONDS, WRITE_SECONDS
from draftwell.serving.server.model.served_model import ServedModel
from draftwell.serving.server.process import HUNG
from draftwell.serving.server.scheduling import scheduler as scheduler_module
from draftwell.serving.server.scheduling.detokenize import TextStream
from draftwell.serving.server.scheduling.ticket import Ticket
from draftwell.serving.server.settings import DRAIN_SECONDS, ServerSettings
from draftwell.serving.server.watchdog import Watchdog
from tests.support.errors import raises_code
from tests.support.server.served_pair import running, served_pair
from tests.support.server.server_process import server_process, wait_until

BODY = {"model": "tiny", "prompt": "hello", "max_tokens": 40, "temperature": 0}
SHORT = BODY | {"max_tokens": 2}


class FakeDevice:
    """Passes of the target end only while it is `released`."""

    def __init__(self, served: ServedModel):
        target = served.pair.models["target"]
        self._forward, self.released = target.forward, threading.Event()
        self.released.set()
        self.hangs = threading.Event()
        target.forward = self._hanging  # type: ignore[method-assign]

    def _hanging(self, rows: Any) -> Any:
        if not self.released.is_set():
            self.hangs.set()
        self.released.wait(100)
        return self._forward(rows)


def answers(http: httpx.Client) -> None:
    """Wait for an answer: a busy machine may give the first ones too late."""
    wait_until(
        lambda: http.post("/v1/completions", json=SHORT).status_code == 200, "it answers", 60
    )


@pytest.fixture
def hung() -> Iterator[tuple[httpx.Client, Deployments, FakeDevice]]:
    served = served_pair("autoregressive", slots=2)
    device = FakeDevice(served)
    app = create_app(served, drain_seconds=0)
    with running(app) as url, httpx.Client(base_url=url, timeout=60) as http:
        try:
            answers(http)
            app.state.request_timeout = 0.4  # the first answer takes longer
            device.released.clear()
            yield http, app.state.deployments, device
        finally:
            device.released.set()


@pytest.mark.parametrize(("timeout", "status"), [(0.2, 408), (None, 504)])
def test_clients_of_a_hung_pass_are_answered_in_time(
    hung: tuple[httpx.Client, Deployments, FakeDevice], timeout: float | None, status: int
) -> None:
    http, _, device = hung
    began = time.monotonic()
    answer = http.post("/v1/completions", json=BODY | {"timeout": timeout})
    assert time.monotonic() - began < 5
    assert device.hangs.wait(5)
    assert (answer.status_code, answer.json()["error"]["code"]) == (status, "deadline_exceeded")
    # what waits behind it, too
    assert http.post("/v1/completions", json=BODY).status_code == 504
    device.released.set()
    answers(http)


def test_a_stream_of_a_hung_pass_ends_with_the_error() -> None:
    served = served_pair("autoregressive", slots=1)
    device, app = FakeDevice(served), create_app(served, drain_seconds=0)
    body = BODY | {"stream": True, "max_tokens": 200}
    with running(app) as url, httpx.Client(base_url=url, timeout=60) as http:
        answers(http)
        app.state.request_timeout = 3
        with http.stream("POST", "/v1/completions", json=body) as stream:
            lines = (line for line in stream.iter_lines() if line.startswith("data: "))
            assert next(lines)
            device.released.clear()
            last = list(lines)[-1]
            device.released.set()
    assert json.loads(last.removeprefix("data: "))["error"]["code"] == "deadline_exceeded"


def test_it_is_not_ready_while_a_pass_hangs_and_ready_again_after_it(
    hung: tuple[httpx.Client, Deployments, FakeDevice], monkeypatch: pytest.MonkeyPatch
) -> None:
    http, deployments, device = hung
    assert scheduler_module.STALL_SECONDS < 5
    monkeypatch.setattr(scheduler_module, "STALL_SECONDS", 0.3)
    # as after some minutes of short rounds
    monkeypatch.setattr(deployments.current.scheduler, "_token_seconds", 0.001)
    assert http.get("/ready").status_code == 200
    began = time.monotonic()
    assert http.post("/v1/completions", json=BODY).status_code == 504
    wait_until(lambda: http.get("/ready").status_code == 503, "it is not ready", 5)
    assert time.monotonic() - began < 5
    device.released.set()
    wait_until(lambda: http.get("/ready").status_code == 200, "it is ready again", 30)


def test_rounds_may_take_twice_as_long_as_they_did() -> None:
    scheduler = Deployments(served_pair("autoregressive")).current.scheduler
    scheduler._round_seconds, scheduler._token_seconds = 3.0, 0.1
    found = []
    for seconds, reading in ((9, 0), (11, 0), (29, 100), (31, 100)):
        scheduler._round_began, scheduler.engine.reading = time.monotonic() - seconds, reading
        found.append(scheduler.stalled)
    assert found == [False, True, False, True]


def test_a_long_prompt_on_a_slow_machine_is_no_hang() -> None:
    scheduler = Deployments(served_pair("autoregressive")).current.scheduler
    found = []
    for token_seconds, seconds in ((0.4, 3500), (0.4, 3600), (0.01, 890), (0.01, 910)):
        scheduler._token_seconds, scheduler.engine.reading = token_seconds, 4096
        scheduler._round_began = time.monotonic() - seconds
        found.append(scheduler.hung)
    assert found == [False, True, False, True]


def test_a_slow_moment_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr(scheduler_module.time, "monotonic", lambda: clock[0])
    scheduler = Deployments(served_pair("autoregressive")).current.scheduler
    for took, reading in ((5.0, 0), (300.0, 100), *((0.1, reading) for reading in (0, 100) * 50)):
        with scheduler._timed():
            scheduler.engine.reading = reading
            clock[0] += took
    assert scheduler._round_seconds == pytest.approx(0.1)
    assert scheduler._token_seconds < 0.01


@pytest.fixture
def hung_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduler_module, "HUNG_SECONDS", 0.2)
    monkeypatch.setattr(scheduler_module, "TOKEN_SECONDS", 0.0)


@pytest.mark.usefixtures("hung_soon")
def test_a_hang_of_the_bundle_before_is_one_too(
    hung: tuple[httpx.Client, Deployments, FakeDevice],
) -> None:
    http, deployments, device = hung
    assert http.post("/v1/completions", json=BODY).status_code == 504
    assert device.hangs.wait(5)
    assert deployments.switch(lambda old: served_pair("vanilla_sd", slots=1))
    answers(http)
    assert http.get("/health").json()["status"] == "failed"
    device.released.set()
    wait_until(lambda: http.get("/health").json()["status"] == "ok", "its pass ends", 30)


@pytest.mark.usefixtures("hung_soon")
def test_a_hang_while_requests_of_a_failed_round_are_ended_is_one_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    app = create_app(served_pair("autoregressive", slots=1), drain_seconds=0, request_timeout=1)
    engine, released = app.state.deployments.current.scheduler.engine, threading.Event()

    def fail() -> None:
        raise RuntimeError("the device is unwell")

    monkeypatch.setattr(engine, "step", fail)
    monkeypatch.setattr(engine, "cancel", lambda job: released.wait(60))
    with running(app) as url, httpx.Client(base_url=url, timeout=60) as http:
        assert http.post("/v1/completions", json=BODY).status_code == 504
        wait_until(lambda: http.get("/health").json()["status"] == "failed", "it fails", 30)
        released.set()


def test_closing_does_not_wait_for_a_hung_pass_and_its_clients_are_told() -> None:
    served, answers = served_pair("autoregressive", slots=1), []
    device = FakeDevice(served)
    device.released.clear()
    app = create_app(served, drain_seconds=0)
    deployments: Deployments = app.state.deployments
    with running(app) as url:
        asking = threading.Thread(
            target=lambda: answers.append(httpx.post(f"{url}/v1/completions", json=BODY))
        )
        asking.start()
        assert device.hangs.wait(30)
        began = time.monotonic()
        assert not deployments.close(0)
        asking.join(4)
        assert time.monotonic() - began < scheduler_module.ABORT_SECONDS + 3
        assert [answer.status_code for answer in answers] == [503]
        device.released.set()
        deployments.current.scheduler._thread.join(30)
        assert deployments.close(0)


def test_state_is_written_after_a_round_that_takes_some_seconds_to_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    served, written = served_pair("autoregressive", slots=1), []
    device, deployments = FakeDevice(served), Deployments(served)
    device.released.clear()
    deployments.start()
    scheduler = deployments.current.scheduler
    text, sampling = TextStream(served.decode), served.pair.sampling(max_tokens=2)
    scheduler.submit(Ticket(served.encode("hello"), sampling, text, lambda event: None))
    assert device.hangs.wait(30)

    def end(code: int) -> None:
        raise AssertionError(f"the process has ended with {code}")

    monkeypatch.setattr(lifecycle.os, "_exit", end)
    persistence = SimpleNamespace(close=lambda: written.append(scheduler.alive))
    threading.Timer(scheduler_module.ABORT_SECONDS + 1, device.released.set).start()
    lifecycle._write(deployments, persistence, 30)  # type: ignore[arg-type]
    assert written == [False]


@pytest.mark.usefixtures("hung_soon")
def test_a_new_model_that_hangs_does_not_hold_up_the_next_switch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    app = create_app(served_pair("autoregressive", slots=1), drain_seconds=0)
    deployments: Deployments = app.state.deployments
    bad = served_pair("autoregressive", slots=1)
    device = FakeDevice(bad)
    device.released.clear()

    def check(new: Deployment, mirrored: object) -> None:
        served = new.served
        sampling = served.pair.sampling(max_tokens=2)
        text = TextStream(served.decode)
        new.scheduler.submit(Ticket(served.encode("hello"), sampling, text, lambda event: None))
        assert device.hangs.wait(30)
        raise NoAnswerInTime("it does not answer")

    monkeypatch.setattr(Deployment, "check", check)
    with running(app):
        try:
            assert not deployments.switch(lambda old: bad)
            assert "do not end" in str(deployments.last_switch_error)
            assert not deployments.worth_another_try
            monkeypatch.undo()
            assert deployments.switch(lambda old: served_pair("vanilla_sd", slots=1))
        finally:
            device.released.set()


def test_a_new_model_whose_round_is_only_slow_is_tried_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    app = create_app(served_pair("autoregressive", slots=1), drain_seconds=0)
    deployments: Deployments = app.state.deployments
    slow = served_pair("autoregressive", slots=1)
    device = FakeDevice(slow)
    device.released.clear()

    def check(new: Deployment, mirrored: object) -> None:
        text, sampling = TextStream(slow.decode), slow.pair.sampling(max_tokens=2)
        new.scheduler.submit(Ticket(slow.encode("hello"), sampling, text, lambda event: None))
        assert device.hangs.wait(30)
        threading.Timer(scheduler_module.ABORT_SECONDS + 1, device.released.set).start()
        raise NoAnswerInTime("it does not answer")

    monkeypatch.setattr(Deployment, "check", check)
    with running(app):
        assert not deployments.switch(lambda old: slow)
        assert deployments.worth_another_try, deployments.last_switch_error


def test_a_load_that_hangs_beside_a_model_that_serves_is_given_up(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    over = threading.Event()
    monkeypatch.setattr(lifecycle, "from_bundle", lambda settings, serving_now: over.wait(60))
    monkeypatch.setattr(lifecycle, "LOAD_SECONDS", 0.1)
    settings, serving_now = ServerSettings(bundle=tmp_path), served_pair("autoregressive")
    with raises_code("load_hangs", "SIGHUP"):
        lifecycle._loaded(settings, serving_now)
    monkeypatch.setattr(lifecycle, "LOAD_SECONDS", 60.0)
    over.set()
    assert lifecycle._loaded(settings, serving_now) is True  # type: ignore[comparison-overlap]
    assert lifecycle._loaded(settings, None) is True  # type: ignore[comparison-overlap]

    def refuse(settings: object, serving_now: object) -> None:
        raise TimeoutError("the disk is slow")

    monkeypatch.setattr(lifecycle, "from_bundle", refuse)
    with pytest.raises(TimeoutError, match="the disk is slow"):
        lifecycle._loaded(settings, serving_now)


class Found:
    """Deployments as the watchdog sees them."""

    hung_seconds: float | None = None


def test_the_watchdog_finds_a_hung_pass_after_some_looks_and_a_loop_that_stands_still() -> None:
    dog, found = Watchdog(), Found()
    assert dog.fault() is None
    dog.serve(found)  # type: ignore[arg-type]
    found.hung_seconds = 301.0
    assert [dog.fault() for _ in range(watchdog_module.LOOKS - 1)] == [None] * 3
    assert "301 s" in str(dog.fault())
    found.hung_seconds = None
    assert dog.fault() is None
    looks = int(watchdog_module.LOOP_SECONDS / watchdog_module.LOOK_SECONDS)
    dog.beat()
    assert not any(dog.fault() for _ in range(looks))
    assert "event loop" in str(dog.fault())
    dog.beat()
    assert dog.fault() is None
    dog.end_within(-1)
    dog.end_within(60)  # a supervisor that asks again gives it no more time
    assert "end in time" in str(dog.fault())


def test_a_pause_of_the_process_is_no_time_that_a_pass_took(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    dog, found, clock = Watchdog(), Found(), [time.monotonic()]
    monkeypatch.setattr(watchdog_module.time, "monotonic", lambda: clock[0])
    dog.serve(found)  # type: ignore[arg-type]

    def looks(seconds: float) -> list[str | None]:
        faults = []
        for _ in range(int(seconds / watchdog_module.LOOK_SECONDS)):
            clock[0] += watchdog_module.LOOK_SECONDS
            dog.beat()
            faults.append(dog.fault())
        return faults

    assert not any(looks(10))
    clock[0] += 400
    found.hung_seconds = 401.0
    assert not any(looks(290))
    assert any(looks(15))


def test_the_log_says_why_the_process_ends_also_where_clients_cannot_be_told(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Broken:
        @property
        def hung_seconds(self) -> float:
            looks.append(1)
            raise RuntimeError("no answer")

        def abort(self, event: object) -> None:
            raise RuntimeError("a lock is broken")

    looks: list[int] = []
    monkeypatch.setattr(watchdog_module, "LOOK_SECONDS", 0.01)
    with Watchdog() as dog:
        dog.serve(Broken())  # type: ignore[arg-type]
        wait_until(lambda: len(looks) > 2, "it looks again after an error", 10)
        dog._tell("it hangs")
    messages = [record.getMessage() for record in caplog.records if record.levelname == "CRITICAL"]
    assert messages[0].startswith("it hangs: the process ends")
    assert any(message.startswith("thread MainThread") for message in messages)


def test_a_start_has_an_hour_and_what_follows_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watchdog_module, "START_SECONDS", -1.0)
    dog = Watchdog()
    assert "start in time" in str(dog.fault())
    dog.serve(Found())  # type: ignore[arg-type]
    assert dog.fault() is None


PROGRAM = """
import socket, sys, threading, time

from draftwell.serving.server import lifecycle, process, watchdog
from draftwell.serving.server.app import create_app
from draftwell.serving.server.scheduling import scheduler
from tests.support.server.served_pair import served_pair

hung_seconds, drain = map(float, sys.argv[1:])
scheduler.HUNG_SECONDS, scheduler.TOKEN_SECONDS = hung_seconds, 0.0
lifecycle.FLUSH_SECONDS, lifecycle.WRITE_SECONDS = 1, 2
served = served_pair("autoregressive", slots=1)


def hang(rows: object) -> None:
    print("it hangs", flush=True)
    threading.Event().wait()


served.pair.models["target"].forward = hang
app = create_app(served, drain_seconds=0)


@app.get("/block")
async def block() -> None:
    print("it hangs", flush=True)
    time.sleep(600)


with socket.create_server(("127.0.0.1", 0)) as listener, watchdog.Watchdog() as dog:
    print(f"http://{process.address_of(listener)}/", flush=True)
    deployments = app.state.deployments
    dog.serve(deployments)
    config = lifecycle.web_config(app)
    server = lifecycle.DrainingServer(config, deployments, drain, dog)
    server.run(sockets=[listener])
    lifecycle._write(deployments, None, dog.seconds_left - lifecycle.WRITE_SECONDS)
"""


@pytest.mark.slow
def test_a_process_whose_pass_hangs_tells_its_clients_and_ends_with_a_code_of_its_own() -> None:
    command = [sys.executable, "-c", PROGRAM, "1.5", "20"]
    with server_process(command, stderr=subprocess.PIPE) as (process, url):
        began = time.monotonic()
        answer = httpx.post(f"{url}/v1/completions", json=BODY, timeout=30)
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "device_hung")
        assert "Retry-After" in answer.headers
        _, errors = process.communicate(timeout=30)
        assert time.monotonic() - began < 1.5 + 10
    assert process.returncode == HUNG
    assert "has not ended for" in errors
    assert "in hang" in errors, "the log says where it hangs"


@pytest.mark.slow
@pytest.mark.parametrize("path", ["/v1/completions", "/block"])
def test_sigterm_ends_a_process_within_its_bound_whatever_hangs(path: str) -> None:
    """A pass, which clients are told, or the event loop itself."""
    command = [sys.executable, "-c", PROGRAM, "600", "1"]
    statuses: list[int] = []

    def ask(url: str) -> None:
        try:
            done = httpx.request(
                "GET" if path == "/block" else "POST", url + path, json=BODY, timeout=60
            )
            statuses.append(done.status_code)
        except httpx.HTTPError:
            statuses.append(0)

    with server_process(command, stderr=subprocess.PIPE) as (process, url):
        asking = threading.Thread(target=ask, args=(url,))
        asking.start()
        assert process.stdout
        assert process.stdout.readline() == "it hangs\n"
        began = time.monotonic()
        process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(timeout=60)
        took = time.monotonic() - began
        asking.join(30)
    assert took < 1 + 1 + 2 + 1 + 5, errors
    assert process.returncode == HUNG
    assert statuses == [0 if path == "/block" else 503]


def test_the_bound_of_sigterm_is_below_what_kubernetes_waits() -> None:
    looks = 2 * watchdog_module.LOOK_SECONDS
    assert DRAIN_SECONDS + FLUSH_SECONDS + WRITE_SECONDS + looks < 30
