"""Who may ask and how much: keys, sizes, origins; nothing of the machine in any answer; full queues
say when to come back."""

from __future__ import annotations

import base64
import json
import logging
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from draftwell.serving.errors import DraftwellError
from draftwell.serving.server.app import create_app
from draftwell.serving.server.http.errors import without_paths
from draftwell.serving.server.http.keys import Keys
from draftwell.serving.server.http.security import Security, key_in, origins
from draftwell.serving.server.scheduling.admission import QueueFull
from tests.support.errors import raises_code
from tests.support.server.served_pair import served_pair, serving
from tests.support.server.server_process import wait_until

BODY = {"model": "tiny", "prompt": "hi", "max_tokens": 2, "temperature": 0}
KEYS = ("first-key", "zweiter-schlüssel")


@pytest.fixture(scope="module")
def closed() -> Any:
    with asking(security=Security(keys=Keys.of(*KEYS), body_bytes=2000)) as (http, _):
        yield http


@contextmanager
def asking(**settings: Any) -> Iterator[tuple[httpx.Client, Any]]:
    """A client of a server with such settings, and its scheduler."""
    with (
        serving(served_pair("autoregressive", slots=1), **settings) as (url, scheduler),
        httpx.Client(base_url=url, timeout=60) as http,
    ):
        yield http, scheduler


def bearer(key: str) -> dict[str, bytes]:
    return {"Authorization": b"Bearer " + key.encode()}


def test_every_path_but_health_readiness_and_the_page_needs_a_key(closed: httpx.Client) -> None:
    asked = [
        closed.get("/v1/models"),
        closed.get("/openapi.json"),
        closed.get("/metrics"),
        closed.get("/nothing"),
        closed.post("/v1/completions", json=BODY),
        closed.post("/v1/completions", content=b"{"),
        closed.request("OPTIONS", "/v1/completions"),
        closed.get("/health/../v1/models"),
    ]
    for response in asked:
        assert response.status_code == 401, response.request.url
        error = response.json()["error"]
        assert (error["type"], error["code"], error["param"]) == (
            "invalid_request_error",
            "invalid_api_key",
            None,
        )
        assert "www-authenticate" in response.headers
    assert closed.get("/health").status_code == 200
    assert closed.get("/ready").status_code != 401
    assert closed.get("/").status_code == 200


@pytest.mark.parametrize("key", KEYS)
def test_each_key_opens(closed: httpx.Client, key: str) -> None:
    assert closed.post("/v1/completions", json=BODY, headers=bearer(key)).status_code == 200
    basic = base64.b64encode(b"anybody:" + key.encode())
    assert closed.get("/v1/models", headers={"Authorization": b"Basic " + basic}).status_code == 200


@pytest.mark.parametrize(
    "header",
    [
        "Bearer",
        "Bearer first-ke",
        "Bearer first-key2",
        "first-key",
        "Basic !!!",
        "Basic",
        "Bearer first-key,zweiter-schlüssel",
        "Digest first-key",
        "Bearer \xff\xfe",
    ],
)
def test_other_headers_do_not(closed: httpx.Client, header: str) -> None:
    response = closed.get("/v1/models", headers={"Authorization": header.encode("latin-1")})
    assert response.status_code == 401
    assert "first-key" not in response.text


def test_openais_client_says_so(closed: httpx.Client) -> None:
    for key, fails in (("first-key", False), ("wrong", True)):
        with openai.OpenAI(
            base_url=f"{closed.base_url}/v1", api_key=key, max_retries=0, http_client=httpx.Client()
        ) as client:
            if fails:
                with pytest.raises(openai.AuthenticationError):
                    client.models.list()
            else:
                assert client.models.list().data[0].id == "tiny"


def test_no_keys_let_nobody_in_by_an_empty_key() -> None:
    assert key_in("") == key_in("Basic") == b""


def test_a_body_too_large_is_refused(
    closed: httpx.Client, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "draftwell.serving.server.http.security")
    headers = {
        "Content-Type": "application/json",
        "x-request-id": "too-large",
        **bearer("first-key"),
    }
    little, much = (
        json.dumps(BODY | {"prompt": "x" * length}).encode() for length in (3000, 2_000_000)
    )

    def in_chunks() -> Any:
        for start in range(0, len(little), 500):
            yield little[start : start + 500]

    for content in (little, much, in_chunks()):
        response = closed.post("/v1/completions", content=content, headers=headers)
        assert response.status_code == 413
        assert response.json()["error"]["code"] == "request_too_large"
    assert closed.post("/v1/completions", json=BODY, headers=headers).status_code == 200

    def lines() -> list[str]:
        """Of these requests alone: the line of an earlier test's may come late."""
        return [line for line in caplog.messages if line.endswith("request too-large")]

    wait_until(lambda: len(lines()) == 4, "each has its line in the log")
    (client,) = {line.partition("client ")[2].partition(",")[0] for line in lines()}
    assert len(client) == 32, "known before its body is"


