"""Replicas on one port and their rolling restart, over bundles whose `serve.sh` starts a stand-in
for vLLM's server."""

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
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from draftwell.components.engines.ports import free_port, listening, refuse_taken
from draftwell.flows.steps.engine import replicas as replicas_step
from draftwell.flows.steps.engine import restart_record
from draftwell.flows.steps.engine.processes import Replica, given, replicas_of, started_at
from draftwell.flows.steps.engine.replicas import end_process, restart_hook, rolling_restart
from draftwell.flows.steps.engine.restart_record import read_record, write_record
from draftwell.flows.steps.engine.serve import server_environment, trial_environment
from draftwell.registry.bundles.places import link_current
from draftwell.registry.bundles.vllm.render import write_bundle
from draftwell.registry.bundles.vllm.settings import VllmServing
from tests.support.errors import raises_code
from tests.support.paths import REPO
from tests.support.peers.environments import install, with_server
from tests.support.server.server_process import wait_until

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="SO_REUSEPORT and /proc of Linux")

Start = Callable[..., subprocess.Popen[bytes]]
GATE = {
    "version": "0.32.0",
    "device": "cpu",
    "device_class": "cpu-x86-64-2c-avx2",
    "dtype": "bfloat16",
    "fingerprint": "f" * 64,
    "settings": None,
    "passed": True,
    "threads": 1,
}


def bundle(out: Path, number: int, port: int = 8000) -> Path:
    """A bundle that `serve.sh` serves, on a port unless another is named."""
    folder = out / "vllm" / "tiny" / f"{number}-cpu"
    (folder / "models" / "target").mkdir(parents=True)
    write_bundle(
        VllmServing.model_validate(
            {
                "pair": "tiny",
                "release": number,
                "model": "models/target",
                "dtype": "bfloat16",
                "fingerprint": "f" * 64,
                "gate": GATE,
                "port": port,
            }
        ),
        folder,
    )
    return folder


def deploy(out: Path, number: int) -> Path:
    """Let `current` lead to a bundle."""
    folder = out / "vllm" / "tiny" / f"{number}-cpu"
    link_current(folder.parent, folder)
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
def start(out: Path, tmp_path: Path) -> Iterator[Start]:
    """Starts `current` as a user does, and waits until it listens."""
    started: list[subprocess.Popen[bytes]] = []

    def serve(
        port: int, *options: str, wait: bool = True, **variables: str
    ) -> subprocess.Popen[bytes]:
        script = str(out / "vllm" / "tiny" / "current" / "serve.sh")
        with (tmp_path / "serve.log").open("ab") as log:
            process = subprocess.Popen(
                [script, *(options or ("--port", str(port)))],
                stdout=log,
                stderr=log,
                env={**server_environment("tiny"), **variables},
            )
        started.append(process)
        if wait:
            wait_until(
                lambda: process.poll() is not None or port in listening(process.pid),
                "it does not listen",
                seconds=30,
            )
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


@pytest.mark.slow
def test_replicas_share_a_port_and_what_is_no_replica_is_refused(
    out: Path, start: Start, tmp_path: Path
) -> None:
    port = free_port()
    first, second = (
        start(port, FAKE_SERVER_SECONDS="0"),
        start(port, DRAFTWELL_REPLICA="2", FAKE_SERVER_SECONDS="0"),
    )
    assert {ask(port)["pid"] for _ in range(60)} == {first.pid, second.pid}
    assert [(one.pid, one.number, one.port) for one in replicas_of(out, "tiny")] == [
        (first.pid, "1", port),
        (second.pid, "2", port),
    ]
    with raises_code("engine_port_taken"):
        refuse_taken(port)
    third = start(port)
    assert third.wait(10) == 1
    assert "Address already in use" in (tmp_path / "serve.log").read_text()
    for process in (first, second):
        process.terminate()
        assert process.wait(10) == 0


def test_a_replica_that_ends_leaves_its_port_before_it_answers_what_it_has_begun(
    start: Start,
) -> None:
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
    assert process.wait(10) == 0


