"""What goes wrong at an address is one line with a code and what to do; no line shows a key."""

from __future__ import annotations

import socket
import ssl
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from draftwell.components.engines.port import EngineSettings
from draftwell.components.engines.remote.address import (
    KEY_VARIABLE,
    EngineAddress,
    parse_address,
)
from draftwell.components.engines.remote.client import EngineClient
from draftwell.components.engines.remote.remote import RemoteEngine
from draftwell.serving.runtime.requests import Sampling
from tests.components.engines.remote.conftest import EngineAt
from tests.support.engines.server import EngineServer, serving
from tests.support.engines.simulated import SimulatedEngine
from tests.support.errors import raises_code

KEY = "sk-very-secret-4711"
SAMPLING = Sampling(max_tokens=12)
PROMPT = [[5, 9, 3]]


@pytest.fixture
def closed() -> Iterator[str]:
    """A URL at which nothing listens."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        yield f"http://127.0.0.1:{taken.getsockname()[1]}"


def test_nobody_listens(engine_at: EngineAt, closed: str) -> None:
    with raises_code("engine_unreachable", closed, "start the engine"):
        engine_at(closed)


@pytest.mark.parametrize(
    ("mishap", "code", "named"),
    [
        ("html", "not_an_engine", "without /v1"),
        ("gateway", "engine_unavailable", "502 Bad Gateway"),
        ("redirect", "engine_redirect", "https://elsewhere.example/"),
        ("gone", "engine_unreachable", "without an answer"),
    ],
)
def test_something_else_answers(engine_at: EngineAt, mishap: str, code: str, named: str) -> None:
    with (
        serving(EngineServer(SimulatedEngine(), mishap=mishap)) as url,
        raises_code(code, url, named) as caught,
    ):
        engine_at(url)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("mishap", "code", "named"),
    [
        ("html", "engine_bad_answer", "Welcome It works"),
        ("gateway", "engine_unavailable", "502"),
        ("die", "engine_broke_off", "in the middle"),
        ("silent", "engine_broke_off", "without saying why"),
        ("abort", "engine_broke_off", "(abort)"),
        ("short", "engine_fewer_tokens", "of 12"),
        ("more", "engine_bad_answer", "13 tokens where 12"),
        ("too long", "context_too_long", "64 tokens"),
        ("redirect", "engine_redirect", "elsewhere"),
    ],
)
def test_an_answer_goes_wrong(engine_at: EngineAt, mishap: str, code: str, named: str) -> None:
    plays = EngineServer(SimulatedEngine())
    with serving(plays) as url:
        engine = engine_at(url)
        engine.dialect.counters(engine.client)
        decode = partial(engine.dialect.decode_one, engine.client, PROMPT[0], SAMPLING)
        decode()
        plays.mishap = mishap
        with raises_code(code, url, named):
            decode()
        plays.mishap = ""
        assert len(decode().tokens) == SAMPLING.max_tokens  # the connections are not spoilt


def test_one_that_hangs_is_given_up(engine_at: EngineAt) -> None:
    plays = EngineServer(SimulatedEngine(), mishap="hang")
    with serving(plays) as url:
        engine = engine_at(url, connect=partial(EngineClient, answer_seconds=0.3))
        with raises_code("engine_timeout", url, "0.3 s"):
            engine.decode(PROMPT, SAMPLING)


def test_one_that_never_ends_is_given_up(engine_at: EngineAt) -> None:
    """Every piece comes in time, the answer does not."""
    slow = SimulatedEngine(accepts=(), step_seconds=0.0)
    plays = EngineServer(slow)
    with serving(plays) as url:
        engine = engine_at(url, connect=partial(EngineClient, answer_seconds=0.2))
        with raises_code("engine_timeout", url):
            engine.decode(PROMPT, Sampling(max_tokens=2000))


@pytest.mark.parametrize(
    ("pieces", "code", "named"),
    [(40, "engine_timeout", "within 0.3 s"), (0, "engine_bad_answer", "more than 1 MiB")],
)
def test_a_line_without_an_end_is_given_up(
    monkeypatch: pytest.MonkeyPatch, pieces: int, code: str, named: str
) -> None:
    """Time and size are those of the pieces that come."""
    monkeypatch.setattr("draftwell.components.engines.remote.client.MOST_BYTES", 1 << 20)
    plays = EngineServer(SimulatedEngine(), mishap="one line")
    plays.pieces = pieces
    with serving(plays) as url:
        client = EngineClient(EngineAddress(url), question_seconds=0.3 if pieces else 20)
        with raises_code(code, url, named):
            client.find_text("/metrics")
        client.close()
    assert plays.pieces < 40


def test_keys(engine_at: EngineAt, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "key"
    file.write_text(f"{KEY}\n")
    with serving(EngineServer(SimulatedEngine(), "llama.cpp", key=KEY)) as url:
        with raises_code("engine_key", url, "wants a key", KEY_VARIABLE):
            engine_at(url)
        monkeypatch.setenv(KEY_VARIABLE, "sk-wrong")
        with raises_code("engine_key", "refuses the key") as caught:
            engine_at(url)
        assert "sk-wrong" not in str(caught.value)
        address = parse_address(url, key_file=file, headers=["X-Team: search-4712"])
        assert KEY not in repr(address)
        assert "4712" not in repr(address)
        engine = RemoteEngine("engine", address)
        engine.start(EngineSettings())
        assert len(engine.decode(PROMPT, SAMPLING).answers[0].tokens) == SAMPLING.max_tokens
        engine.stop()


def test_an_unknown_model_and_several(engine_at: EngineAt) -> None:
    with serving(EngineServer(SimulatedEngine(), models=("one", "two"))) as url:
        with raises_code("engine_model", "one, two", "--set engine_model="):
            engine_at(url)
        address = parse_address(url, model="three")
        with raises_code("engine_model", "three", "one, two"):
            RemoteEngine("engine", address).start(EngineSettings())


def test_a_busy_engine_is_asked_again_within_a_bound(engine_at: EngineAt) -> None:
    waits: list[float] = []
    plays = EngineServer(SimulatedEngine(), busy=2)
    with serving(plays) as url:
        connect = partial(EngineClient, sleep=waits.append, wait_seconds=10)
        engine = engine_at(url, connect=connect)
        assert len(engine.decode(PROMPT, SAMPLING).answers[0].tokens) == SAMPLING.max_tokens
        assert waits == [3, 3]  # Retry-After
        plays.busy = 9
        with raises_code("engine_busy", url, "9 s"):
            engine.decode(PROMPT, SAMPLING)
        plays.busy, plays.retry_after = 99, "0"
        with raises_code("engine_busy", url):
            engine.decode(PROMPT, SAMPLING)
        assert len(waits) < 30


def test_tls(engine_at: EngineAt, tmp_path: Path, certificate: tuple[Path, Path]) -> None:
    with serving(EngineServer(SimulatedEngine())) as url, raises_code("engine_tls", "http instead"):
        engine_at(url.replace("http", "https"))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*certificate)
    with serving(EngineServer(SimulatedEngine()), tls=context) as url:
        with raises_code("engine_tls", "--set engine_ca="):
            engine_at(url)
        with raises_code("engine_unreachable", "https instead"):
            engine_at(url.replace("https", "http"))
        engine = RemoteEngine("engine", parse_address(url, ca=certificate[0]))
        engine.start(EngineSettings())
        assert engine.decode(PROMPT, SAMPLING).tokens == SAMPLING.max_tokens
        engine.stop()
    empty = tmp_path / "empty.pem"
    empty.write_text("nothing")
    with raises_code("bad_engine_address", "empty.pem"):
        EngineClient(EngineAddress(url, ca=empty))


def test_a_kept_connection_that_was_closed_is_opened_again(engine_at: EngineAt) -> None:
    """Servers end a connection after a number of requests, or after a while."""
    listener = socket.create_server(("127.0.0.1", 0))
    answer = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 2\r\n\r\n{}"
    taken: list[int] = []

    def one_answer_each() -> None:
        for number in range(3):
            connection, _ = listener.accept()
            with connection:
                connection.recv(4096)
                connection.sendall(answer)
                taken.append(number)

    thread = threading.Thread(target=one_answer_each, daemon=True)
    thread.start()
    client = EngineClient(EngineAddress(f"http://127.0.0.1:{listener.getsockname()[1]}"))
    assert [client.find("/version") for _ in range(3)] == [{}, {}, {}]
    client.close()
    thread.join(10)
    listener.close()
    assert taken == [0, 1, 2]


@pytest.mark.parametrize(
    ("url", "more", "named"),
    [
        ("ftp://host", {}, "http://HOST:PORT"),
        ("http://", {}, "http://HOST:PORT"),
        ("http://host:port", {}, "not a URL"),
        ("http://me:4711@host", {}, KEY_VARIABLE),
        ("http://host?key=4711", {}, "leave out"),
        ("http://host", {"headers": ["4711"]}, "NAME:VALUE"),
        ("http://host", {"key_file": Path("/nowhere/key")}, "/nowhere/key"),
        ("http://host", {"ca": Path("/nowhere/ca.pem")}, "/nowhere/ca.pem"),
    ],
)
def test_addresses_that_are_none(url: str, more: dict[str, Any], named: str) -> None:
    with raises_code("bad_engine_address", named) as caught:
        parse_address(url, **more)
    assert "4711" not in str(caught.value)


def test_addresses_are_written_in_one_way() -> None:
    told = parse_address("http://host", headers=["X-Key: 4711\n"])
    assert told.headers == (("X-Key", "4711"),)
    for url in (
        "http://host:8000",
        "http://host:8000/",
        "http://host:8000/v1",
        " http://host:8000/v1/ ",
    ):
        assert parse_address(url).url == "http://host:8000"
    assert parse_address("https://host/llm/v1").url == "https://host/llm"
    assert parse_address("http://[::1]:80").url == "http://[::1]:80"


def test_a_way_to_speculate_needs_a_launcher(closed: str) -> None:
    engine = RemoteEngine("engine", parse_address(closed))
    with raises_code("engine_option", closed, "launcher"):
        engine.start(EngineSettings(speculation={"method": "ngram"}))
    with raises_code("engine_not_started"):
        engine.decode(PROMPT, SAMPLING)
