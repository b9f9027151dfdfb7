"""Plain ASGI middleware around all routes: which hosts a request may name, its id with one line in
the log, API keys, the largest body, and allowed origins.

A client is identified by its key, or by its address if the server needs no key; `client_of` names
it without revealing the key.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import ipaddress
import json
import logging
import re
import socket
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field

from fastapi import FastAPI, Request
from starlette.datastructures import Headers, MutableHeaders
from starlette.middleware.cors import CORSMiddleware
from starlette.routing import BaseRoute, Match
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from draftwell.serving.errors import DraftwellError
from draftwell.serving.server.http.bodies import MOST_BODIES_BYTES, MOST_BODY_BYTES, Bodies
from draftwell.serving.server.http.errors import APIError
from draftwell.serving.server.http.keys import (
    ANSWERS,
    METRICS,
    Access,
    Keys,
    digest_of,
    security_log,
)

log = logging.getLogger(__name__)

REQUEST_ID = "x-request-id"
OWN_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")
"""A client's id that is taken over: it goes into the log and into a header."""
OWN_NAMES = ("localhost", ".localhost", "host.docker.internal", "host.containers.internal")
"""Names of this machine, the last two from within containers."""
QUIET = frozenset({"/health", "/ready", "/metrics"})
"""Paths that are asked every few seconds; only what fails of them is logged."""


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


def address_in(scope: Scope) -> str:
    """The client's address; empty where there is none, or text that somebody made up in the header
    that proxies set, and that would forge parts of a log line."""
    address = (scope.get("client") or ("",))[0]
    return address if re.fullmatch(r"[0-9a-fA-F:.]+", address) else ""


MOST_REFUSALS = 10
"""Lines in the security log about refused requests in a second; what is beyond is counted."""


class Refusals:
    """The lines about refused requests: one client's many do not hide the others'."""

    def __init__(self) -> None:
        self._count = 0

    def write(self, scope: Scope, event: str, path: str) -> None:
        """A line; called on the event loop."""
        if self._count == 0:
            asyncio.get_running_loop().call_later(1.0, self._end_second)
        self._count += 1
        if self._count <= MOST_REFUSALS:
            security_log.warning(
                "security: event=%s client=%s key=%s path=%s",
                event,
                address_in(scope) or "unknown",
                scope["state"]["refused"],
                path,
            )

    def _end_second(self) -> None:
        left_out, self._count = self._count - MOST_REFUSALS, 0
        if left_out > 0:
            security_log.warning("security: event=refusals_left_out count=%d", left_out)


class RequestLog:
    """Gives every request an id, the client's own if it sent a usable one, returns it in
    `x-request-id`, and logs one line when the answer is over; that of an error names its cause. A
    request that the gate refused has a line in the security log too.

    Args:
        routes: what the request may be for, so that the line names it also where the request is
            refused before it gets there.
    """

    def __init__(self, app: ASGIApp, routes: Sequence[BaseRoute] = ()):
        self.app, self.routes, self.refusals = app, routes, Refusals()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        asked = Headers(scope=scope).get(REQUEST_ID, "")
        name = asked if OWN_ID.fullmatch(asked) else uuid.uuid4().hex
        started, status, ended = time.monotonic(), 0, False
        state = scope.setdefault("state", {})

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
            if "refused" in state:
                self.refusals.write(scope, state["cause"], self.path_of(scope))
            if scope["path"] not in QUIET or status >= 400:
                cause = f" ({state['cause']})" if "cause" in state else ""
                log.info(
                    "%s %s %d%s in %.3f s, client %s, request %s",
                    scope["method"],
                    self.path_of(scope),
                    status,
                    cause + ("" if ended else " unfinished"),
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


OPEN_PATHS = frozenset({"/health", "/ready", "/"})
"""Paths that need no key: probes of load balancers, and the page, which asks its user for a key."""
METRICS_PATHS = frozenset({"/metrics", "/metrics/grafana.json"})
"""Paths that need a key with the scope `metrics`; all others need one with `answers`."""


@dataclass(frozen=True)
class Security:
    """Which requests a server accepts.

    Args:
        keys: every request must carry one, as `Authorization: Bearer KEY`; none: no key is needed.
        cors_origins: sites whose pages may send requests from a browser; "*": all.
        body_bytes: largest body.
        bodies_bytes: most bytes that requests hold together until they are answered.
        hosts: names under which it answers, without port; one that begins with "." stands for all
            names that end so; empty: any. A page of another site can make its own name point to
            this machine; its requests then count as the same site's and need no CORS, but they
            still name that site. That takes a name, so addresses are let through.
        root: prefix of all addresses, as in `Addresses`.
    """

    keys: Keys = field(default_factory=Keys)
    cors_origins: tuple[str, ...] = ()
    body_bytes: int = MOST_BODY_BYTES
    bodies_bytes: int = MOST_BODIES_BYTES
    hosts: tuple[str, ...] = ()
    root: str = ""

    def answers_as(self, host: str) -> bool:
        """Whether a Host header, with or without port, names this server; HTTP/1.0 needs none."""
        name = without_port(host)
        if not self.hosts or not name or is_address(name):
            return True
        return any(name == own or (own[:1] == "." and name.endswith(own)) for own in self.hosts)


def install_security(app: FastAPI, security: Security) -> None:
    """Add the middleware to an app. The last one added sees a request first."""
    app.add_middleware(Bodies, most=security.body_bytes, together=security.bodies_bytes)
    app.add_middleware(Gate, security=security)
    # outside of the gate: a preflight carries no key, and a page may read why its request was
    # refused
    if security.cors_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=security.cors_origins,
            allow_methods=["GET", "POST"],
            # OpenAI's client for browsers sends a dozen of its own; the origin is
            # what decides
            allow_headers=["*"],
            allow_credentials=False,
            expose_headers=["Retry-After", REQUEST_ID],
        )