def test_an_endless_body_is_cut_off(closed: httpx.Client) -> None:
    """Chunks without an end: the answer comes behind the limit, not never."""
    with socket.create_connection(
        (closed.base_url.host, closed.base_url.port), timeout=30
    ) as connection:
        connection.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            b"Authorization: Bearer first-key\r\nTransfer-Encoding: chunked\r\n\r\n"
        )
        for _ in range(5):
            connection.sendall(b"1f4\r\n" + b"x" * 500 + b"\r\n")
        assert b" 413 " in connection.recv(4096).split(b"\r\n")[0]


@pytest.mark.parametrize("chunked", [False, True])
def test_bodies_together_are_bounded(chunked: bool) -> None:
    """By what has arrived of them, half of it for one client; those that are over, or cut off,
    make room."""
    body = json.dumps(BODY | {"user": "x" * 1000}).encode()
    head = (
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: "
        b"application/json\r\nContent-Length: 1900\r\n\r\n"
    )
    with asking(security=Security(body_bytes=2000, bodies_bytes=10_400)) as (http, _):

        def ask() -> httpx.Response:
            content: Any = iter([body[:500], body[500:]]) if chunked else body
            return http.post(
                "/v1/completions", content=content, headers={"Content-Type": "application/json"}
            )

        assert [ask().status_code for _ in range(6)] == [200] * 6
        slow: list[socket.socket] = []

        def arrived() -> bool:
            """Whether two unfinished bodies are held."""
            while slow:
                slow.pop().close()
            for _ in range(2):
                place = (http.base_url.host, http.base_url.port)
                slow.append(socket.create_connection(place, timeout=60))
                slow[-1].sendall(head + b"x" * 1850)
            time.sleep(0.2)
            return ask().status_code == 503

        try:
            wait_until(arrived, "the slow bodies are there")
            refused = ask()
            assert refused.json()["error"]["code"] == "too_many_requests"
            assert 5 <= int(refused.headers["Retry-After"]) <= 8
            assert http.get("/health").status_code == 200
            assert http.post("/v1/completions", json=BODY).status_code == 200, (
                "a small one has room"
            )
        finally:
            for connection in slow:
                connection.close()
        wait_until(lambda: ask().status_code == 200, "there is room again")


SITE = "https://site.example"
PREFLIGHT = {
    "Origin": SITE,
    "Access-Control-Request-Method": "POST",
    # OpenAI's client for browsers sends headers of its own, whose names change with its versions
    "Access-Control-Request-Headers": "authorization,content-type,x-stainless-lang",
}


def test_other_sites_pages_are_not_answered_unless_allowed() -> None:
    with asking() as (http, _):
        for response in (
            http.options("/v1/completions", headers=PREFLIGHT),
            http.get("/v1/models", headers=PREFLIGHT),
        ):
            assert not [name for name in response.headers if name.startswith("access-control")]


def test_an_allowed_sites_pages_are_answered_and_may_read_every_refusal() -> None:
    security = Security(keys=Keys.of("k"), cors_origins=(SITE,), hosts=("localhost", "127.0.0.1"))
    key, other = {"Authorization": "Bearer k"}, {"Origin": "https://other.example"}
    with asking(security=security) as (http, _):
        answers = [
            http.options("/v1/chat/completions", headers=PREFLIGHT),  # it carries no key
            http.get("/v1/models", headers=key | {"Origin": SITE, "x-stainless-lang": "js"}),
            http.get("/v1/models", headers={"Origin": SITE, "Host": "evil.example"}),
            http.get("/v1/models", headers={"Origin": SITE}),
        ]
        refused = [
            http.options("/v1/chat/completions", headers=PREFLIGHT | other),
            http.get("/v1/models", headers=key | other),
        ]
    assert [answer.status_code for answer in answers] == [200, 200, 421, 401]
    assert [answer.headers["access-control-allow-origin"] for answer in answers] == [SITE] * 4
    allowed = answers[0].headers["access-control-allow-headers"].lower().replace(" ", "").split(",")
    assert set(PREFLIGHT["Access-Control-Request-Headers"].split(",")) <= set(allowed)
    assert [answer.status_code for answer in refused] == [400, 200]
    assert not any("access-control-allow-origin" in answer.headers for answer in refused)
    for answer in (*answers, *refused):
        assert "access-control-allow-credentials" not in answer.headers, "cookies are no part of it"


def test_origins_are_checked() -> None:
    assert origins(["https://a.example:8443", "*"]) == ("https://a.example:8443", "*")
    assert origins(['["https://a.example", "*"]']) == ("https://a.example", "*")
    for wrong in (
        '["https://a.example/path"]',
        "[https://a.example]",
        '["https://a.example", 5]',
        '["https://a.example", https://b.example',
        '"https://a.example"',
        "a.example",
        "https://a.example/path",
        "ftp://a.example",
        "https://",
    ):
        with raises_code("bad_origin", "--cors-origin"):
            origins([wrong])


