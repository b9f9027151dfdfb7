"""Addresses as clients, proxies and probes write them: slashes, prefixes, methods, and the forms of
HTTP that its usual clients do not send."""

from __future__ import annotations

import json
import re
import socket
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from fastapi.testclient import TestClient

from draftwell.serving.bundle.card import CARD_JSON, CARD_PAGE
from draftwell.serving.server.app import create_app
from draftwell.serving.server.http.addresses import LONGEST_GUESSED, meant
from draftwell.serving.server.http.keys import Keys
from draftwell.serving.server.http.security import Security, hosts_of
from draftwell.serving.server.model.served_model import ServedModel
from tests.support.errors import raises_code
from tests.support.server.served_pair import TunedModel, served_pair, serving

CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
BODY = json.dumps(CHAT).encode()
READ = ["/", "/health", "/ready", "/version", "/metrics", "/metrics/grafana.json"]
READ += ["/v1/models", "/v1/models/tiny", "/v1/speculation", "/page/app.js", "/openapi.json"]
READ += ["/card", "/card.json"]
WRITTEN: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": CHAT,
    "/v1/completions": {"model": "tiny", "prompt": "hi", "max_tokens": 2},
    "/v1/responses": {"model": "tiny", "input": "hi", "max_output_tokens": 2},
    "/tokenize": {"prompt": "hi"},
    "/detokenize": {"tokens": [5]},
}
ANTHROPIC = {
    "/v1/messages": CHAT,
    "/v1/messages/count_tokens": {key: CHAT[key] for key in ("model", "messages")},
}
"""Their errors have another shape."""


@pytest.fixture(scope="module")
def served() -> ServedModel:
    made = served_pair("autoregressive", slots=1)
    made.card = {CARD_PAGE: b"<p>a card</p>", CARD_JSON: b"{}"}
    return made


@pytest.fixture(scope="module")
def keyed(served: ServedModel) -> Iterator[httpx.Client]:
    security = Security(keys=Keys.of("k"), cors_origins=("https://a.example",), root="/llm")
    with (
        serving(served, security=security) as (url, _),
        httpx.Client(base_url=url, timeout=60) as http,
    ):
        yield http


def get(http: httpx.Client, path: str, method: str = "GET", **headers: str) -> httpx.Response:
    """The path is sent as it is written."""
    return http.request(method, f"{str(http.base_url).rstrip('/')}{path}", headers=headers)


@pytest.mark.parametrize("path", READ)
def test_a_slash_too_many_changes_nothing(http: httpx.Client, path: str) -> None:
    # the time of a health report or of a metric may differ
    right = get(http, path)
    assert right.status_code == 200
    for wrong in (f"{path}/", f"/{path}", f"{path}//", path.replace("/", "//")):
        found = get(http, wrong)
        assert (found.status_code, found.headers["content-type"]) == (
            200,
            right.headers["content-type"],
        ), wrong
        assert len(found.history) == 0
        if not path.startswith("/metrics"):
            assert found.text == right.text, wrong


@pytest.mark.parametrize("path", [*WRITTEN, *ANTHROPIC])
def test_no_body_is_sent_twice_for_a_slash(http: httpx.Client, path: str) -> None:
    """A redirect may lose the key, and clients that follow none get an empty answer."""
    for wrong in (f"{path}/", f"/{path}", f"{path}//"):
        answer = http.post(
            f"{str(http.base_url).rstrip('/')}{wrong}", json=(WRITTEN | ANTHROPIC)[path]
        )
        assert answer.status_code == 200, (wrong, answer.text)


@pytest.mark.parametrize(
    ("path", "right"),
    [
        ("/models", "/v1/models"),
        ("/models/tiny", "/v1/models/tiny"),
        ("/chat/completions", "/v1/chat/completions"),
        ("/v1/v1/chat/completions", "/v1/chat/completions"),
        ("/v1/v1/models/", "/v1/models"),
        ("/openai/v1/responses", "/v1/responses"),
        ("/v1/health", "/health"),
        ("/v1/tokenize", "/tokenize"),
        ("/v1/metrics", "/metrics"),
        ("/v1/embeddings", None),
        ("/v1", None),
        ("/nothing", None),
    ],
)
def test_the_404_of_a_wrong_address_names_the_right_one(
    http: httpx.Client, path: str, right: str | None
) -> None:
    for method in ("GET", "POST", "HEAD", "OPTIONS", "DELETE"):
        answer = get(http, path, method)
        assert answer.status_code == 404, (method, path)
        if method != "HEAD":
            error = answer.json()["error"]
            assert error["code"] == "not_found"
            mend = f"did you mean {right}?" if right else "GET /openapi.json lists all"
            assert error["message"].endswith(mend)


