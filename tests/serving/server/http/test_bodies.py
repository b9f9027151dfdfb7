"""What a body may cost: values, names and depth counted in pieces cut anywhere, before anything is
parsed; memory charged until the answer; bodies and readers that stop."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Iterable
from itertools import pairwise
from typing import Any

import httpx
import pytest
from hypothesis import given, strategies as st
from pydantic import ValidationError

from draftwell.serving.server.http import bodies as module
from draftwell.serving.server.http.bodies import (
    DEEPEST,
    MOST_MEMBERS,
    MOST_VALUES,
    TEXT_COPIES,
    VALUE_BYTES,
    Bodies,
    JsonScan,
)
from draftwell.serving.server.http.errors import APIError, Refused
from draftwell.serving.server.http.requests import ChatRequest, CompletionRequest
from draftwell.serving.server.http.responses_api import ResponsesRequest

MARKS = b',[{:"\\]}ax'


def counted_slowly(text: bytes) -> tuple[int, int, int]:
    """Values, members and the depth at the end, character by character."""
    values = members = depth = 0
    within = escaped = False
    for character in text.decode("latin-1"):
        if escaped:
            escaped = False
        elif character == "\\":
            escaped = True
        elif character == '"':
            within = not within
        elif not within:
            values += character in ",[{:"
            members += character == ":"
            depth += (character in "[{") - (character in "]}")
    return values, members, depth


def pieces(text: bytes, cuts: Iterable[int]) -> list[bytes]:
    places = [0, *sorted(cut % (len(text) + 1) for cut in cuts), len(text)]
    return [text[a:b] for a, b in pairwise(places)]


def scanned(text: bytes, cuts: Iterable[int]) -> tuple[int, int, int]:
    scan = JsonScan()
    for piece in pieces(text, cuts):
        scan.feed(piece)
    return scan.values, scan.members, scan.depth


VALUES = st.recursive(
    st.none() | st.integers() | st.text(alphabet='a",:[{\\}]é\n'),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(alphabet='b"\\:'), inner),
)


@given(value=VALUES, cuts=st.lists(st.integers(0, 2**16), max_size=8))
def test_json_is_counted_wherever_it_is_cut(value: Any, cuts: list[int]) -> None:
    text = json.dumps(value, ensure_ascii=False).encode()
    assert scanned(text, cuts) == counted_slowly(text)


@given(
    text=st.lists(st.sampled_from(MARKS), max_size=60).map(bytes),
    cuts=st.lists(st.integers(0, 2**16), max_size=8),
)
def test_what_is_no_json_is_counted_alike_until_a_backslash_outside(
    text: bytes, cuts: list[int]
) -> None:
    """JSON ends at a backslash outside of a text: what follows is never parsed."""
    outside = next(
        (i for i, c in enumerate(text) if c == ord("\\") and not inside_at(text, i)), len(text)
    )
    assert scanned(text[:outside], cuts) == counted_slowly(text[:outside])


def inside_at(text: bytes, place: int) -> bool:
    within = escaped = False
    for character in text[:place].decode("latin-1"):
        if escaped:
            escaped = False
        elif character == "\\" and within:
            escaped = True
        elif character == '"':
            within = not within
    return within


def read(app: Bodies, chunks: Iterable[bytes], client: str = "a") -> bytes:
    """What the application behind reads of a body."""
    got = b""

    async def inner(scope: Any, receive: Any, send: Any) -> None:
        nonlocal got
        while True:
            message = await receive()
            got += message.get("body", b"")
            if not message.get("more_body"):
                return

    app.app = inner
    asyncio.run(app(scope(client), source(chunks), nothing))
    return got


def scope(client: str) -> dict[str, Any]:
    return {"type": "http", "headers": [], "state": {"client": client}}


def source(chunks: Iterable[bytes]) -> Callable[[], Any]:
    parts = iter(chunks)

    async def receive() -> dict[str, Any]:
        part = next(parts, None)
        return {"type": "http.request", "body": part or b"", "more_body": part is not None}

    return receive


async def unused(scope: Any, receive: Any, send: Any) -> None:
    """An application whose place another one takes."""


async def nothing(message: Any) -> None:
    """Where an answer goes."""


@pytest.mark.parametrize(
    ("piece", "what"),
    [
        (b"[" * 1000, f"{DEEPEST} levels"),
        (b'{"":' * 1000, f"{DEEPEST} levels"),
        (b"[]," * 1000, f"{MOST_VALUES} values"),
        (b'"\\"",1,' * 1000, f"{MOST_VALUES} values"),
        (b'"":0,' * 1000, f"{MOST_MEMBERS} named"),
    ],
)
def test_64_mib_end_with_the_first_that_is_too_much(piece: bytes, what: str) -> None:
    sent = 0

    def endless() -> Iterable[bytes]:
        nonlocal sent
        while sent < 2**26:
            sent += len(piece)
            yield piece

    app = Bodies(unused, most=2**27)
    with pytest.raises(Refused) as refused:
        read(app, endless())
    assert refused.value.error.code == "body_too_complex"
    assert what in refused.value.error.message
    assert sent < 2**20
    assert app.allowance.held == 0


def test_other_encodings_hide_nothing() -> None:
    with pytest.raises(Refused) as refused:
        read(Bodies(unused), [json.dumps([[]] * 9).encode("utf-16")])
    assert refused.value.error.code == "not_utf8"


def test_a_body_is_charged_for_what_it_becomes_until_it_is_answered() -> None:
    app, held = Bodies(unused, together=10**6), []
    text = json.dumps([0] * 1000).encode()

    async def inner(scope: Any, receive: Any, send: Any) -> None:
        await receive()
        held.append(app.allowance.held)
        scope["state"]["charge"](77)
        held.append(app.allowance.held)

    app.app = inner
    asyncio.run(app(scope("a"), source([text]), nothing))
    charged = TEXT_COPIES * len(text) + VALUE_BYTES * 1000
    assert held == [charged, charged + 77]
    assert app.allowance.held == 0


def test_one_client_has_half_of_the_memory() -> None:
    app = Bodies(unused, together=1000)

    def asked(client: str, size: int) -> int | None:
        try:
            app.allowance.take(client, size)
        except APIError as error:
            return error.status
        return None

    assert [asked("a", 400), asked("a", 101)] == [None, 503]
    assert asked("b", 400) is None, "another one's half is left"
    app.allowance.take("a", -501)
    assert asked("a", 550) is None, "a request alone may have more than half"
    assert asked("c", 1001) == 400, "what never fits is not asked for again"


def test_a_body_that_does_not_come_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "BODY_SECONDS", 0.05)
    app = Bodies(unused)

    async def inner(scope: Any, receive: Any, send: Any) -> None:
        while True:
            await receive()

    async def slowly() -> dict[str, Any]:
        await asyncio.sleep(0.02)
        return {"type": "http.request", "body": b" ", "more_body": True}

    app.app = inner
    with pytest.raises(Refused) as refused:
        asyncio.run(asyncio.wait_for(app(scope("a"), slowly, nothing), 20))
    assert (refused.value.error.status, refused.value.error.code) == (408, "body_too_slow")


def test_a_client_that_reads_nothing_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "STALL_SECONDS", 0.05)

    async def inner(scope: Any, receive: Any, send: Any) -> None:
        await receive()
        await send({"type": "http.response.start", "status": 200, "headers": []})

    async def stuck(message: Any) -> None:
        await asyncio.Event().wait()

    app, ended = Bodies(inner), time.monotonic() + 20
    asyncio.run(asyncio.wait_for(app(scope("a"), source([b"{}"]), stuck), 20))
    assert time.monotonic() < ended
    assert app.allowance.held == 0


def test_what_is_ignored_is_not_kept() -> None:
    body = {"model": "tiny", "prompt": "a", "user": "x" * 1000, "metadata": {"a": "b"}}
    read_body = CompletionRequest.model_validate(body)
    assert read_body.__pydantic_extra__ == {}
    assert "user" not in body
    kept = ResponsesRequest.model_validate({"model": "tiny", "input": "a", "metadata": {"a": "b"}})
    assert kept.metadata == {"a": "b"}


@pytest.mark.parametrize(
    "fields",
    [
        {"logit_bias": {f"-{i}": "a" for i in range(9000)}},
        {"speculation": {"parameters": {str(i): [] for i in range(9000)}}},
    ],
)
def test_what_is_too_large_is_one_error(fields: dict[str, Any]) -> None:
    with pytest.raises(ValidationError) as refused:
        CompletionRequest.model_validate({"model": "tiny", "prompt": "a"} | fields)
    assert refused.value.error_count() == 1


@pytest.mark.parametrize("whole", [True, False])
def test_arguments_are_json_again_and_bounded_together(whole: bool) -> None:
    parts = 1 if whole else 8
    items = MOST_VALUES // 2 // parts
    arguments = json.dumps({"a": [[]] * items}, separators=(",", ":"))
    call = {"type": "function", "function": {"name": "f", "arguments": arguments}}
    turn = {"role": "assistant", "content": "", "tool_calls": [call]}
    with pytest.raises(ValidationError, match="too_complex"):
        ChatRequest.model_validate({"model": "tiny", "messages": [turn] * parts})
    item = {"type": "function_call", "call_id": "1", "name": "f", "arguments": arguments}
    with pytest.raises(ValidationError, match="too_complex"):
        ResponsesRequest.model_validate({"model": "tiny", "input": [item] * parts})


def test_a_body_with_too_much_in_it_is_a_clients_error(http: httpx.Client) -> None:
    answer = http.post(
        "/v1/completions",
        content=b"[" * 5000,
        headers={"Content-Type": "application/json"},
    )
    assert answer.status_code == 400
    assert answer.json()["error"]["code"] == "body_too_complex"
