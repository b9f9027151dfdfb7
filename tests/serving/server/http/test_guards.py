"""Hosts, request ids with one log line each, bounds on products, headers against retry storms, a
hung step."""

from __future__ import annotations

import json
import logging
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from pydantic_core import PydanticCustomError

from draftwell.serving.errors import DeviceLost, OutOfMemory
from draftwell.serving.server.deployment.deployments import Deployments
from draftwell.serving.server.http import (
    rendering as answer_module,
    service as service_module,
)
from draftwell.serving.server.http.conversation import Conversation, Deadline
from draftwell.serving.server.http.errors import retry_after, shutting_down
from draftwell.serving.server.http.requests import whole_characters
from draftwell.serving.server.http.security import Security, hosts_of
from draftwell.serving.server.model.served_model import ServedModel
from draftwell.serving.server.scheduling import scheduler as scheduler_module
from draftwell.serving.server.scheduling.admission import QueueFull
from draftwell.serving.server.scheduling.scheduler import Scheduler
from draftwell.serving.server.scheduling.ticket import DeadlineExceeded, Failure
from draftwell.serving.server.settings import ServerSettings
from tests.support.server.served_pair import served_pair, serving
from tests.support.server.server_process import wait_until

PLAIN = {"model": "tiny", "prompt": "hi", "max_tokens": 4, "temperature": 0}


@pytest.fixture(scope="module")
def served() -> ServedModel:
    return served_pair("autoregressive", slots=2)


@pytest.fixture(scope="module")
def server(served: ServedModel) -> Iterator[tuple[httpx.Client, Any]]:
    security = Security(hosts=hosts_of("127.0.0.1", ["api.example.org"], keys=False))
    with (
        serving(served, security=security) as (url, scheduler),
        httpx.Client(base_url=url, timeout=100) as client,
    ):
        yield client, scheduler


@pytest.mark.parametrize(
    ("host", "known"),
    [
        ("localhost:8000", True),
        ("127.0.0.1", True),
        ("[::1]:80", True),
        ("draftwell.localhost", True),
        ("API.example.org.", True),
        ("", True),
        ("10.0.0.7:8000", True),
        ("[fe80::1]:8000", True),
        ("host.docker.internal:8000", True),
        (socket.gethostname(), True),
        ("other.example.net:9000", True),
        ("evil.example", False),
        ("localhost.evil.example", False),
        ("127.0.0.1.evil.example", False),
        ("example.org", False),
    ],
)
def test_a_host_is_one_of_the_servers_names(host: str, known: bool) -> None:
    names = ["api.example.org", "other.example.net:8443"]
    hosts = hosts_of("127.0.0.1", names, keys=False)
    assert Security(hosts=hosts).answers_as(host) is known


@pytest.mark.parametrize("host", ["127.0.0.2", "127.1.2.3", "LOCALHOST", "::1", "::ffff:127.0.0.1"])
def test_every_address_of_this_machine_alone_is_checked(host: str) -> None:
    assert "localhost" in hosts_of(host, [], keys=False)


def test_a_server_with_keys_or_on_all_addresses_checks_only_what_it_is_told() -> None:
    assert (
        hosts_of("127.0.0.1", [], keys=True)
        == hosts_of("0.0.0.0", [], keys=False)
        == hosts_of("127.0.0.1", ["*"], keys=False)
        == ()
    )
    assert "x.org" in hosts_of("0.0.0.0", ["x.org"], keys=True)


def test_another_name_is_refused_before_anything_else(server: tuple[httpx.Client, Any]) -> None:
    http, _ = server
    assert http.get("/health").status_code == 200
    assert http.get("/health", headers={"Host": "evil.example"}).status_code == 200, (
        "a probe may use any name"
    )
    response = http.get("/v1/models", headers={"Host": "evil.example"})
    assert (response.status_code, response.json()["error"]["code"]) == (421, "wrong_host")


@pytest.mark.parametrize(
    "kind",
    [None, "text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x"],
)
def test_a_body_that_does_not_say_that_it_is_json_is_refused(
    server: tuple[httpx.Client, Any], kind: str | None
) -> None:
    """A page of another site can send these to this machine without a preflight."""
    content = json.dumps(PLAIN).encode()
    headers = {} if kind is None else {"Content-Type": kind}
    refused = server[0].post("/v1/completions", content=content, headers=headers)
    assert refused.request.headers.get("Content-Type") == kind
    assert refused.status_code == 415
    error = refused.json()["error"]
    assert (error["code"], error["param"]) == ("unsupported_media_type", None)
    assert "Content-Type: application/json" in error["message"]
    assert kind is None or kind in error["message"]


