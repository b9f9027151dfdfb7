"""Replicas on one port and their rolling restart, over bundles whose `serve.sh` starts a stand-in for vLLM's server."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from components.engines.ports import free_port, listening, refuse_taken
from flows.steps.engine_replicas import Replica, end_process, replicas_of, restart_hook, rolling_restart
from flows.steps.engine_serve import server_environment
from registry.bundles.places import link_current
from registry.bundles.vllm.render import write_bundle
from registry.bundles.vllm.settings import VllmServing
from tests.support.errors import raises_code
from tests.support.peers.environments import install, with_server
from tests.support.server.server_process import wait_until

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="SO_REUSEPORT and /proc of Linux")

GATE = {"version": "0.32.0", "device": "cpu", "device_class": "cpu-x86-64-2c-avx2", "dtype": "bfloat16", "fingerprint": "f" * 64,
        "settings": None, "passed": True, "threads": 1}


def bundle(out: Path, number: int) -> Path:
    """A bundle that `serve.sh` serves."""
    folder = out / "vllm" / "tiny" / f"{number}-cpu"
    (folder / "models" / "target").mkdir(parents=True)
    write_bundle(VllmServing.model_validate({"pair": "tiny", "release": number, "model": "models/target", "dtype": "bfloat16",
                                             "fingerprint": "f" * 64, "gate": GATE}), folder)
    return folder


@pytest.fixture
def out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Two bundles, of which `current` leads to the first; what serves them is ended afterwards."""
    with_server(install(tmp_path / "peers", monkeypatch, ("vllm",)))
    monkeypatch.setenv("DRAFTWELL_SPOOL", "")
    monkeypatch.setenv("FAKE_SERVER_SECONDS", "0.05")
    monkeypatch.delenv("DRAFTWELL_REPLICA", raising=False)
    found = tmp_path / "dist"
    for number in (2, 1):
        link_current(found / "vllm" / "tiny", bundle(found, number))
    yield found
    for replica in replicas_of(found, "tiny"):
        os.kill(replica.pid, signal.SIGKILL)


@pytest.fixture
def start(out: Path, tmp_path: Path) -> Iterator[Callable[..., subprocess.Popen[bytes]]]:
    """Starts `current` as a user does, and waits until it listens."""
    started: list[subprocess.Popen[bytes]] = []

    def serve(port: int, *options: str, **variables: str) -> subprocess.Popen[bytes]:
        script = str(out / "vllm" / "tiny" / "current" / "serve.sh")
        with (tmp_path / "serve.log").open("ab") as log:
            process = subprocess.Popen([script, "--port", str(port), *options], stdout=log, stderr=log,
                                       env={**server_environment("tiny"), **variables})
        started.append(process)
        wait_until(lambda: process.poll() is not None or port in listening(process.pid), "it does not listen", seconds=30)
        return process

    yield serve
    for process in started:
        process.kill()
        process.wait()


def ask(port: int) -> Any:
    """One answer, over a connection of its own."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
    with contextlib.closing(connection):
        connection.request("POST", "/v1/completions", json.dumps({"max_tokens": 1}))
        with connection.getresponse() as answer:
            assert answer.status == 200, answer.read()
            return json.load(answer)


def test_replicas_share_a_port_and_what_is_no_replica_is_refused(out: Path, start: Callable[..., subprocess.Popen[bytes]],
                                                                 tmp_path: Path) -> None:
    port = free_port()
    first, second = start(port), start(port, DRAFTWELL_REPLICA="2")
    assert {ask(port)["pid"] for _ in range(60)} == {first.pid, second.pid}
    assert [(one.pid, one.number, one.port) for one in replicas_of(out, "tiny")] == [(first.pid, "1", port), (second.pid, "2", port)]
    with raises_code("engine_port_taken"):
        refuse_taken(port)
    third = start(port)
    assert third.wait(10) != 0
    assert "Address already in use" in (tmp_path / "serve.log").read_text()
    for process in (first, second):
        process.terminate()
        assert process.wait(10) is not None


def test_a_replica_that_ends_leaves_its_port_before_it_answers_what_it_has_begun(start: Callable[..., subprocess.Popen[bytes]]) -> None:
    """vLLM by itself goes on accepting, and refuses."""
    port = free_port()
    process = start(port, FAKE_SERVER_SECONDS="1.5")
    answers: list[Any] = []
    client = threading.Thread(target=lambda: answers.append(ask(port)))
    client.start()
    time.sleep(0.5)
    process.terminate()
    wait_until(lambda: port not in listening(process.pid), "it listens", seconds=1)
    assert process.poll() is None
    with pytest.raises(ConnectionRefusedError):
        ask(port)
    client.join()
    assert [one["pid"] for one in answers] == [process.pid]
    assert process.wait(10) is not None


def test_what_takes_longer_than_the_drain_is_cut(start: Callable[..., subprocess.Popen[bytes]]) -> None:
    port = free_port()
    process = start(port, "--shutdown-timeout", "1", FAKE_SERVER_SECONDS="4")
    failed: list[BaseException] = []

    def client() -> None:
        try:
            ask(port)
        except OSError as error:
            failed.append(error)

    thread = threading.Thread(target=client)
    thread.start()
    time.sleep(0.5)
    begun = time.monotonic()
    process.terminate()
    thread.join()
    assert 0.5 < time.monotonic() - begun < 3
    assert len(failed) == 1
    assert process.wait(10) is not None


class Clients:
    """Clients that ask all the time, on connections that they keep, and repeat a request once whose connection fails."""

    def __init__(self, port: int, count: int = 8):
        self.port, self.answers, self.repeated, self.lost = port, list[str](), 0, list[BaseException]()
        self.over = threading.Event()
        self.threads = [threading.Thread(target=self.client, args=(number,)) for number in range(count)]

    def client(self, number: int) -> None:
        """Every other one opens a connection for each request."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=20)
        while not self.over.is_set():
            for left in (1, 0):
                try:
                    connection.request("POST", "/v1/completions", json.dumps({"max_tokens": 1}))
                    with connection.getresponse() as answer:
                        body = answer.read()
                        assert answer.status == 200, body
                        self.answers.append(json.loads(body)["bundle"])
                        break
                except (OSError, http.client.HTTPException, AssertionError) as error:
                    connection.close()
                    if isinstance(error, AssertionError) or not left:
                        self.lost.append(error)
                    else:
                        self.repeated += 1
            if number % 2:
                connection.close()
        connection.close()

    @contextlib.contextmanager
    def asking(self) -> Iterator[None]:
        for thread in self.threads:
            thread.start()
        try:
            yield
        finally:
            self.over.set()
            for thread in self.threads:
                thread.join()