def test_no_work_is_done_for_a_long_wrong_address() -> None:
    class Unread:
        def matches(self, scope: Any) -> Any:
            raise AssertionError("it is compared with a route")

    path = "/a" * LONGEST_GUESSED
    assert meant({"path": path}, [Unread()]) is None  # type: ignore[list-item]


@pytest.mark.parametrize("path", READ)
def test_probes_ask_by_head_and_options(http: httpx.Client, path: str) -> None:
    right, head = get(http, path), get(http, path, "HEAD")
    assert (head.status_code, head.content) == (200, b"")
    assert head.headers["content-type"] == right.headers["content-type"]
    options = get(http, path, "OPTIONS")
    # OpenAPI's own route knows HEAD by itself
    assert (options.status_code, options.content) == (204, b"")
    assert {"GET", "HEAD"} <= set(options.headers["allow"].split(", "))


@pytest.mark.parametrize("path", WRITTEN)
@pytest.mark.parametrize("method", ["GET", "PUT", "PATCH", "DELETE", "TRACE", "HEAD", "OPTIONS"])
def test_other_methods_are_a_405_that_names_the_right_one(
    http: httpx.Client, path: str, method: str
) -> None:
    answer = get(http, path, method)
    assert answer.status_code == (204 if method == "OPTIONS" else 405)
    assert answer.headers["allow"] == "POST, OPTIONS"
    if method not in ("HEAD", "OPTIONS"):
        error = answer.json()["error"]
        assert (error["code"], error["type"]) == ("method_not_allowed", "invalid_request_error")
        assert error["message"].endswith("send POST")


def test_a_head_request_leaves_the_connection_usable(http: httpx.Client) -> None:
    host, port = http.base_url.host, http.base_url.port
    head = b"HEAD /v1/models HTTP/1.1\r\nHost: localhost\r\n\r\n"
    last = b"GET /ready HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
    answers = exchange(host, port, head + last)
    assert answers.count(b"HTTP/1.1 200") == 2
    assert answers.endswith(b'{"ready":true}')
    assert b'"list"' not in answers


def exchange(host: str, port: int | None, sent: bytes) -> bytes:
    """All that comes until the server closes the connection."""
    with socket.create_connection((host, port or 80), timeout=60) as connection:
        connection.sendall(sent)
        return b"".join(iter(lambda: connection.recv(65_536), b""))


def request(line: str, *headers: str, body: bytes = b"") -> bytes:
    length = [f"Content-Length: {len(body)}"] if body else []
    lines = [line, "Host: localhost", "Content-Type: application/json", *headers, *length]
    return "\r\n".join([*lines, "", ""]).encode() + body


POST = "POST /v1/chat/completions HTTP"
CHUNKED = b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in (BODY[:9], BODY[9:]))


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (b"GET /ready HTTP/1.0\r\n\r\n", 200),
        (b"OPTIONS / HTTP/1.0\r\n\r\n", 204),
        (request("OPTIONS * HTTP/1.1", "Connection: close"), 204),
        (request(f"{POST}/1.0", body=BODY), 200),
        (request(f"{POST}/1.1", "Connection: close", body=BODY), 200),
        (
            request(f"{POST}/1.1", "Expect: 100-continue", "Connection: close", body=BODY),
            200,
        ),
        (
            request(f"{POST}/1.1", "Transfer-Encoding: chunked", "Connection: close")
            + CHUNKED
            + b"0\r\n\r\n",
            200,
        ),
        (request("GET /v1%2Fmodels HTTP/1.1", "Connection: close"), 200),
        (request("GET /%76%31/models HTTP/1.1", "Connection: close"), 200),
        (request("GET http://localhost/v1/models/ HTTP/1.1", "Connection: close"), 200),
        (request("GET HTTPS://localhost:8000/ready HTTP/1.1", "Connection: close"), 200),
        (request("GET http://localhost HTTP/1.1", "Connection: close"), 200),
        (request("POST http://localhost/v1/chat/completions HTTP/1.0", body=BODY), 200),
        (
            request("GET /v1/models HTTP/1.1", "Connection: Upgrade, close", "Upgrade: h2c"),
            200,
        ),
        (request("GET /ready HTTP/1.1", "Content-Encoding: br", "Connection: close"), 415),
    ],
    ids=lambda value: str(value)[:60],
)
def test_other_forms_of_http(http: httpx.Client, sent: bytes, status: int) -> None:
    answer = exchange(http.base_url.host, http.base_url.port, sent)
    assert answer.removeprefix(b"HTTP/1.1 100 Continue\r\n\r\n").startswith(
        b"HTTP/1.1 %d " % status
    ), answer
    assert (b"100 Continue" in answer) == (b"100-continue" in sent)