def test_every_answer_has_an_id_and_one_line(
    server: tuple[httpx.Client, Any], caplog: pytest.LogCaptureFixture
) -> None:
    http, _ = server
    with caplog.at_level(logging.INFO, "draftwell.serving.server.http.security"):
        own = http.post("/v1/completions", json=PLAIN, headers={"x-request-id": "mine-1"})
        odd = http.post(
            "/v1/completions", json=PLAIN | {"temperature": 9}, headers={"x-request-id": "a b\tc"}
        )
        probe = http.get("/health")
        ids = [answer.headers["x-request-id"] for answer in (own, odd, probe)]

        def lines() -> list[str]:
            """Of these requests alone: the line of an earlier test's may come late."""
            return [message for message in caplog.messages if message.rpartition(" ")[2] in ids]

        wait_until(lambda: len(lines()) >= 2, "two lines of the log", 30)
    assert own.headers["x-request-id"] == "mine-1"
    assert len(odd.headers["x-request-id"]) == 32
    first, second = lines()  # probes are not logged
    assert first.startswith("POST /v1/completions 200 in ")
    assert first.endswith("request mine-1")
    assert second.startswith("POST /v1/completions 400 (invalid_request_error: temperature) in ")


def test_the_line_of_a_refusal_names_what_was_asked_for(
    server: tuple[httpx.Client, Any], caplog: pytest.LogCaptureFixture
) -> None:
    """Also of one that comes before the routes; the client's own words are never in it."""
    http, _ = server
    with caplog.at_level(logging.INFO, "draftwell.serving.server.http.security"):
        for number, path in enumerate(("/v1/completions", "/v1/models/mine", "/nothing")):
            http.post(
                path,
                json=PLAIN,
                headers={"Host": "evil.example", "x-request-id": f"refused-{number}"},
            )

        def lines() -> list[str]:
            return [
                message.partition(" in ")[0]
                for message in caplog.messages
                if "request refused-" in message
            ]

        wait_until(lambda: len(lines()) >= 3, "three lines of the log", 30)
    assert sorted(lines()) == [
        "POST /v1/completions 421 (wrong_host)",
        "POST /v1/models/{name:path} 421 (wrong_host)",
        "POST unknown path 421 (wrong_host)",
    ]


TRACED = {"n": 10, "max_tokens": 10, "ignore_eos": True, "speculation": {"trace": True}}
RATED = {"n": 2, "max_tokens": 10, "logprobs": 4}


@pytest.mark.parametrize(
    ("asked", "refused"),
    [
        (RATED, None),
        (RATED | {"logprobs": 5}, "logprobs"),
        (RATED | {"echo": True}, "logprobs"),  # an echoed prompt is listed too
        ({"n": 20, "max_tokens": 10}, None),  # nothing is listed
        (TRACED, None),
        (TRACED | {"max_tokens": 11}, "speculation.trace"),
        (TRACED | {"logprobs": 0}, "logprobs"),  # both lists count
    ],
    ids=str,
)
def test_what_a_request_lists_is_bounded_as_a_whole(
    server: tuple[httpx.Client, Any],
    monkeypatch: pytest.MonkeyPatch,
    asked: dict[str, Any],
    refused: str | None,
) -> None:
    monkeypatch.setattr(service_module, "MOST_LISTED", 100)
    response = server[0].post("/v1/completions", json=PLAIN | asked)
    assert response.status_code == (400 if refused else 200)
    assert response.json().get("error", {}).get("param") == refused


@pytest.mark.parametrize(
    ("asked", "tokens"),
    [(TRACED, 100), ({"ignore_eos": True, "n": 2, "logprobs": True, "top_logprobs": 4}, 20)],
)
def test_where_no_budget_was_named_it_is_what_can_be_listed(
    server: tuple[httpx.Client, Any],
    monkeypatch: pytest.MonkeyPatch,
    asked: dict[str, Any],
    tokens: int,
) -> None:
    monkeypatch.setattr(service_module, "MOST_LISTED", 100)
    chat = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "temperature": 0}
    body = chat | asked | {"max_tokens": None}
    response = server[0].post("/v1/chat/completions", json=body)
    assert response.status_code == 200, response.text
    assert response.json()["usage"]["completion_tokens"] == tokens
    assert {choice["finish_reason"] for choice in response.json()["choices"]} == {"length"}
    body["max_tokens"] = 11
    assert server[0].post("/v1/chat/completions", json=body).status_code == 400


