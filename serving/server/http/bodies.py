"""What a request's body may cost. It is counted while it arrives, before any object is made of it:
JSON of 8 MiB can become 230 MB of objects and hold the interpreter for half a second.

At the bound of `MOST_VALUES` parsing takes some 15 ms, less than reading the result of another
process would.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter

import numpy as np
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

    def feed(self, chunk: bytes) -> None:
        """Count a piece.

        Raises:
            APIError: the text goes beyond a bound, or is not UTF-8.
        """
        for start in range(0, len(chunk), PIECE):
            self._count(self._rest + chunk[start : start + PIECE])

    def _count(self, piece: bytes) -> None:
        if b"\0" in piece:  # UTF-16 has other quotes, and JSON in UTF-8 never holds it
            raise APIError(400, "the body is not JSON in UTF-8: send it so", code="not_utf8")
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


class Bodies:
    """Middleware that bounds bodies: 413 by the content-length or by counting chunks, 400 for too
    many values, 503 where all bodies that are there leave no room, 408 for one that does not come.
    A client that takes no more of its answer is given up.

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
        length = Headers(scope=scope).get("content-length", "")
        if length.isdecimal() and int(length[:20]) > self.most:
            await self.too_large().response(scope, receive, send)
            return
        scan, seen, held, arrived, stalled = JsonScan(), 0, 0, False, False
        end = time.monotonic() + BODY_SECONDS
        state = scope.setdefault("state", {})
        client = state.get("client", "")

        def charge(size: int) -> None:
            nonlocal held
            before, held = held, held + size
            self.allowance.take(client, size, before)

        async def counted() -> Message:
            nonlocal seen, arrived
            message = await (receive() if arrived else in_time(receive, end))
            arrived = arrived or not message.get("more_body", False)
            if not (chunk := message.get("body", b"")):
                return message
            seen += len(chunk)
            before = scan.values
            try:
                if seen > self.most:
                    raise self.too_large()
                scan.feed(chunk)
                charge(TEXT_COPIES * len(chunk) + VALUE_BYTES * (scan.values - before))
            except APIError as error:
                raise Refused(error) from None
            return message

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
            await self.app(scope, counted, taken)
        except Exception:
            if not stalled:
                raise
        finally:
            self.allowance.take(client, -held)

    def too_large(self) -> APIError:
        """The error of a body that is too long."""
        return APIError(
            413,
            f"the body is larger than {self.most} bytes: send a smaller one",
            code="request_too_large",
        )


async def in_time(receive: Receive, end: float) -> Message:
    """The next part of a body, which has to be there by `end` of `time.monotonic`."""
    try:
        async with asyncio.timeout(end - time.monotonic()):
            return await receive()
    except TimeoutError:
        late = f"the body did not arrive within {BODY_SECONDS:.0f} s: send it at once"
        raise Refused(APIError(408, late, code="body_too_slow")) from None