def is_open(path: str) -> bool:
    """Whether a path needs no key."""
    return path in OPEN_PATHS or path.startswith("/page/")


def client_of(request: Request) -> str:
    """Name by which the queue is fair between clients: derived from the key, or the address."""
    return str(request.state.client)


def tenant_of(request: Request) -> str | None:
    """Whose online state a request uses: a name derived from its key; None if the server needs no
    key."""
    tenant: str | None = request.state.tenant
    return tenant


class Gate:
    """Lets requests in that name this server (else 421; probes and scrapers may use any name) and
    carry a key (401) that may do what is asked for (403). Notes who the client is.

    The key may also be the password of HTTP's basic authentication (`curl -u :KEY`, and metrics
    scrapers that support nothing else). A 401 does not request it, because a browser would store
    the key; the page asks for it itself.
    """

    def __init__(self, app: ASGIApp, security: Security):
        self.app, self.security = app, security

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        sent, own = key_in(headers.get("authorization", "")), headers.get("x-api-key", "")
        # Anthropic's clients send the latter; the former may be a proxy's own
        keys = [key for key in (sent, own.encode("latin-1")) if key] or [b""]
        find = self.security.keys.find
        key = next((key for key in keys if find(key)), keys[0])
        access, state = find(key), scope.setdefault("state", {})
        state["tenant"] = access.tenant if access else None
        state["trusted"] = access is not None or not self.security.keys
        state["client"] = state["tenant"] or address_in(scope)
        if error := self.refusal(scope["path"], headers, key, access):
            state["refused"] = digest_of(key) if key else "none"
            await error.response(scope, receive, send)
            return
        await self.app(scope, receive, send)

    def refusal(
        self, path: str, headers: Headers, key: bytes, access: Access | None
    ) -> APIError | None:
        """Why a request is refused by its host or key; None: it is not."""
        if path not in QUIET and not self.security.answers_as(headers.get("host", "")):
            return APIError(
                421,
                "this server does not answer under the name in the Host header: name it "
                "with --allowed-host",
                code="wrong_host",
            )
        if not self.security.keys or is_open(path):
            return None
        if access is None:
            return APIError(
                401,
                "this API key is not one of the server's"
                if key
                else "this server needs an API key: send the header Authorization: Bearer KEY",
                code="invalid_api_key",
                headers={"WWW-Authenticate": 'Bearer realm="draftwell"'},
            )
        needed = METRICS if path in METRICS_PATHS else ANSWERS
        if needed not in access.scopes:
            return APIError(
                403,
                f"this API key may not do that: it needs the scope {needed} in the file of keys",
                code="wrong_scope",
            )
        return None


def key_in(authorization: str) -> bytes:
    """The key of an Authorization header; empty without one."""
    scheme, _, value = authorization.strip().partition(" ")
    if scheme.lower() == "bearer":
        return value.strip().encode("latin-1")  # what headers are read as: the client's own bytes
    if scheme.lower() == "basic":
        try:
            return base64.b64decode(value.strip(), validate=True).partition(b":")[2]
        except (binascii.Error, ValueError):
            return b""
    return b""


def hosts_of(host: str, allowed: Sequence[str], *, keys: bool) -> tuple[str, ...]:
    """Names that a server bound to `host` answers under; empty: any.

    A server without keys that listens on this machine alone is what another site's page could reach
    by a name of its own.

    Args:
        allowed: further names; their ports do not matter.

    >>> (
    ...     "localhost" in hosts_of("127.0.0.1", [], keys=False),
    ...     hosts_of("0.0.0.0", [], keys=False),
    ...     hosts_of("::1", ["*"], keys=False),
    ... )
    (True, (), ())
    """
    if "*" in allowed or (not allowed and (keys or not is_loopback(host))):
        return ()
    return (*OWN_NAMES, socket.gethostname().lower(), *map(without_port, allowed))


def is_loopback(host: str) -> bool:
    """Whether a server that is bound to a name or an address can be reached from this machine
    alone.

    >>> [
    ...     is_loopback(host)
    ...     for host in ("localhost", "127.0.0.2", "::1", "0.0.0.0", "10.0.0.7", "host.example")
    ... ]
    [True, True, True, False, False, False]
    """
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return f".{without_port(host)}".endswith(".localhost")
    return (getattr(address, "ipv4_mapped", None) or address).is_loopback


def origins(values: Sequence[str]) -> tuple[str, ...]:
    """Checked --cors-origin values, each an origin or, as vLLM takes them, a JSON list of some.

    Raises:
        DraftwellError: one is not a scheme and a host without a path (`bad_origin`).
    """
    named: list[str] = []
    for value in values:
        try:
            listed = json.loads(value)
        except (ValueError, RecursionError):
            listed = None
        whole = isinstance(listed, list) and all(isinstance(one, str) for one in listed)
        named += listed if whole else [value]
    for value in named:
        scheme, _, host = value.partition("://")
        if value != "*" and (scheme not in ("http", "https") or not host or "/" in host):
            raise DraftwellError(
                (
                    f"--cors-origin {value} is not an origin: write it as https://example.org, "
                    "without a path, or * for all"
                ),
                code="bad_origin",
            )
    return tuple(named)
