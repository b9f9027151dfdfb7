"""A server's stream that ends anywhere, or holds anything: a request of the load test is answered
or has failed, and no thread of it dies."""

from __future__ import annotations

import io
import json
from http.client import HTTPResponse
from types import SimpleNamespace
from typing import Any

from hypothesis import given, strategies as st

from draftwell.components.bench.servers.closed_loop import Answer, _try
from draftwell.components.prompts.prompt import Prompt

PROMPT = Prompt("a", None, ["one two"])
PARTS = [
    {"choices": [{"delta": {"content": "é <b>"}}], "usage": None},
    {"choices": [{"delta": {"content": "two"}}]},
    {"choices": [], "usage": {"completion_tokens": 2}},
]


def chunked(events: list[bytes]) -> bytes:
    """A whole answer as a server sends it, a chunk for each event."""
    head = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
    return head + b"".join(b"%x\r\n%s\r\n" % (len(e), e) for e in events) + b"0\r\n\r\n"


EVENTS = [f"data: {json.dumps(part)}\n\n".encode() for part in PARTS] + [b"data: [DONE]\n\n"]
WHOLE = chunked(EVENTS)


def asked(data: bytes) -> Answer | None:
    """What a client of the load test makes of an answer."""
    connection: Any = SimpleNamespace(makefile=lambda *_: io.BufferedReader(io.BytesIO(data)))

    def post(*_: Any) -> HTTPResponse:
        answer = HTTPResponse(connection)
        answer.begin()
        return answer

    server: Any = SimpleNamespace(label="ours", post=post)
    return _try(server, PROMPT, 2)


def test_a_whole_stream_is_an_answer() -> None:
    answer = asked(WHOLE)
    assert answer is not None
    assert answer.tokens == 2


def test_a_stream_that_is_cut_anywhere_before_its_usage_has_failed() -> None:
    usage = WHOLE.index(b"completion_tokens")
    for end in range(len(WHOLE)):
        answer = asked(WHOLE[:end])
        assert (answer is None) if end < usage else (answer is None or answer.tokens == 2), end


@given(
    st.lists(
        st.binary(max_size=20)
        | st.sampled_from([b"null", b"[]", b"5", b'{"choices": 5}', b'{"usage": []}', b"[" * 3000])
        | st.sampled_from([json.dumps(part).encode() for part in PARTS]),
        max_size=4,
    )
)
def test_events_that_hold_anything_end_no_thread(texts: list[bytes]) -> None:
    answer = asked(chunked([b"data: " + text + b"\n\n" for text in texts]))
    assert answer is None or isinstance(answer, Answer)
