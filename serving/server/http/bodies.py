"""What a request's body may cost. It is counted while it arrives, before any object is made of it:
JSON of 8 MiB can become 230 MB of objects and hold the interpreter for half a second.

At the bound of `MOST_VALUES` parsing takes some 15 ms, less than reading the result of another
process would.
"""

from __future__ import annotations

import asyncio
import codecs
import json
import logging
import re
import sys
import time
import zlib
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from typing import Any

import numpy as np
from fastapi import Request, Response
from fastapi.routing import APIRoute
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from draftwell.serving.server.http.errors import APIError, Refused, retry_after

MOST_BODY_BYTES = 8 * 2**20
MOST_BODIES_BYTES = 256 * 2**20
"""Of all requests that are being answered or wait: bodies, and what was made of them, stay in
memory until they are answered."""
BUSY_SECONDS = 5
"""When a body beyond that may find room."""
MOST_VALUES = 270_000
"""Values of one body: two prompts of the longest lists of tokens, and what stands around them."""
MOST_MEMBERS = 16_384
"""Names of one body's objects: each can become an error of its own."""
DEEPEST = 128
"""Lists and objects within each other."""
TEXT_COPIES = 2
"""A body's bytes stay beside what they are parsed to."""
VALUE_BYTES = 128
"""Memory that a value takes beyond its text: 70 as parsed, and its part of the request's model."""
BODY_SECONDS = 30.0
"""In which a body has to arrive."""
STALL_SECONDS = 120.0
"""After which a client that takes no more of its answer is given up."""
PIECE = 2**16
STEPS = np.zeros(256, np.int8)
STEPS[list(b"[{")], STEPS[list(b"]}")] = 1, -1
ENCODINGS = ("gzip", "x-gzip", "deflate")
"""Values of Content-Encoding that are read."""
TEXT_OR_DIGITS = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"|[0-9]+', re.DOTALL)

log = logging.getLogger(__name__)


class JsonScan:
    """Counts what a JSON text holds while it arrives, in pieces cut anywhere; exact for UTF-8.

    Attributes:
        values: items, members, lists and objects so far.
        members: those with a name.
        depth: lists and objects that are open now.
    """

    def __init__(self) -> None:
        self.values = self.members = self.depth = 0
        self._in_text, self._rest = False, b""
        self._utf8, self._read = codecs.getincrementaldecoder("utf-8")(), 0

    def feed(self, chunk: bytes) -> None:
        """Count a piece.

        Raises:
            APIError: the text goes beyond a bound, or is not UTF-8.
        """
        cut = self._utf8.getstate()[0]  # the beginning of a character
        text = cut + chunk
        wrong = text.find(b"\0")  # as in UTF-16; JSON in UTF-8 never holds it
        try:
            self._utf8.decode(chunk)
        except UnicodeDecodeError as error:
            wrong = error.start if wrong < 0 else min(wrong, error.start)
        if wrong >= 0:
            raise not_utf8(text[wrong], self._read - len(cut) + wrong)
        self._read += len(chunk)
        for start in range(0, len(chunk), PIECE):
            self._count(self._rest + chunk[start : start + PIECE])

    def _count(self, piece: bytes) -> None:
        piece = piece.replace(b"\\\\", b"")
        self._rest = b"\\" if piece.endswith(b"\\") else b""
        # what is left of backslashes escapes the next character
        parts = piece.removesuffix(b"\\").replace(b'\\"', b"").split(b'"')
        outside = b"".join(parts[int(self._in_text) :: 2])
        self._in_text ^= len(parts) % 2 == 0
        self.members += outside.count(b":")
        self.values += sum(map(outside.count, (b",", b"[", b"{", b":")))
        steps = np.cumsum(STEPS[np.frombuffer(outside, np.uint8)], dtype=np.int64)
        deepest = self.depth + int(steps.max(initial=0))
        self.depth += int(steps[-1]) if len(steps) else 0
        if deepest > DEEPEST:
            raise too_complex(f"lists and objects {DEEPEST} levels deep", "flatten it")
        if self.values > MOST_VALUES:
            raise too_complex(f"{MOST_VALUES} values", "send it in several requests")
        if self.members > MOST_MEMBERS:
            raise too_complex(f"{MOST_MEMBERS} named values", "send fewer fields")