def test_the_host_of_an_absolute_address_is_the_one_that_counts(served: ServedModel) -> None:
    security = Security(hosts=hosts_of("127.0.0.1", [], keys=False))
    with serving(served, security=security) as (url, _):
        host, _, port = url.removeprefix("http://").partition(":")
        for name, status in (("localhost", 200), ("evil.example", 421)):
            line = f"GET http://{name}/v1/models HTTP/1.1"
            answer = exchange(host, int(port), request(line, "Connection: close"))
            assert answer.startswith(b"HTTP/1.1 %d " % status)


@pytest.mark.parametrize("prefix", ["/llm", "", "//llm/", "/llm//"])
def test_behind_a_prefix_that_the_proxy_leaves_in_or_takes_out(
    keyed: httpx.Client, prefix: str
) -> None:
    key = {"Authorization": "Bearer k"}
    assert get(keyed, f"{prefix}/v1/models").status_code == 401
    assert get(keyed, f"{prefix}/v1/models", **key).json()["data"][0]["id"] == "tiny"
    assert get(keyed, f"{prefix}/health").status_code == 200, "probes need no key"
    assert get(keyed, f"{prefix}/metrics").status_code == 401
    assert get(keyed, f"{prefix}/openapi.json", **key).json()["servers"] == [{"url": "/llm"}]
    wrong = get(keyed, f"{prefix}/models", **key).json()["error"]["message"]
    assert wrong.endswith("did you mean /llm/v1/models?")
    for page in (f"{prefix}", f"{prefix}/"):
        names = re.findall(r'(?:src|href)="([^"]+)"', get(keyed, page).text)
        assert len(names) == 6
        assert all(name.startswith("/llm/") for name in names)
        for name in names:
            assert get(keyed, name.removeprefix("/llm"), **key).status_code == 200, name
    assert get(keyed, "/llmx/v1/models", **key).status_code == 404


@pytest.mark.parametrize(
    "root",
    ["/v1", "/page", "/card", "/health", "/metrics", "/v1/chat", "/v1/models/tiny", "/tokenize"],
)
def test_a_prefix_of_own_addresses_is_refused(served: ServedModel, root: str) -> None:
    with raises_code("bad_root_path", root):
        create_app(served, security=Security(root=root))


def test_metrics_need_their_own_scope_however_their_address_is_written(
    served: ServedModel,
) -> None:
    from draftwell.serving.server.http.keys import ANSWERS, Access

    security = Security(keys=Keys(Access(b"k", frozenset({ANSWERS}))), root="/llm")
    with (
        serving(served, security=security) as (url, _),
        httpx.Client(base_url=url, timeout=60) as http,
    ):
        for path in ("/metrics", "//metrics", "/metrics/", "/llm/metrics", "/llm//metrics//"):
            for method in ("GET", "HEAD"):
                answer = get(http, path, method, Authorization="Bearer k")
                assert answer.status_code == 403, (method, path)


def test_a_preflight_needs_no_key_under_any_spelling(keyed: httpx.Client) -> None:
    asked = {
        "Origin": "https://a.example",
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "authorization,content-type",
    }
    for path in ("/v1/chat/completions", "/v1/chat/completions/", "/llm/v1/chat/completions"):
        answer = get(keyed, path, "OPTIONS", **asked)
        assert answer.status_code == 200
        assert answer.headers["access-control-allow-origin"] == "https://a.example"


def test_a_models_name_may_hold_slashes() -> None:
    pair = served_pair("autoregressive", slots=1)
    model = TunedModel("org/model-7b", pair.pair, pair.strategy, 1)
    with TestClient(create_app(model)) as client:
        for path in ("org/model-7b", "org%2Fmodel-7b", "org/model-7b/", "org//model-7b"):
            assert client.get(f"/v1/models/{path}").json()["id"] == "org/model-7b", path
        missing = client.get("/v1/models/other/model")
        assert missing.status_code == 404
        assert "'org/model-7b'" in missing.json()["error"]["message"]


def test_proxies_on_this_machine_tell_whose_request_it_is(
    http: httpx.Client, caplog: pytest.LogCaptureFixture
) -> None:
    from tests.support.server.server_process import wait_until

    with caplog.at_level("INFO", "draftwell.serving.server.http.security"):
        get(http, "/version", **{"X-Forwarded-For": "203.0.113.9", "x-request-id": "proxied"})

        def lines() -> list[str]:
            return [line for line in caplog.messages if line.endswith("request proxied")]

        wait_until(lambda: bool(lines()), "the line of the log", 30)
    assert "client 203.0.113.9," in lines()[0]
