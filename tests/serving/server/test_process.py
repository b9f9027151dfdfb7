"""A real server process: it drains on SIGTERM, and follows the link `current` and SIGHUP, with no request lost."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from serving.device import device_class
from serving.runtime.commands import Role
from tests.serving.server.test_main import ENTRY, make_bundle
from tests.support.server.served_pair import tiny_pair

LONG = {"model": "tiny", "prompt": "hello", "max_tokens": 200, "temperature": 0}
SHORT = LONG | {"max_tokens": 2}


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> dict[Role, Path]:
    """The tiny pair as folders."""
    root, pair = tmp_path_factory.mktemp("weights"), tiny_pair(1)
    for role, module in pair.modules.items():
        module.set_attn_implementation("eager")
        module.save_pretrained(root / role)
        pair.tokenizer.save_pretrained(root / role)
    return {role: root / role for role in pair.modules}


@contextmanager
def process(bundle: Path, *options: str) -> Iterator[tuple[subprocess.Popen[str], httpx.Client]]:
    """A running server and a client of it; it is killed at the end, if it has not gone by itself."""
    with subprocess.Popen([*ENTRY, "--bundle", str(bundle), "--port", "0", "--threads", "1", *options], stdout=subprocess.PIPE,
                          stderr=subprocess.PIPE, text=True) as it:
        try:
            assert it.stdout is not None
            found = re.search(r"http://[^/\s]+", it.stdout.readline())
            assert found, it.communicate()[1]
            with httpx.Client(base_url=found.group(), timeout=120) as client:
                yield it, client
        finally:
            it.kill()


def soon(condition: Callable[[], Any], seconds: float = 60.0) -> Any:
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        if value := condition():
            return value
        time.sleep(0.05)
    raise AssertionError("it does not happen")


def lead(link: Path, to: Path) -> None:
    new = link.with_name(".new")
    new.symlink_to(to.name)
    os.replace(new, link)


@pytest.mark.slow
def test_sigterm_finishes_what_is_here_refuses_the_rest_and_exits_with_0(tmp_path: Path, weights: dict[Role, Path]) -> None:
    bundle = make_bundle(tmp_path / "bundle", weights, "autoregressive")
    answers: list[httpx.Response] = []
    with process(bundle, "--slots", "1") as (server, client):
        threads = [threading.Thread(target=lambda: answers.append(client.post("/v1/completions", json=LONG))) for _ in range(12)]
        for thread in threads:
            thread.start()
        soon(lambda: client.get("/health").json()["waiting"] >= 10)
        assert client.get("/ready").status_code == 200
        server.send_signal(signal.SIGTERM)
        soon(lambda: client.get("/ready").status_code == 503)
        refused = client.post("/v1/completions", json=SHORT)
        assert refused.status_code == 503
        assert refused.json()["error"]["type"] == "server_error"
        state = client.get("/health")
        assert (state.status_code, state.json()["status"]) == (200, "draining"), "it is alive: nobody should kill it"
        for thread in threads:
            thread.join()
        _, errors = server.communicate(timeout=60)
    assert [answer.status_code for answer in answers] == [200] * 12
    assert {answer.json()["usage"]["completion_tokens"] for answer in answers} == {answers[0].json()["usage"]["completion_tokens"]}
    assert server.returncode == 0, errors
    assert "Traceback" not in errors


@pytest.mark.slow
def test_what_outlasts_the_drain_is_answered_and_state_is_written_behind_it(tmp_path: Path, weights: dict[Role, Path]) -> None:
    bundle = make_bundle(tmp_path / "bundle", weights, "spide", {"tau": 0.6}, machine=device_class("cpu"))
    answers: list[httpx.Response] = []
    with process(bundle, "--slots", "1", "--drain-seconds", "0", "--state-dir", str(tmp_path / "state"),
                 "--state-seconds", "3600") as (server, client):
        threads = [threading.Thread(target=lambda: answers.append(client.post("/v1/completions", json=LONG))) for _ in range(12)]
        for thread in threads:
            thread.start()
        soon(lambda: client.get("/health").json()["waiting"] >= 10)
        server.send_signal(signal.SIGTERM)
        for thread in threads:
            thread.join()
        _, errors = server.communicate(timeout=15)
    assert [answer.status_code for answer in answers].count(503) >= 8, "of those that waited; others may have been answered"
    assert {answer.status_code for answer in answers} <= {200, 503}
    assert all("error" in answer.json() for answer in answers if answer.status_code == 503)
    assert "unfinished" in errors
    assert "Traceback" not in errors
    assert server.returncode == 0, errors
    assert (tmp_path / "state" / "everybody.json").is_file()


@pytest.mark.slow
def test_the_link_and_sighup_switch_bundles_and_a_damaged_one_is_refused(tmp_path: Path, weights: dict[Role, Path]) -> None:
    for number, strategy in enumerate(("vanilla_sd", "prompt_lookup", "autoregressive"), start=1):
        make_bundle(tmp_path / f"{number}-cpu", weights, strategy)
    (tmp_path / "3-cpu" / "manifest.json").write_text("{}")
    link, faults, answered, over = tmp_path / "current", [], set(), threading.Event()
    lead(link, tmp_path / "1-cpu")
    with process(link, "--slots", "2") as (server, client):

        def ask() -> None:
            while not over.is_set():
                answer = client.post("/v1/completions", json=SHORT | {"max_tokens": 10})
                if answer.status_code == 200:
                    answered.add(answer.json()["speculation"]["strategy"])
                else:
                    faults.append(answer.text)

        def state() -> dict[str, Any]:
            return client.get("/health").json()  # type: ignore[no-any-return]

        asking = threading.Thread(target=ask)
        asking.start()
        soon(lambda: "vanilla_sd" in answered)
        lead(link, tmp_path / "2-cpu")
        soon(lambda: state()["strategy"] == "prompt_lookup")
        soon(lambda: "prompt_lookup" in answered)
        server.send_signal(signal.SIGHUP)
        soon(lambda: state()["switches"] == 2)
        lead(link, tmp_path / "3-cpu")
        refusal = soon(lambda: state()["last_switch_error"])
        assert "manifest.json" in refusal
        assert str(tmp_path) not in refusal
        assert state()["strategy"] == "prompt_lookup"
        lead(link, tmp_path / "1-cpu")
        soon(lambda: state()["strategy"] == "vanilla_sd")
        assert state()["last_switch_error"] is None
        over.set()
        asking.join()
        server.send_signal(signal.SIGTERM)
        _, errors = server.communicate(timeout=60)
    assert faults == []
    assert answered == {"vanilla_sd", "prompt_lookup"}
    assert errors.count("is refused") == 1
    assert "Traceback" not in errors
    assert server.returncode == 0