@pytest.mark.parametrize("listed", [{"logprobs": 1}, {"speculation": {"trace": True}}], ids=str)
def test_long_lists_are_not_written_on_the_event_loop(
    server: tuple[httpx.Client, Any], monkeypatch: pytest.MonkeyPatch, listed: dict[str, Any]
) -> None:
    threads: list[str] = []
    usage = answer_module.usage_of
    monkeypatch.setattr(
        answer_module,
        "usage_of",
        lambda *counts: (threads.append(threading.current_thread().name), usage(*counts))[1],
    )
    assert server[0].post("/v1/completions", json=PLAIN | listed).status_code == 200
    assert threads
    assert all(name.startswith(("answer_", "stream_")) for name in threads)


def test_long_texts_are_checked_in_one_piece() -> None:
    """A loop over their characters takes a while, on the event loop."""

    class Unread(str):
        def __iter__(self) -> Iterator[str]:
            raise AssertionError("it is read character by character")

    assert whole_characters(Unread("é🙂" * 1000)) == "é🙂" * 1000
    with pytest.raises(PydanticCustomError):
        whole_characters(Unread("é\ud800"))


def test_each_token_is_spelt_once(served: ServedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    spelt: list[int] = []
    spell = served._spell
    monkeypatch.setattr(served, "_spelt", {})
    monkeypatch.setattr(served, "_spell", lambda token: spelt.append(token) or spell(token))
    assert [served.token_text(5), served.token_text(6), served.token_text(5)] == [
        spell(5),
        spell(6),
        spell(5),
    ]
    assert spelt == [5, 6]


def test_those_refused_together_do_not_come_back_together() -> None:
    waits = {retry_after(20)["Retry-After"] for _ in range(200)}
    assert len(waits) > 3
    assert all(20 <= int(wait) <= 30 for wait in waits)
    assert retry_after(60)["Retry-After"] == "60"
    assert int(shutting_down().headers["Retry-After"]) <= 2  # type: ignore[index]


@pytest.mark.parametrize(
    ("error", "own", "status", "header"),
    [
        (DeadlineExceeded("late"), True, 408, "x-should-retry"),
        (DeadlineExceeded("late"), False, 504, "x-should-retry"),
        (OutOfMemory("full"), False, 503, "x-should-retry"),
        (DeviceLost("gone"), False, 503, "Retry-After"),
        (QueueFull(7), False, 429, "Retry-After"),
    ],
    ids=str,
)
def test_errors_say_whether_to_try_again(
    error: Exception, own: bool, status: int, header: str
) -> None:
    conversation = object.__new__(Conversation)
    conversation._deadline = Deadline(own=own)
    found = conversation._error(Failure(error))
    assert found.status == status
    assert header in (found.headers or {})


def late(work: Callable[..., Any], go_on: threading.Event) -> Callable[..., Any]:
    """Work that begins when it may."""
    return lambda *given, **options: go_on.wait(60) and work(*given, **options)


@pytest.mark.parametrize(
    ("path", "asked"),
    [
        ("/v1/completions", {"prompt": "hi"}),
        ("/v1/completions", {"prompt": [5], "prediction": {"type": "content", "content": "slow"}}),
        ("/v1/completions", {"prompt": [5], "guided_choice": ["slow"]}),
        ("/v1/responses", {"input": "hi"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}]}),
    ],
    ids=str,
)
def test_a_deadline_counts_from_the_beginning(
    served: ServedModel, monkeypatch: pytest.MonkeyPatch, path: str, asked: dict[str, Any]
) -> None:
    """Also while the prompt is encoded, or a grammar compiled."""
    go_on = threading.Event()
    for name in ("encode", "encode_chat", "grammar"):
        monkeypatch.setattr(served, name, late(getattr(served, name), go_on))
    with (
        serving(served, request_timeout=0.3) as (url, scheduler),
        httpx.Client(base_url=url, timeout=60) as http,
    ):
        try:
            for timeout, status in ((0.2, 408), (50, 504), (None, 504)):
                response = http.post(path, json={"model": "tiny", "timeout": timeout} | asked)
                assert response.status_code == status, response.text
                assert response.json()["error"]["code"] == "deadline_exceeded"
                assert response.headers["x-should-retry"] == "false"
                assert scheduler.running + scheduler.waiting == 0
        finally:
            go_on.set()