def test_a_full_queue_says_when_to_come_back(monkeypatch: pytest.MonkeyPatch) -> None:
    with asking() as (http, scheduler):

        def full(ticket: Any, **more: Any) -> None:
            raise QueueFull(7)

        monkeypatch.setattr(scheduler, "submit", full)
        for stream in (False, True):
            response = http.post("/v1/completions", json=BODY | {"stream": stream})
            assert response.status_code == 429
            assert 7 <= int(response.headers["retry-after"]) <= 11, "not all come back together"
            assert response.json()["error"]["type"] == "rate_limit_error"
        with (
            openai.OpenAI(
                base_url=f"{http.base_url}/v1",
                api_key="none",
                max_retries=0,
                http_client=httpx.Client(),
            ) as client,
            pytest.raises(openai.RateLimitError),
        ):
            client.completions.create(model="tiny", prompt="hi")


def test_of_several_choices_none_runs_when_one_finds_no_place(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with asking() as (http, scheduler):
        asked: list[tuple[Any, ...]] = []

        def full(*tickets: Any, **more: Any) -> None:
            asked.append(tickets)
            raise QueueFull(1)

        monkeypatch.setattr(scheduler, "submit", full)
        assert (
            http.post("/v1/completions", json=BODY | {"n": 3, "max_tokens": 200}).status_code == 429
        )
        assert [len(tickets) for tickets in asked] == [3], "all of them at once"
        assert all(ticket.cancelled for ticket in asked[0])


def test_clients_are_told_apart_by_key_else_by_address(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []
    for keys in ((), ("one", "two")):
        with asking(security=Security(keys=Keys.of(*keys))) as (http, scheduler):
            submit = scheduler.submit

            def noted(ticket: Any, submit: Any = submit, **more: Any) -> None:
                seen.append(ticket.client)
                submit(ticket, **more)

            monkeypatch.setattr(scheduler, "submit", noted)
            for key in ("one", "two", "one"):
                assert (
                    http.post("/v1/completions", json=BODY, headers=bearer(key)).status_code == 200
                )
    assert seen[:3] == ["127.0.0.1"] * 3, "keys that nobody asked for tell nothing"
    assert seen[3] == seen[5] != seen[4]
    assert "one" not in seen[3]


def test_internal_errors_name_no_path(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever breaks, wherever: neither this machine's folders nor the error's own words are in
    the answer."""
    served = served_pair("autoregressive", slots=1)
    secret = str(Path(__file__).resolve())
    with serving(served) as (url, scheduler), httpx.Client(base_url=url, timeout=60) as http:

        def broken(*arguments: Any, **more: Any) -> Any:
            raise RuntimeError(f"cannot read {secret}")

        def refused(*arguments: Any, **more: Any) -> Any:
            raise DraftwellError(f"the bundle {secret} is damaged")

        chat = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
        places = [
            (served, "encode", broken),
            (served, "encode_chat", broken),
            (served, "encode_chat", refused),
            (served, "decode", broken),
            (served.pair.models["target"], "forward", broken),
            (scheduler.engine, "submit", broken),
            (scheduler.engine, "submit", refused),
            (scheduler.engine, "step", broken),
            (served.strategies, "get", refused),
            (served.strategies, "get", broken),
            (scheduler, "submit", broken),
        ]
        for owner, name, fault in places:
            with monkeypatch.context() as patch:
                patch.setattr(owner, name, fault)
                answers = [
                    http.post("/v1/completions", json=BODY),
                    http.post("/v1/completions", json=BODY | {"stream": True}),
                    http.post("/v1/chat/completions", json=chat),
                ]
            assert any('"error"' in answer.text for answer in answers), name
            for answer in answers:
                assert str(Path(__file__).parent) not in answer.text
                assert "Traceback" not in answer.text
        assert http.post("/v1/completions", json=BODY).status_code == 200


def test_of_a_path_the_last_part_stays() -> None:
    assert without_paths("cannot read /srv/models/file.bin:\n gone") == "cannot read file.bin: gone"
    assert without_paths("1/2 of and/or") == "1/2 of and/or"


def test_slots_are_free_behind_all_this() -> None:
    """Many clients at once, most of them wrong: the right ones are answered and no slot is left
    taken."""
    served = served_pair("autoregressive", slots=2)
    with serving(served, security=Security(keys=Keys.of("k"))) as (url, scheduler):
        codes: list[int] = []

        def ask(number: int) -> None:
            with httpx.Client(base_url=url, timeout=60) as http:
                key = "k" if number % 3 else "wrong"
                body = BODY if number % 2 else BODY | {"max_tokens": 0}
                codes.append(
                    http.post("/v1/completions", json=body, headers=bearer(key)).status_code
                )

        threads = [threading.Thread(target=ask, args=(number,)) for number in range(24)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert {code: codes.count(code) for code in set(codes)} == {401: 8, 400: 8, 200: 8}
        wait_until(lambda: scheduler.running + scheduler.waiting == 0, "all slots are free")


def test_an_app_without_settings_is_open_and_bounded() -> None:
    app = create_app(served_pair("autoregressive", slots=1))
    assert app.state.request_timeout is None
    assert Security().body_bytes < 2**24
