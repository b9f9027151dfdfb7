"""A real server process: it drains on SIGTERM, and follows the link `current` and SIGHUP, with no
request lost."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from draftwell.serving.device import device_class
from draftwell.serving.runtime.commands import Role
from tests.support.server.bundles import make_bundle
from tests.support.server.server_process import ENTRY, entry_with, server_process, wait_until

LONG = {"model": "tiny", "prompt": "hello", "max_tokens": 200, "temperature": 0}
SHORT = LONG | {"max_tokens": 2}
LONGER = LONG | {"n": 4}
"""So long that a busy client has sent twelve before the first few are answered."""


@contextmanager
def process(
    bundle: Path, *options: str, entry: Sequence[str] = ENTRY
) -> Iterator[tuple[subprocess.Popen[str], httpx.Client]]:
    """A running server and a client of it."""
    command = [*entry, "--bundle", str(bundle), "--port", "0", "--threads", "1", *options]
    with (
        server_process(command, stderr=subprocess.PIPE) as (server, url),
        httpx.Client(base_url=url, timeout=120) as client,
    ):
        yield server, client


def lead(link: Path, to: Path) -> None:
    new = link.with_name(".new")
    new.symlink_to(to.name)
    os.replace(new, link)


@pytest.mark.slow
def test_sigterm_finishes_what_is_here_refuses_the_rest_and_exits_with_0(
    tmp_path: Path, tiny_models: dict[Role, Path]
) -> None:
    bundle = make_bundle(tmp_path / "bundle", tiny_models, "autoregressive")
    answers: list[httpx.Response] = []
    with process(bundle, "--slots", "1", "--drain-seconds", "100") as (server, client):
        threads = [
            threading.Thread(
                target=lambda: answers.append(client.post("/v1/completions", json=LONGER))
            )
            for _ in range(12)
        ]
        for thread in threads:
            thread.start()
        wait_until(lambda: client.get("/health").json()["waiting"] >= 44, "eleven requests wait")
        assert client.get("/ready").status_code == 200
        server.send_signal(signal.SIGTERM)
        wait_until(lambda: client.get("/ready").status_code == 503, "the server refuses requests")
        refused = client.post("/v1/completions", json=SHORT)
        assert refused.status_code == 503
        assert refused.json()["error"]["type"] == "server_error"
        state = client.get("/health")
        assert (state.status_code, state.json()["status"]) == (200, "draining"), (
            "it is alive: nobody should kill it"
        )
        for thread in threads:
            thread.join(120)
        _, errors = server.communicate(timeout=60)
    assert [answer.status_code for answer in answers] == [200] * 12
    assert {answer.json()["usage"]["completion_tokens"] for answer in answers} == {
        answers[0].json()["usage"]["completion_tokens"]
    }
    assert server.returncode == 0, errors
    assert "Traceback" not in errors


@pytest.mark.slow
def test_what_outlasts_the_drain_is_answered_and_state_is_written_behind_it(
    tmp_path: Path, tiny_models: dict[Role, Path]
) -> None:
    bundle = make_bundle(
        tmp_path / "bundle", tiny_models, "spide", {"tau": 0.6}, machine=device_class("cpu")
    )
    answers: list[httpx.Response] = []
    with process(
        bundle,
        "--slots",
        "1",
        "--drain-seconds",
        "0",
        "--state-dir",
        str(tmp_path / "state"),
        entry=entry_with(state_seconds=3600),  # the only write is the last one
    ) as (server, client):
        threads = [
            threading.Thread(
                target=lambda: answers.append(client.post("/v1/completions", json=LONGER))
            )
            for _ in range(12)
        ]
        for thread in threads:
            thread.start()
        wait_until(lambda: client.get("/health").json()["waiting"] >= 44, "eleven requests wait")
        server.send_signal(signal.SIGTERM)
        for thread in threads:
            thread.join(120)
        _, errors = server.communicate(timeout=60)
    assert [answer.status_code for answer in answers].count(503) >= 8, (
        "of those that waited; others may have been answered"
    )
    assert {answer.status_code for answer in answers} <= {200, 503}
    assert all("error" in answer.json() for answer in answers if answer.status_code == 503)
    assert "unfinished" in errors
    assert "Traceback" not in errors
    assert server.returncode == 0, errors
    assert (tmp_path / "state" / "everybody.json").is_file()


@pytest.mark.slow
def test_the_link_and_sighup_switch_bundles_and_a_damaged_one_is_refused(
    tmp_path: Path, tiny_models: dict[Role, Path]
) -> None:
    for number, strategy in enumerate(("vanilla_sd", "prompt_lookup", "autoregressive"), start=1):
        make_bundle(tmp_path / f"{number}-cpu", tiny_models, strategy)
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
        wait_until(lambda: "vanilla_sd" in answered, "the first bundle answers")
        lead(link, tmp_path / "2-cpu")
        wait_until(lambda: state()["strategy"] == "prompt_lookup", "the second bundle serves")
        wait_until(lambda: "prompt_lookup" in answered, "the second bundle answers")
        server.send_signal(signal.SIGHUP)
        wait_until(lambda: state()["switches"] == 2, "SIGHUP reloads the bundle")
        lead(link, tmp_path / "3-cpu")
        refusal = wait_until(lambda: state()["last_switch_error"], "the damaged bundle is refused")
        assert "manifest.json" in refusal
        assert str(tmp_path) not in refusal
        assert state()["strategy"] == "prompt_lookup"
        lead(link, tmp_path / "1-cpu")
        wait_until(lambda: state()["strategy"] == "vanilla_sd", "the first bundle serves again")
        assert state()["last_switch_error"] is None
        over.set()
        asking.join(120)
        server.send_signal(signal.SIGTERM)
        _, errors = server.communicate(timeout=60)
    assert faults == []
    assert answered == {"vanilla_sd", "prompt_lookup"}
    assert errors.count("is refused") == 1
    assert "Traceback" not in errors
    assert server.returncode == 0