@pytest.mark.slow
def test_what_takes_longer_than_the_drain_is_cut(start: Start) -> None:
    port = free_port()
    process = start(port, "--port", str(port), "--shutdown-timeout", "1", FAKE_SERVER_SECONDS="3")
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
    assert 0.5 < time.monotonic() - begun < 2.4
    assert len(failed) == 1
    assert process.wait(10) == 0


class Clients:
    """Clients that ask all the time, on connections that they keep, and repeat a request once whose
    connection fails."""

    def __init__(self, port: int, count: int = 8):
        self.port, self.answers, self.lost = port, list[str](), list[BaseException]()
        self.repeated = self.fresh_repeated = 0
        self.over = threading.Event()
        self.threads = [
            threading.Thread(target=self.client, args=(number,)) for number in range(count)
        ]

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
                        self.fresh_repeated += number % 2
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
def test_no_request_is_lost_in_a_rolling_restart(replicas: int, out: Path, start: Start) -> None:
    port, said = free_port(), list[str]()
    options = ("--port", str(port), "--served-model-name", "mine")
    old = [
        start(port, *options, DRAFTWELL_REPLICA=str(number + 1), MY_OWN="kept")
        for number in range(replicas)
    ]
    deploy(out, 2)

    def say(line: str) -> None:
        said.append(line)
        if line.startswith("starting"):
            alive.append([process.poll() is None for process in old].count(True))

    alive: list[int] = []
    clients = Clients(port)
    with clients.asking():
        time.sleep(0.5)
        assert rolling_restart(out, "tiny", say, start_seconds=30, end_seconds=20) == replicas
        time.sleep(0.5)
    assert clients.lost == []
    assert {"tiny/1-cpu", "tiny/2-cpu"} == set(clients.answers)
    assert clients.repeated <= len(clients.threads) * replicas
    assert clients.fresh_repeated <= 1, "one may come between two system calls of the server"
    assert alive == ([1] if replicas == 1 else [1, 0]), (
        "a single process answers until the new one does; of two, one ends first"
    )
    assert [process.wait(1) for process in old] == [0] * replicas
    now = replicas_of(out, "tiny")
    assert [(one.bundle.name, one.port, one.number) for one in now] == [
        ("2-cpu", port, str(number + 1)) for number in range(replicas)
    ]
    assert {one.options for one in now} == {options}
    assert {one.environment["MY_OWN"] for one in now} == {"kept"}
    assert not {
        "VLLM_CACHE_ROOT",
        "DRAFTWELL_BUNDLE",
        "VLLM_CPU_OMP_THREADS_BIND",
        "LD_PRELOAD",
    } & set(now[0].environment)
    assert rolling_restart(out, "tiny", said.append) == 0
    assert said[-1] == "all that serves tiny here serves 2-cpu"


def test_a_bundle_that_does_not_start_leaves_what_is_served(out: Path, start: Start) -> None:
    port = free_port()
    process = start(port)
    deploy(out, 2)
    (out / "vllm" / "tiny" / "2-cpu" / "listen.py").write_text("changed")
    with raises_code("server_failed", "was changed since it was made", "1-cpu is served on"):
        rolling_restart(out, "tiny", print)
    assert ask(port)["pid"] == process.pid
    assert [one.pid for one in replicas_of(out, "tiny")] == [process.pid]


def test_a_new_process_that_only_holds_the_port_is_not_ready(out: Path, start: Start) -> None:
    """vLLM binds its port minutes before it listens there, and the old process answers on the same
    port meanwhile."""
    port = free_port()
    process = start(port, FAKE_START_SECONDS="1.5")
    deploy(out, 2)
    with raises_code("server_failed", "did not listen within 1 s"):
        rolling_restart(out, "tiny", print, start_seconds=1)
    assert ask(port)["pid"] == process.pid


def test_a_restart_that_was_stopped_half_way_is_finished_and_starts_no_third(
    out: Path, start: Start
) -> None:
    port = free_port()
    start(port)
    deploy(out, 2)
    new = start(port, DRAFTWELL_REPLICA="1")
    assert rolling_restart(out, "tiny", print, end_seconds=20) == 1
    assert [one.pid for one in replicas_of(out, "tiny")] == [new.pid]


