"""The page at `/`: static files of this folder, under a policy that lets it fetch from its own
server and nowhere else; and the bundle's card at `/card`, under one that lets it fetch nothing."""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Callable, Mapping
from pathlib import Path

from fastapi import APIRouter, HTTPException, Response

from draftwell.serving.bundle.card import CARD_JSON, CARD_PAGE

FOLDER = Path(__file__).parent
TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
        "connect-src 'self'; base-uri 'none'; "
        "form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-cache",
}
CARD_POLICY = (
    "default-src 'none'; style-src {styles}; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'; sandbox"
)
"""No script, no picture, no address; of styles those alone that are in the page."""


def page_router(root: str = "") -> APIRouter:
    """`GET /` and `GET /page/{name}`. The files are read once, so no request ever names a path of
    the machine.

    Args:
        root: prefix of the addresses behind a proxy.
    """
    files = {
        path.name: (path.read_bytes(), TYPES[path.suffix])
        for path in FOLDER.iterdir()
        if path.suffix in TYPES
    }
    if root:
        # the page's own address may lack the slash at its end, which relative ones count on
        html, kind = files["index.html"]
        files["index.html"] = html.replace(b'="./', f'="{root}/'.encode()), kind
    router = APIRouter(include_in_schema=False)

    @router.get("/")
    async def page() -> Response:
        return answer("index.html")

    @router.get("/page/{name}")
    async def part(name: str) -> Response:
        if name not in files:
            raise HTTPException(404, "Not Found")
        return answer(name)

    def answer(name: str) -> Response:
        content, kind = files[name]
        return Response(content, headers=HEADERS | {"Content-Type": kind})

    return router


def card_router(card: Callable[[], Mapping[str, bytes]]) -> APIRouter:
    """`GET /card` and `GET /card.json`: how the bundle that serves now was tuned; 404 where it does
    not say.

    Args:
        card: name → content of the files of that bundle's card; empty without one.
    """
    router = APIRouter(include_in_schema=False)

    def found(name: str) -> bytes:
        if name not in (files := card()):
            raise HTTPException(404, "the bundle that is served has no card")
        return files[name]

    @router.get("/card")
    async def page() -> Response:
        content = found(CARD_PAGE)
        headers = HEADERS | {"Content-Security-Policy": policy_of(content)}
        return Response(content, headers=headers | {"Content-Type": TYPES[".html"]})

    @router.get("/card.json")
    async def data() -> Response:
        return Response(found(CARD_JSON), headers=HEADERS | {"Content-Type": "application/json"})

    return router


def policy_of(page: bytes) -> str:
    """The policy of a page that has its styles in its head, each named by its hash."""
    styles = re.findall(rb"<style>(.*?)</style>", page, re.DOTALL)
    hashes = [base64.b64encode(hashlib.sha256(style).digest()).decode() for style in styles]
    return CARD_POLICY.format(styles=" ".join(f"'sha256-{one}'" for one in hashes) or "'none'")