@pytest.mark.parametrize("replicas", [1, 2])
def test_no_request_is_lost_in_a_rolling_restart(replicas: int, out: Path, start: Callable[..., subprocess.Popen[bytes]]) -> None:
    port, said = free_port(), list[str]()
    old = [start(port, "--served-model-name", "mine", DRAFTWELL_REPLICA=str(number + 1), MY_OWN="kept") for number in range(replicas)]
    link_current(out / "vllm" / "tiny", out / "vllm" / "tiny" / "2-cpu")
    clients = Clients(port)
    with clients.asking():
        time.sleep(0.5)
        assert rolling_restart(out, "tiny", said.append, start_seconds=30, end_seconds=20) == replicas
        time.sleep(0.5)
    assert clients.lost == []
    assert {"tiny/1-cpu", "tiny/2-cpu"} == set(clients.answers)
    assert clients.repeated <= len(clients.threads) * replicas
    assert [process.wait(1) is not None for process in old] == [True] * replicas
    now = replicas_of(out, "tiny")
    assert [(one.bundle.name, one.port, one.number) for one in now] == [("2-cpu", port, str(number + 1)) for number in range(replicas)]
    assert {one.options for one in now} == {("--port", str(port), "--served-model-name", "mine")}
    assert {one.environment["MY_OWN"] for one in now} == {"kept"}
    assert not {"VLLM_CACHE_ROOT", "DRAFTWELL_BUNDLE", "VLLM_CPU_OMP_THREADS_BIND", "LD_PRELOAD"} & set(now[0].environment)
    assert rolling_restart(out, "tiny", said.append) == 0
    assert said[-1] == "all that serves tiny here serves 2-cpu"


def test_a_bundle_that_does_not_start_leaves_what_is_served(out: Path, start: Callable[..., subprocess.Popen[bytes]],
                                                            monkeypatch: pytest.MonkeyPatch) -> None:
    port = free_port()
    process = start(port)
    link_current(out / "vllm" / "tiny", out / "vllm" / "tiny" / "2-cpu")
    (out / "vllm" / "tiny" / "2-cpu" / "listen.py").write_text("changed")
    with raises_code("server_failed", "was changed since it was made", "is served on"):
        rolling_restart(out, "tiny", print)
    assert ask(port)["pid"] == process.pid
    assert [one.pid for one in replicas_of(out, "tiny")] == [process.pid]


def test_a_new_process_that_only_holds_the_port_is_not_ready(out: Path, start: Callable[..., subprocess.Popen[bytes]]) -> None:
    """vLLM binds its port minutes before it listens there, and the old process answers on the same port meanwhile."""
    port = free_port()
    process = start(port, FAKE_START_SECONDS="1.5")
    link_current(out / "vllm" / "tiny", out / "vllm" / "tiny" / "2-cpu")
    with raises_code("server_failed", "did not listen within 1 s"):
        rolling_restart(out, "tiny", print, start_seconds=1)
    assert ask(port)["pid"] == process.pid


def test_a_restart_that_was_stopped_half_way_is_finished_and_starts_no_third(out: Path,
                                                                             start: Callable[..., subprocess.Popen[bytes]]) -> None:
    port = free_port()
    start(port)
    link_current(out / "vllm" / "tiny", out / "vllm" / "tiny" / "2-cpu")
    new = start(port, DRAFTWELL_REPLICA="1")
    assert rolling_restart(out, "tiny", print, end_seconds=20) == 1
    assert [one.pid for one in replicas_of(out, "tiny")] == [new.pid]


def test_nothing_that_runs_and_nothing_that_is_there(out: Path, tmp_path: Path) -> None:
    said: list[str] = []
    assert rolling_restart(out, "tiny", said.append) == 0
    assert "draftwell serve --engine vllm --pair tiny" in said[0]
    with raises_code("no_bundle"):
        rolling_restart(tmp_path / "nowhere", "tiny", print)


def test_a_process_that_does_not_end_is_named() -> None:
    with subprocess.Popen(["sh", "-c", "trap '' TERM; echo on; sleep 30 & wait; wait"], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        with raises_code("server_not_ended", str(process.pid)):
            end_process(process.pid, 0.2)
        process.kill()
    end_process(process.pid, 0.2)


def test_a_command_of_a_users_own_restarts(out: Path, tmp_path: Path) -> None:
    assert restart_hook(f"touch '{tmp_path}/done'", out, "tiny", print)()
    assert (tmp_path / "done").exists()
    assert not restart_hook(None, out, "tiny", print)(), "nothing is served"
    with raises_code("restart_failed", "exit code 4"):
        restart_hook("exit 4", out, "tiny", print)()


def test_a_replica_without_a_number_is_the_first() -> None:
    assert Replica(1, Path("x"), 8000, (), {}).number == "1"