def test_nothing_that_runs_and_nothing_that_is_there(out: Path, tmp_path: Path) -> None:
    said: list[str] = []
    assert rolling_restart(out, "tiny", said.append) == 0
    assert "draftwell serve --engine vllm --pair tiny" in said[0]
    with raises_code("no_bundle"):
        rolling_restart(tmp_path / "nowhere", "tiny", print)


def replica(pid: int) -> Replica:
    """One as it would be found."""
    return Replica(pid, Path("1-cpu"), 8000, (), {}, started_at(pid))


def test_a_process_that_does_not_end_is_named() -> None:
    with subprocess.Popen(
        ["sh", "-c", "trap '' TERM; echo on; sleep 30 & wait; wait"], stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        with raises_code("server_not_ended", str(process.pid)):
            end_process(replica(process.pid), 0.2)
        process.kill()
    end_process(replica(process.pid), 0.2)


def test_a_command_of_a_users_own_restarts(out: Path, tmp_path: Path) -> None:
    assert restart_hook(f"touch '{tmp_path}/done'", out, "tiny", print)()
    assert (tmp_path / "done").exists()
    assert not restart_hook(None, out, "tiny", print)(), "nothing is served"
    with raises_code("restart_failed", "exit code 4"):
        restart_hook("exit 4", out, "tiny", print)()


def test_a_replica_without_a_number_is_the_first() -> None:
    assert Replica(1, Path("x"), 8000, (), {}).number == "1"


def restarted(out: Path, said: list[str]) -> int:
    """A restart that is not waited for long."""
    return rolling_restart(out, "tiny", said.append, start_seconds=30, end_seconds=20)


def served(out: Path) -> list[tuple[str, str]]:
    """Bundle and number of all that listens."""
    return [(one.bundle.name, one.number) for one in replicas_of(out, "tiny") if one.is_ready]


def test_where_one_of_two_does_not_start_the_earlier_bundle_is_started_again(
    out: Path, start: Start
) -> None:
    port = free_port()
    first, second = start(port), start(port, DRAFTWELL_REPLICA="2")
    (deploy(out, 2) / "listen.py").write_text("changed")
    said: list[str] = []
    with raises_code("server_failed", "was changed since it was made", "1-cpu was started again"):
        restarted(out, said)
    assert (first.wait(1), second.poll()) == (0, None)
    assert sorted(served(out)) == [("1-cpu", "1"), ("1-cpu", "2")]
    assert ask(port)["bundle"] == "tiny/1-cpu"


def test_a_restart_that_is_stopped_between_two_processes_starts_the_earlier_bundle_again(
    out: Path, start: Start
) -> None:
    port = free_port()
    start(port), start(port, DRAFTWELL_REPLICA="2")
    deploy(out, 2)

    def say(line: str) -> None:
        if "in its place" in line:
            raise SystemExit(143)

    with pytest.raises(SystemExit):
        rolling_restart(out, "tiny", say, end_seconds=20)
    wait_until(
        lambda: sorted(served(out)) == [("1-cpu", "1"), ("1-cpu", "2")],
        "it is not served by two",
        seconds=30,
    )


def test_a_restart_that_is_stopped_while_it_starts_the_earlier_bundle_again_loses_none(
    out: Path, start: Start
) -> None:
    port = free_port()
    start(port), start(port, DRAFTWELL_REPLICA="2")
    (deploy(out, 2) / "listen.py").write_text("changed")

    def say(line: str) -> None:
        if "did not start" in line:
            raise SystemExit(143)

    with pytest.raises(SystemExit):
        rolling_restart(out, "tiny", say, end_seconds=20)
    wait_until(
        lambda: sorted(served(out)) == [("1-cpu", "1"), ("1-cpu", "2")],
        "it is not served by two",
        seconds=30,
    )


def test_a_restart_that_is_stopped_while_the_old_process_answers_starts_none_beside_it(
    out: Path, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One GPU held two of the earlier bundle."""
    port, said, ends = free_port(), list[str](), list[int]()
    first = start(port, FAKE_SERVER_SECONDS="0.8")
    client = threading.Thread(target=ask, args=(port,))
    client.start()
    time.sleep(0.3)
    start(port, DRAFTWELL_REPLICA="2")
    deploy(out, 2)

    def stopped_first(old: Replica, seconds: float) -> None:
        ends.append(old.pid)
        if len(ends) == 1:
            os.kill(old.pid, signal.SIGTERM)
            raise SystemExit(143)
        end_process(old, seconds)

    monkeypatch.setattr(replicas_step, "end_process", stopped_first)
    alive = list[bool]()
    spawn = replicas_step.spawn
    monkeypatch.setattr(
        replicas_step, "spawn", lambda old, *rest: (alive.append(old.runs), spawn(old, *rest))[1]
    )
    with pytest.raises(SystemExit):
        restarted(out, said)
    client.join()
    assert (alive, ends) == ([False], [first.pid] * 2)
    wait_until(
        lambda: sorted(served(out)) == [("1-cpu", "1"), ("1-cpu", "2")],
        "it is not served by two",
        seconds=30,
    )


def test_a_replica_that_was_ended_by_hand_is_followed_by_the_next_restart(
    out: Path, start: Start
) -> None:
    """It was found no more, and the pair had one replica less for good."""
    port, said = free_port(), list[str]()
    options = ("--port", str(port), "--shutdown-timeout", "0")
    first = start(port, *options, VLLM_API_KEY="secret")
    start(port, *options, DRAFTWELL_REPLICA="2")
    deploy(out, 2)
    os.kill(first.pid, signal.SIGSTOP)
    with raises_code("server_not_ended", f"process {first.pid} of 1-cpu"):
        rolling_restart(out, "tiny", said.append, end_seconds=0.2)
    first.kill()
    first.wait()
    record = out / "vllm" / "tiny" / ".restart.json"
    assert record.stat().st_mode & 0o777 == 0o600
    assert restarted(out, said) == 2
    assert (
        f"an earlier restart has ended replica 1 on port {port}, and none has followed it" in said
    )
    now = {
        one.number: (one.bundle.name, one.options, one.environment.get("VLLM_API_KEY"))
        for one in replicas_of(out, "tiny")
    }
    assert now == {"1": ("2-cpu", options, "secret"), "2": ("2-cpu", options, None)}
    assert not record.exists()
    assert restarted(out, said) == 0


def test_what_was_noted_before_the_machine_was_started_again_is_forgotten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = Replica(1, tmp_path, 8000, ("--x",), {"A": "\udce9"}, 5, frozenset({0, 1}), 45.0)
    write_record(tmp_path / "record", old)
    assert read_record(tmp_path / "record") == old
    monkeypatch.setattr(restart_record, "boot", lambda: "another")
    assert read_record(tmp_path / "record") is None


def test_a_restart_that_is_asked_to_end_takes_along_what_it_started(
    out: Path, start: Start
) -> None:
    """The new process loaded on, and the next restart, which did not see it, started another."""
    process = start(free_port(), FAKE_START_SECONDS="0.5")
    current = deploy(out, 2).parent / "current"
    code = (
        "import sys, pathlib; from draftwell.flows.cli.engine import restart_elsewhere; "
        "restart_elsewhere(pathlib.Path(sys.argv[1]), 'tiny', [])"
    )
    with subprocess.Popen([sys.executable, "-c", code, str(current)], cwd=REPO) as restart:
        wait_until(
            lambda: len(replicas_of(out, "tiny")) == 2 or restart.poll() is not None,
            "nothing is started",
            seconds=30,
        )
        restart.terminate()
        assert restart.wait(10) == 143
    assert [one.pid for one in replicas_of(out, "tiny")] == [process.pid]


def test_what_a_killed_restart_left_loading_is_waited_for(out: Path, start: Start) -> None:
    port, said = free_port(), list[str]()
    first = start(port)
    deploy(out, 2)
    new = start(port, wait=False, DRAFTWELL_REPLICA="1", FAKE_START_SECONDS="0.5")
    wait_until(lambda: len(replicas_of(out, "tiny")) == 2, "it is not found", seconds=30)
    assert restarted(out, said) == 1
    assert any(f"process {new.pid} is loading 2-cpu" in line for line in said)
    assert (first.wait(1), new.poll(), served(out)) == (0, None, [("2-cpu", "1")])


def test_what_is_loading_an_earlier_bundle_is_ended_and_followed(out: Path, start: Start) -> None:
    loading = start(free_port(), wait=False, DRAFTWELL_REPLICA="2", FAKE_START_SECONDS="0.4")
    wait_until(
        lambda: b"listen.py" in Path(f"/proc/{loading.pid}/cmdline").read_bytes(),
        "vLLM is not started",
        seconds=30,
    )
    deploy(out, 2)
    assert restarted(out, []) == 1
    assert loading.poll() is not None
    assert served(out) == [("2-cpu", "2")]


def test_two_restarts_at_once_start_one_process(out: Path, start: Start) -> None:
    port, said = free_port(), list[str]()
    start(port)
    deploy(out, 2)
    counts: list[int] = []
    threads = [
        threading.Thread(target=lambda: counts.append(restarted(out, said))) for _ in range(2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(counts) == [0, 1]
    assert served(out) == [("2-cpu", "1")]
    assert any("another restart is under way" in line for line in said)


def test_a_new_process_has_the_port_and_the_cores_of_the_old_one(out: Path, start: Start) -> None:
    """The new bundle has another port, and the restart may be run from elsewhere, with other
    cores."""
    port, said = free_port(), list[str]()
    deploy(out, int(bundle(out, 3, port).name.partition("-")[0]))
    old = start(port, "--served-model-name", "mine")
    one = {min(os.sched_getaffinity(0))}
    os.sched_setaffinity(old.pid, one)
    deploy(out, 2)
    assert restarted(out, said) == 1
    [now] = replicas_of(out, "tiny")
    assert (now.bundle.name, now.port, now.is_ready, os.sched_getaffinity(now.pid)) == (
        "2-cpu",
        port,
        True,
        one,
    )


def test_what_is_only_tried_is_left_alone(
    out: Path, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A restart took the trial's server for a user's: the trial failed, and the new process
    stayed."""
    monkeypatch.setenv("VLLM_API_KEY", "secret")
    variables = trial_environment("tiny", None)
    assert "VLLM_API_KEY" not in variables, (
        "the trial asks without one, and waited half an hour for an answer"
    )
    process, said = start(free_port(), DRAFTWELL_TRIAL=variables["DRAFTWELL_TRIAL"]), list[str]()
    deploy(out, 2)
    assert restarted(out, said) == 0
    assert process.poll() is None


def test_a_number_that_was_given_again_is_another_process(out: Path, start: Start) -> None:
    """The new process may take half an hour to start."""
    process = start(
        free_port(), "--port", str(port := free_port()), "--shutdown-timeout", "600", wait=False
    )
    wait_until(lambda: served(out), "it does not listen", seconds=30)
    [found] = replicas_of(out, "tiny")
    assert (found.port, found.drain) == (port, 600.0)
    end_process(replace(found, started=found.started - 1), 0.0)
    assert (found.runs, process.poll()) == (True, None)


def test_of_two_that_are_started_at_once_without_a_number_one_ends(
    start: Start, tmp_path: Path
) -> None:
    port = free_port()
    both = [start(port, wait=False, FAKE_START_SECONDS=seconds) for seconds in ("0.2", "0.6")]
    assert both[1].wait(20) == 1
    assert both[0].poll() is None
    assert "Address already in use" in (tmp_path / "serve.log").read_text()


def test_a_new_process_that_cannot_have_the_port_gives_no_advice_of_tuning(
    out: Path, start: Start
) -> None:
    process = start(free_port())
    (deploy(out, 2) / "serve.sh").write_text("#!/bin/sh\necho Address already in use\nexit 1\n")
    with raises_code("server_failed", "Address already in use", "1-cpu is served on") as caught:
        restarted(out, [])
    assert "another port is chosen" not in str(caught.value)
    assert process.poll() is None


def test_a_users_own_python_path_is_passed_on_without_the_wheels_of_the_bundle() -> None:
    home = Path("/dist/vllm/tiny/1-cpu")
    variables = {
        "PYTHONPATH": f"{home}/a.whl:/mine",
        "DRAFTWELL_SET": "DRAFTWELL_SET X PYTHONPATH",
        "X": "1",
        "Y": "2",
    }
    assert given(variables, home) == {"Y": "2", "PYTHONPATH": "/mine"}
    assert given({**variables, "PYTHONPATH": f"{home}/a.whl"}, home) == {"Y": "2"}
