"""Plain ASGI middleware around all routes: which hosts a request may name, and its id with one line
in the log."""

from __future__ import annotations

import ipaddress
import logging
import re
import time
import uuid
from collections.abc import Sequence

from starlette.datastructures import Headers, MutableHeaders
from starlette.routing import BaseRoute, Match
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from draftwell.serving.server.http.errors import APIError, retry_after

log = logging.getLogger(__name__)

REQUEST_ID = "x-request-id"
OWN_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")
"""A client's id that is taken over: it goes into the log and into a header."""
OWN_NAMES = ("localhost", ".localhost", "host.docker.internal", "host.containers.internal")
"""Names of this machine, the last two from within containers."""
MOST_REQUESTS = 4096
"""Requests at once, with those that wait or are still being sent. Connections without one do not
count: the protocol closes them."""
BUSY_SECONDS = 5
"""When those beyond that number may find room."""
QUIET = frozenset({"/health", "/ready", "/metrics"})
"""Paths that are asked every few seconds; only what fails of them is logged."""


class HostCheck:
    """Answers 421 to a request whose Host is none of the server's names; probes and scrapers may
    use any.

    A page of another site can make its own name point to this machine; its requests then count as
    the same site's and need no CORS, but they still name that site. That takes a name, so addresses
    are let through.

    Args:
        hosts: names without port; one that begins with "." stands for all names that end so.
    """

    def __init__(self, app: ASGIApp, hosts: Sequence[str]):
        self.app, self.hosts = app, {host.lower() for host in hosts}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if (
            scope["type"] == "http"
            and scope["path"] not in QUIET
            and not self.knows(Headers(scope=scope).get("host", ""))
        ):
            error = APIError(
                421,
                (
                    "this server does not answer under the name in the Host header: name it "
                    "with --allowed-host"
                ),
                code="wrong_host",
            )
            await error.response(scope, receive, send)
            return
        await self.app(scope, receive, send)

    def knows(self, host: str) -> bool:
        """Whether a Host header, with or without port, names this server; HTTP/1.0 needs none."""
        name = without_port(host)
        if not name or name in self.hosts or is_address(name):
            return True
        return any(own.startswith(".") and name.endswith(own) for own in self.hosts)


def without_port(host: str) -> str:
    """A Host header's name, in lower case.

    >>> without_port("Example.org.:8000"), without_port("[::1]:80"), without_port("10.0.0.7")
    ('example.org', '[::1]', '10.0.0.7')
    """
    return re.sub(r":\d+$", "", host).lower().rstrip(".")


def is_address(name: str) -> bool:
    """Whether a Host header's name is an IP address; those of version 6 are in brackets."""
    try:
        ipaddress.ip_address(name[1:-1] if name.startswith("[") and name.endswith("]") else name)
    except ValueError:
        return False
    return True


class RequestLimit:
    """Answers 503 to requests beyond so many that are being answered or wait; probes and scrapers
    are let through."""

    def __init__(self, app: ASGIApp, most: int = MOST_REQUESTS):
        self.app, self.most, self.now = app, most, 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in QUIET:
            await self.app(scope, receive, send)
            return
        if self.now >= self.most:
            error = APIError(
                503,
                f"this server already has {self.most} requests: try again later",
                code="too_many_requests",
                headers=retry_after(BUSY_SECONDS),
            )
            await error.response(scope, receive, send)
            return
        self.now += 1
        try:
            await self.app(scope, receive, send)
        finally:
            self.now -= 1


class RequestLog:
    """Gives every request an id, the client's own if it sent a usable one, returns it in
    `x-request-id`, and logs one line when the answer is over.

    Args:
        routes: what the request may be for, so that the line names it also where the request is
            refused before it gets there.
    """

    def __init__(self, app: ASGIApp, routes: Sequence[BaseRoute] = ()):
        self.app, self.routes = app, routes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        asked = Headers(scope=scope).get(REQUEST_ID, "")
        name = asked if OWN_ID.fullmatch(asked) else uuid.uuid4().hex
        started, status, ended = time.monotonic(), 0, False

        async def marked(message: Message) -> None:
            nonlocal status, ended
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)[REQUEST_ID] = name
            await send(message)
            ended = ended or (
                message["type"] == "http.response.body" and not message.get("more_body", False)
            )

        try:
            await self.app(scope, receive, marked)
        finally:
            if scope["path"] not in QUIET or status >= 400:
                state = scope.get("state", {})
                log.info(
                    "%s %s %d%s in %.3f s, client %s, request %s",
                    scope["method"],
                    self.path_of(scope),
                    status,
                    "" if ended else " unfinished",
                    time.monotonic() - started,
                    state.get("client") or "unknown",
                    name,
                )

    def path_of(self, scope: Scope) -> str:
        """The path of the request's route; the client's own could hold anything."""
        route = scope.get("route") or next(
            (one for one in self.routes if one.matches(scope)[0] is not Match.NONE), None
        )
        return str(getattr(route, "path", "unknown path"))