def test_nothing_is_encoded_for_a_full_queue(
    served: ServedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoded: list[str] = []
    encode, go_on = served.encode, threading.Event()
    monkeypatch.setattr(
        served,
        "encode",
        lambda prompt, **options: (encoded.append(prompt), encode(prompt, **options))[1],
    )
    with (
        serving(served, capacity=1) as (url, scheduler),
        httpx.Client(base_url=url, timeout=60) as http,
    ):
        step = scheduler.engine.step
        monkeypatch.setattr(scheduler.engine, "step", lambda: (go_on.wait(60), step()))
        with ThreadPoolExecutor(1) as others:
            try:
                first = others.submit(
                    http.post, "/v1/completions", json=PLAIN | {"prompt": "first", "n": 3}
                )
                wait_until(
                    lambda: scheduler.running + scheduler.waiting == 3, "slots and queue are full"
                )
                refused = http.post("/v1/completions", json=PLAIN | {"prompt": "refused"})
                assert (refused.status_code, refused.json()["error"]["code"]) == (429, "queue_full")
                assert "Retry-After" in refused.headers
                never = http.post(
                    "/v1/completions", json=PLAIN | {"prompt": ["too many"] * 128, "n": 2}
                )
                assert (never.status_code, never.json()["error"]["param"]) == (400, "prompt"), (
                    "waiting would not help"
                )
                assert encoded == ["first"]
            finally:
                go_on.set()
            assert first.result().status_code == 200
        assert http.post("/v1/completions", json=PLAIN).status_code == 200


def test_requests_whose_prompts_are_encoded_count_as_waiting(
    served: ServedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    encode, begun, go_on = served.encode, threading.Semaphore(0), threading.Event()

    def slowly(prompt: str, **options: Any) -> list[int]:
        begun.release()
        assert go_on.wait(60)
        return encode(prompt, **options)

    monkeypatch.setattr(served, "encode", slowly)
    with (
        serving(served, capacity=1) as (url, _),
        httpx.Client(base_url=url, timeout=60) as http,
        ThreadPoolExecutor(2) as others,
    ):
        try:
            asked = [others.submit(http.post, "/v1/completions", json=PLAIN) for _ in range(2)]
            for _ in asked:
                assert begun.acquire(timeout=60)
            refused = http.post("/v1/completions", json=PLAIN | {"n": 2})
            assert (refused.status_code, refused.json()["error"]["code"]) == (429, "queue_full")
        finally:
            go_on.set()
        assert [one.result().status_code for one in asked] == [200] * 2
        assert http.post("/v1/completions", json=PLAIN | {"n": 2}).status_code == 200


@pytest.mark.parametrize(
    ("owner", "name"),
    [("engine", "step"), ("engine", "submit"), ("scheduler", "_publish"), ("scheduler", "_drop")],
)
def test_a_hung_round_fails_the_health_check(
    server: tuple[httpx.Client, Any], monkeypatch: pytest.MonkeyPatch, owner: str, name: str
) -> None:
    """Whatever part of a round does not end."""
    http, scheduler = server
    monkeypatch.setattr(scheduler_module, "HUNG_SECONDS", 0.02)
    monkeypatch.setattr(scheduler_module, "TOKEN_SECONDS", 0.0)
    place = scheduler.engine if owner == "engine" else scheduler
    right = getattr(place, name)
    seen: list[int] = []

    def slow(*given: Any) -> Any:
        time.sleep(0.1)
        seen.append(scheduler.hung)
        return right(*given)

    with monkeypatch.context() as patch:
        patch.setattr(place, name, slow)
        assert http.post("/v1/completions", json=PLAIN | {"max_tokens": 1}).status_code == 200
    assert seen
    assert all(seen)
    deadline = time.monotonic() + 30
    # on a busy machine a round's end takes longer, too
    while (scheduler.running or scheduler.hung) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not scheduler.hung
    assert http.get("/health").json()["status"] == "ok"


def test_a_drain_hides_no_hung_round(served: ServedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    deployments = Deployments(served)
    deployments.drain()
    assert deployments.health()["status"] == "draining", (
        "that no thread runs any more is what a drain is for"
    )
    monkeypatch.setattr(Scheduler, "hung", True)
    assert deployments.health()["status"] == "failed"


def test_lossy_strategies_are_offered_on_demand_only() -> None:
    default = ServerSettings(bundle=Path("x")).offered
    assert default is not None
    assert "vanilla_sd" in default
    assert "csd" not in default
    every = ServerSettings(bundle=Path("x"), strategies="all").offered
    assert every is None


def test_state_is_kept_apart_where_there_are_keys() -> None:
    plain = ServerSettings(bundle=Path("x"))
    assert (plain.with_keys(False).state, plain.with_keys(True).state) == ("shared", "tenant")
    assert ServerSettings(bundle=Path("x"), state="shared").with_keys(True).state == "shared"
