"""What a body may cost: values, names and depth counted in pieces cut anywhere, before anything is
parsed; memory charged until the answer; bodies and readers that stop."""

from __future__ import annotations

import asyncio
import gzip
import json
import time
import zlib
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
    MOST_BODY_BYTES,
    MOST_MEMBERS,
    MOST_VALUES,
    PIECE,
    TEXT_COPIES,
    VALUE_BYTES,
    Bodies,
    JsonScan,
    Unpacked,
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


def read(app: Bodies, chunks: Iterable[bytes], client: str = "a", encoding: str = "") -> bytes:
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
    asyncio.run(app(scope(client, encoding), source(chunks), nothing))
    return got


def scope(client: str, encoding: str = "") -> dict[str, Any]:
    headers = [(b"content-encoding", encoding.encode())]
    return {"type": "http", "headers": headers, "state": {"client": client}}


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


def packed(body: bytes, how: str) -> bytes:
    if how in ("gzip", "x-gzip"):
        return gzip.compress(body, mtime=0)
    if how == "raw deflate":
        packer = zlib.compressobj(wbits=-zlib.MAX_WBITS)
        return packer.compress(body) + packer.flush()
    return zlib.compress(body)


def unpacked(data: bytes, cuts: Iterable[int], encoding: str) -> bytes:
    content, parts = Unpacked(encoding), pieces(data, cuts)
    return b"".join(
        piece
        for number, part in enumerate(parts)
        for piece in content.pieces(part, last=number == len(parts) - 1)
    )


@given(
    text=st.binary(max_size=200).map(lambda some: some * 999),
    cuts=st.lists(st.integers(0, 2**12), max_size=6),
    how=st.sampled_from(["gzip", "deflate", "raw deflate"]),
)
def test_a_packed_body_is_read_wherever_it_is_cut(text: bytes, cuts: list[int], how: str) -> None:
    assert unpacked(packed(text, how), cuts, how.removeprefix("raw ")) == text


@pytest.mark.parametrize("encoding", ["gzip", "deflate"])
@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda data: b"{" + data, "is not|continues"),
        (lambda data: data[:-3], "ends within"),
        (lambda data: data[:5], "ends within"),
        (lambda data: data + b"{}", "continues"),
        (lambda data: data + data, "continues"),
        (
            lambda data: data[:12] + b"\xff" * 9 + data[12:],
            r"^the body is not \w+, which its header Content-Encoding names$",
        ),
    ],
)
def test_a_packed_body_that_is_not_whole_is_refused(
    encoding: str, spoil: Callable[[bytes], bytes], words: str
) -> None:
    data = spoil(packed(json.dumps(list(range(999))).encode(), encoding))
    for cuts in ([], [3], range(0, len(data), 7)):
        with pytest.raises(APIError, match=words) as refused:
            unpacked(data, cuts, encoding)
        assert (refused.value.status, refused.value.code) == (400, "wrong_encoding")


@pytest.mark.parametrize(
    ("text", "code"),
    [
        (b" " * 2**24, "request_too_large"),
        (b"[" * 2**24, "body_too_complex"),
        (b"[]," * 2**22, "body_too_complex"),
        (b'"":0,' * 2**22, "body_too_complex"),
    ],
    ids=["long", "deep", "many values", "many names"],
)
def test_a_small_body_that_unpacks_to_16_mib_ends_as_a_large_one_does(
    text: bytes, code: str
) -> None:
    """Without holding what is too much, however it is sent."""
    data = gzip.compress(text, 9)
    assert len(data) < 2**17
    for parts in ([data], pieces(data, range(0, len(data), 4096))):
        app = Bodies(unused)
        held = noted(app)
        with pytest.raises(Refused) as refused:
            read(app, parts, encoding="gzip")
        assert refused.value.error.code == code
        assert max(held) < MOST_BODY_BYTES + VALUE_BYTES * (MOST_VALUES + PIECE)
        assert app.allowance.held == 0


def noted(app: Bodies) -> list[int]:
    """What its requests hold, whenever it changes."""
    held: list[int] = [0]
    take = app.allowance.take

    def noting(client: str, size: int, own: int = 0) -> None:
        take(client, size, own)
        held.append(app.allowance.held)

    app.allowance.take = noting  # type: ignore[method-assign]
    return held


def test_packed_bytes_that_hold_nothing_are_bounded_too() -> None:
    nothing_stored = b"\0\0\0\xff\xff" * 99  # blocks of no bytes, without an end
    sent = 0

    def endless() -> Iterable[bytes]:
        nonlocal sent
        while sent < 2**20:
            sent += len(nothing_stored)
            yield nothing_stored

    with pytest.raises(Refused) as refused:
        read(Bodies(unused, most=10_000), endless(), encoding="deflate")
    assert (refused.value.error.status, sent < 20_000) == (413, True)


@pytest.mark.parametrize(
    ("body", "byte", "place"),
    [
        ('{"a": "Grüße"}'.encode("latin-1"), 0xFC, 9),
        ('{"a": "café"}'.encode("cp1252"), 0xE9, 10),
        ('{"a": "naïve “x”"}'.encode("cp1252"), 0xEF, 9),
        ('{"a": "x"}'.encode("utf-16"), 0xFF, 0),
        ('{"a": "x"}'.encode("utf-16-le"), 0, 1),
        ('{"a": "x"}'.encode("utf-16-be"), 0, 0),
        ('{"a": "x"}'.encode("utf-32"), 0xFF, 0),
        ('{"a": "日本"}'.encode("shift_jis"), 0x93, 7),
        ('{"a": "日本"}'.encode("gbk"), 0xC8, 7),
        ('{"é": "'.encode() + b'\xe2\x82"}', 0xE2, 8),
        (b'{"a": "\xed\xa0\x80"}', 0xED, 7),
        (b'{"a": "\xc0\xaf"}', 0xC0, 7),
        (b" " * 70_000 + b"\xfc", 0xFC, 70_000),
    ],
)
def test_the_first_byte_that_is_no_utf_8_is_named(body: bytes, byte: int, place: int) -> None:
    for cuts in ([], [place], [place + 1], range(0, min(len(body), 20))):
        with pytest.raises(APIError) as refused:
            scanned(body, cuts)
        assert (refused.value.status, refused.value.code) == (400, "not_utf8")
        assert f"byte {byte:#04x} at position {place} " in refused.value.message
        assert "UTF-8" in refused.value.message


CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "Grüße"}], "max_tokens": 2}
SENT = json.dumps(CHAT, ensure_ascii=False).encode()
JSON = {"Content-Type": "application/json"}


@pytest.mark.parametrize(
    ("body", "headers", "status", "words"),
    [
        (packed(SENT, "gzip"), {"Content-Encoding": "gzip"}, 200, ""),
        (packed(SENT, "gzip"), {"Content-Encoding": "X-GZIP"}, 200, ""),
        (packed(SENT, "deflate"), {"Content-Encoding": "deflate"}, 200, ""),
        (packed(SENT, "raw deflate"), {"Content-Encoding": "deflate"}, 200, ""),
        (SENT, {"Content-Encoding": "identity"}, 200, ""),
        (b"x", {"Content-Encoding": "zstd"}, 415, "Content-Encoding: zstd"),
        (b"x", {"Content-Encoding": "br"}, 415, "gzip or deflate"),
        (b"x", {"Content-Encoding": "gzip, gzip"}, 415, "gzip, gzip"),
        (SENT, {"Content-Encoding": "gzip"}, 400, "not gzip"),
        (b"\xef\xbb\xbf" + SENT, {}, 200, ""),
        (SENT, {"Content-Type": "application/json; charset=utf-8"}, 200, ""),
        (SENT, {"Content-Type": "application/vnd.api+json"}, 200, ""),
        (SENT.decode().encode("latin-1"), {}, 400, "byte 0xfc at position 62 "),
        (SENT, {"Content-Type": "text/plain"}, 415, "application/json, not text/plain"),
        (SENT, {"Content-Type": ""}, 415, "application/json"),
        (b"", {}, 400, "the body is empty"),
        (b"null", {}, 400, "or null"),
        (b"[]", {}, 400, "must be a JSON object, not an array"),
        (b'"x"', {}, 400, "must be a JSON object, not a string"),
        (b"5", {}, 400, "must be a JSON object, not a number"),
        (SENT[:-1] + b",}", {}, 400, "line 1 column"),
        (b'{\n "a": 1,\n "b" 2}', {}, 400, "line 3 column 6"),
        (SENT[:30], {}, 400, "the body is not JSON"),
        (b'{"model":"x\xc3', {}, 400, "byte 0xc3 at position 11 "),
        (SENT + b"\xe2\x82", {}, 400, f"byte 0xe2 at position {len(SENT)} "),
        (SENT + SENT, {}, 400, "Extra data"),
        (b"{'model': 1}", {}, 400, "column 2"),
        (SENT[:-1] + b',"seed":' + b"9" * 5000 + b"}", {}, 400, f"position {len(SENT) + 7} "),
        (
            b'{"a":"' + b"9" * 5000 + b'\\"' + b'","b":[-' + b"1" * 4301 + b"]}",
            {},
            400,
            "position 5016 ",
        ),
        (SENT[:-1] + b',"max_tokens":3}', {}, 400, "'max_tokens' more than once"),
        (SENT[:-1] + b',"top_p":NaN}', {}, 400, "'top_p'"),
        (SENT[:-1] + b',"top_p":-Infinity}', {}, 400, "'top_p'"),
        (SENT[:-1] + b',"top_p":1e999}', {}, 400, "'top_p'"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_what_clients_make_of_a_body(
    http: httpx.Client, body: bytes, headers: dict[str, str], status: int, words: str
) -> None:
    answer = http.post("/v1/chat/completions", content=body, headers=JSON | headers)
    assert answer.status_code == status, answer.text
    if status != 200:
        error = answer.json()["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert words in error["message"]
    assert (answer.headers.get("accept-encoding") == "gzip, deflate") == (
        headers.get("Content-Encoding") in ("zstd", "br", "gzip, gzip")
    )


def test_a_repeated_field_is_named(http: httpx.Client) -> None:
    body = b'{"model": "tiny", "prompt": "a", "logit_bias": {"5": 1, "5": 2}}'
    for path in ("/v1/completions", "/tokenize"):
        error = http.post(path, content=body, headers=JSON).json()["error"]
        assert (error["param"], error["code"]) == ("5", "repeated_field")


def test_a_packed_body_is_answered_as_its_content_is(http: httpx.Client) -> None:
    """In pieces, too, and without holding up the next request of the connection."""
    asked = CHAT | {"temperature": 0, "max_tokens": 8}
    data = gzip.compress(json.dumps(asked).encode(), mtime=0)

    def slowly() -> Iterable[bytes]:
        for place in range(0, len(data), 11):
            yield data[place : place + 11]

    plain = http.post("/v1/chat/completions", json=asked)
    packed_headers = JSON | {"Content-Encoding": "gzip"}
    answer = http.post("/v1/chat/completions", content=slowly(), headers=packed_headers)
    assert answer.json()["choices"] == plain.json()["choices"]
