"""Addresses as clients and proxies write them: with a slash too many, with the prefix of a proxy,
in absolute form; HEAD for whatever GET answers; and what a wrong one was meant to be."""

from __future__ import annotations

import re
from collections.abc import Iterable

from starlette.routing import BaseRoute, Match
from starlette.types import ASGIApp, Receive, Scope, Send

from draftwell.serving.errors import DraftwellError

ABSOLUTE = re.compile(r"https?://([^/?#]*)(.*)", re.IGNORECASE | re.DOTALL)
LONGEST_GUESSED = 200
"""Characters of a wrong address for which the right one is looked for."""


def plain_path(path: str) -> str:
    """A path with single slashes, and none at its end.

    >>> [plain_path(path) for path in ("//v1/models/", "/", "")]
    ['/v1/models', '/', '/']
    """
    return "/" + "/".join(part for part in path.split("/") if part)


def without_root(path: str, root: str) -> str:
    """A plain path without the prefix, where it has it.

    >>> [without_root(path, "/llm") for path in ("/llm/v1/models", "/llm", "/v1/models", "/llms")]
    ['/v1/models', '/', '/v1/models', '/llms']
    """
    return path[len(root) :] or "/" if f"{path}/".startswith(f"{root}/") else path


def check_root(root: str, routes: Iterable[BaseRoute]) -> None:
    """Refuse a prefix that addresses of our own begin with: they would lose it."""
    scope = {"type": "http", "method": "GET", "path": root}
    for one in routes:
        path = getattr(one, "path", "")
        if path.startswith(f"{root}/") or one.matches(scope)[0] is not Match.NONE:
            raise DraftwellError(
                f"--root-path {root} is where this server has {path}: name the prefix alone that "
                "a proxy puts before it, such as /llm",
                code="bad_root_path",
            )


def meant(scope: Scope, routes: Iterable[BaseRoute]) -> str | None:
    """The address that a wrong one probably means: with /v1, or without what stands before it."""
    path = scope["path"]
    if len(path) > LONGEST_GUESSED:
        return None
    ends = (path[place:] for place in range(1, len(path)) if path[place] == "/")
    for candidate in (f"/v1{path}", *ends):
        if any(one.matches({**scope, "path": candidate})[0] is not Match.NONE for one in routes):
            return candidate
    return None


class Addresses:
    """Middleware that gives every request the path of its route.

    Args:
        root: prefix of all addresses behind a proxy, which may leave it in or take it out; empty:
            none.
    """

    def __init__(self, app: ASGIApp, root: str = ""):
        self.app, self.root = app, root

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            path = scope["path"]
            if found := ABSOLUTE.fullmatch(path):
                # its host is the one that counts (RFC 9112, section 3.2.2)
                others = [one for one in scope["headers"] if one[0] != b"host"]
                scope["headers"], path = [(b"host", found[1].encode()), *others], found[2]
            if scope["method"] == "OPTIONS" and path == "*":  # about the server, not an address
                path = "/"
            scope["path"] = without_root(plain_path(path), self.root)
            if scope["method"] == "HEAD":
                scope = {**scope, "method": "GET"}  # the web server leaves the body out
        await self.app(scope, receive, send)
