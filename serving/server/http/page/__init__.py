"""The page at `/`: static files of this folder, under a policy that lets it fetch from its own
server and nowhere else."""

from __future__ import annotations

from pathlib import Path

from fastapi import APIRouter, HTTPException, Response

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