def not_utf8(byte: int, place: int) -> APIError:
    """The error of a body in another encoding, such as Latin-1 or UTF-16."""
    return APIError(
        400,
        f"the body is not JSON in UTF-8: byte {byte:#04x} at position {place} is none of its "
        "characters; encode the body as UTF-8",
        code="not_utf8",
    )


def too_complex(most: str, mend: str) -> APIError:
    """The error of a body that holds too much."""
    return APIError(400, f"the body holds more than {most}: {mend}", code="body_too_complex")


class Allowance:
    """Memory for all requests together; the requests of one client have at most half of it, unless
    it is a single one.

    Args:
        size: bytes.
    """

    def __init__(self, size: int):
        self.size, self.held = size, 0
        self._of: Counter[str] = Counter()

    def take(self, client: str, size: int, own: int = 0) -> None:
        """Take memory, which is given back by the same with a negative size.

        Args:
            own: what the same request holds before.
        Raises:
            APIError: there is no room; it is taken nevertheless, to be given back with the rest.
        """
        self.held += size
        self._of[client] += size
        if not self._of[client]:
            del self._of[client]
        if size <= 0:
            return
        if own + size > self.size:
            raise APIError(
                400,
                f"the request would hold {own + size} bytes of this server's {self.size} for all: "
                "send less, or ask for fewer log-probs",
                code="request_too_large",
            )
        alone = self._of[client] == own + size
        if self.held > self.size or (self._of[client] > self.size // 2 and not alone):
            whose = "requests" if self.held > self.size else "this client's requests"
            raise APIError(
                503,
                f"{whose} hold what this server has for them: try again later",
                code="too_many_requests",
                headers=retry_after(BUSY_SECONDS),
            )


class Unpacked:
    """The content of a body, which may be compressed, in pieces of at most `PIECE` bytes, so that
    nothing is made of a small body that has no room.

    Args:
        encoding: the header Content-Encoding; empty: none.
    """

    def __init__(self, encoding: str):
        self._encoding = encoding
        self._zip: Any = None  # made at the first byte

    def pieces(self, chunk: bytes, *, last: bool) -> Iterator[bytes]:
        """What the next part of a body holds.

        Raises:
            APIError: it is not what the header says, or ends too early.
        """
        if not self._encoding:
            yield chunk
            return
        if self._zip is None and chunk:
            # some clients leave out the header of deflate's format
            bare = self._encoding == "deflate" and chunk[0] & 15 != 8
            self._zip = zlib.decompressobj(-zlib.MAX_WBITS if bare else zlib.MAX_WBITS | 32)
        if self._zip is None:
            return
        try:
            while chunk and not self._zip.eof:
                yield self._zip.decompress(chunk, PIECE)
                chunk = self._zip.unconsumed_tail
            if last:
                yield self._zip.flush()
        except zlib.error:
            raise self._wrong("is not {}, which its header Content-Encoding names") from None
        if chunk or self._zip.unused_data:
            raise self._wrong("continues after the end of its {} data")
        if last and not self._zip.eof:
            raise self._wrong("ends within its {} data")

    def _wrong(self, how: str) -> APIError:
        return APIError(400, f"the body {how.format(self._encoding)}", code="wrong_encoding")


class Bodies:
    """Middleware that bounds bodies: 413 by the content-length or by counting chunks, 400 for too
    many values, 503 where all bodies that are there leave no room, 408 for one that does not come.
    Compressed ones are unpacked, and what they hold is bounded. A client that takes no more of its
    answer is given up.

    `state["charge"]` charges further bytes to the request until it is answered.

    Args:
        most: bytes of one body.
        together: bytes of all that is held for requests that are not answered yet.
    """

    def __init__(
        self, app: ASGIApp, most: int = MOST_BODY_BYTES, together: int = MOST_BODIES_BYTES
    ):
        self.app, self.most, self.allowance = app, most, Allowance(together)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        length = headers.get("content-length", "")
        encoding = headers.get("content-encoding", "").strip().lower().replace("identity", "")
        refused = None
        if length.isdecimal() and int(length[:20]) > self.most:
            refused = self.too_large()
        elif encoding and encoding not in ENCODINGS:
            refused = unknown_encoding(encoding)
        if refused:
            await refused.response(scope, receive, send)
            return
        held, stalled = 0, False
        state = scope.setdefault("state", {})
        client = state.get("client", "")

        def charge(size: int) -> None:
            nonlocal held
            before, held = held, held + size
            self.allowance.take(client, size, before)

        async def taken(message: Message) -> None:
            nonlocal stalled
            try:
                async with asyncio.timeout(STALL_SECONDS):
                    await send(message)
            except TimeoutError:
                stalled = True
                log.info("a client took nothing of its answer for %g s", STALL_SECONDS)
                raise

        state["charge"] = charge
        try:
            await self.app(scope, self.counted(receive, charge, Unpacked(encoding)), taken)
        except Exception:
            if not stalled:
                raise
        finally:
            self.allowance.take(client, -held)

    def counted(
        self, receive: Receive, charge: Callable[[int], None], content: Unpacked
    ) -> Callable[[], Awaitable[Message]]:
        """What receives the parts of one body, unpacked."""
        scan, end = JsonScan(), time.monotonic() + BODY_SECONDS
        sent, read, arrived = 0, 0, False

        async def next_part() -> Message:
            nonlocal sent, read, arrived
            if arrived:
                return await receive()  # that the client has gone
            message = await in_time(receive, end)
            if message["type"] != "http.request":
                return message
            arrived = not message.get("more_body", False)
            chunk, whole = message.get("body", b""), list[bytes]()
            sent += len(chunk)
            try:
                for piece in content.pieces(chunk, last=arrived):
                    if whole:
                        await asyncio.sleep(0)  # other requests do not wait for all of it
                    read += len(piece)
                    if max(sent, read) > self.most:
                        raise self.too_large()
                    before = scan.values
                    scan.feed(piece)
                    charge(TEXT_COPIES * len(piece) + VALUE_BYTES * (scan.values - before))
                    whole.append(piece)
            except APIError as error:
                raise Refused(error) from None
            return {**message, "body": b"".join(whole)}

        return next_part

    def too_large(self) -> APIError:
        """The error of a body that is too long."""
        return APIError(
            413,
            f"the body is larger than {self.most} bytes: send a smaller one",
            code="request_too_large",
        )


def unknown_encoding(encoding: str) -> APIError:
    """415: a body that is compressed in another way."""
    return APIError(
        415,
        f"a body with Content-Encoding: {encoding} cannot be read: send it as gzip or deflate, or "
        "as it is",
        code="unsupported_encoding",
        headers={"Accept-Encoding": "gzip, deflate"},
    )


async def in_time(receive: Receive, end: float) -> Message:
    """The next part of a body, which has to be there by `end` of `time.monotonic`."""
    try:
        async with asyncio.timeout(end - time.monotonic()):
            return await receive()
    except TimeoutError:
        late = f"the body did not arrive within {BODY_SECONDS:.0f} s: send it at once"
        raise Refused(APIError(408, late, code="body_too_slow")) from None


class JsonRoute(APIRoute):
    """A route that says of a body that is not JSON where it goes wrong."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def read_own(request: Request) -> Response:
            return await handle(JsonRequest(request.scope, request.receive))

        return read_own


class JsonRequest(Request):
    """A request whose JSON is read by `read_json`."""

    async def json(self) -> Any:
        return read_json(await self.body())


def read_json(body: bytes) -> Any:
    """The value of a JSON text.

    Raises:
        Refused: it is not JSON, names a field twice, or holds a number of thousands of digits.
    """
    try:
        return json.loads(body, object_pairs_hook=object_of)
    except json.JSONDecodeError as error:
        raise Refused(APIError(400, f"the body is not JSON: {error}", code="not_json")) from None
    except UnicodeDecodeError as error:  # it ends within a character
        raise Refused(not_utf8(body[error.start], error.start)) from None
    except ValueError:
        most = sys.get_int_max_str_digits()
        place = next(
            found.start()
            for found in TEXT_OR_DIGITS.finditer(body)
            if found[0][:1] != b'"' and len(found[0]) > most
        )
        message = f"the number at position {place} of the body has more than {most} digits"
        raise Refused(APIError(400, message, code="not_json")) from None


def object_of(members: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object of its members.

    Raises:
        Refused: two have one name; which of them counts would be a guess.
    """
    found = dict(members)
    if len(found) < len(members):
        [(name, _)] = Counter(name for name, _ in members).most_common(1)
        message = f"an object of the body has '{name}' more than once: send it once"
        raise Refused(APIError(400, message, param=name, code="repeated_field"))
    return found
