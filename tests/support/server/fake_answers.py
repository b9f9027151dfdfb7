"""A server with the page and answers made up here, in the shape of the real ones: what the page
does is then known beforehand."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse

from draftwell.components.card.card import Card
from draftwell.components.card.page import card_html
from draftwell.serving.bundle.card import CARD_JSON, CARD_PAGE
from draftwell.serving.server.http.page import card_router, page_router
from tests.support.server.served_pair import running

NUMBER = {
    "type": "number",
    "required": False,
    "default": 0.5,
    "value": 0.4,
    "minimum": 0,
    "exclusive_minimum": False,
    "maximum": 1,
    "choices": None,
    "description": "draft until confidence falls below",
}
OFFER = {
    "model": "fake",
    "default": "hf_dynamic",
    "max_context": 256,
    "exact": True,
    "allow_parameters": True,
    "strategies": [
        {
            "name": "hf_dynamic",
            "lossless": True,
            "parameters": {
                "threshold": NUMBER,
                "max_draft": NUMBER
                | {
                    "type": "integer",
                    "value": 8,
                    "minimum": 1,
                    "maximum": 32,
                    "description": "cap",
                },
            },
        },
        {
            "name": "csd",
            "lossless": False,
            "parameters": {
                "use_gate": NUMBER | {"type": "boolean", "value": True, "description": "gate"},
                "mode": NUMBER
                | {
                    "type": "string",
                    "value": "soft",
                    "choices": ["soft", "hard"],
                    "description": "how",
                },
            },
        },
        {"name": "autoregressive", "lossless": True, "parameters": {}},
    ],
}
MARKUP = '<img src=x onerror="window.hit=1"><script>window.hit=1</script>'
TOKENS = [
    ("The", "target"),
    (" sky", "accepted"),
    (" is", "accepted"),
    (" blé", "rescued"),
    (" 🦆", "recovered"),
    ("", "accepted"),
    (" <b>now</b>", "accepted"),
    (MARKUP, "target"),
    ("\n", "accepted"),
]
TEXT = "".join(text for text, _ in TOKENS)
SPECULATIVE = {
    "strategy": "hf_dynamic",
    "drafted": 9,
    "judged": 7,
    "accepted": 6,
    "rescued": 1,
    "target_calls": 3,
    "acceptance_rate": 6 / 7,
    "mean_acceptance_length": 2.6,
    "tokens_per_second": 60.0,
    "first_token_seconds": 0.05,
    "accepted_by": {"text": 2, "head": 4},
}
PLAIN = {
    "strategy": "autoregressive",
    "drafted": 0,
    "judged": 0,
    "accepted": 0,
    "rescued": 0,
    "target_calls": 8,
    "acceptance_rate": None,
    "mean_acceptance_length": 1.0,
    "tokens_per_second": 40.0,
    "first_token_seconds": 0.05,
}


@dataclass
class Fake:
    """What the server was asked, and how it is to answer."""

    url: str = ""
    key: str | None = None
    allow_parameters: bool = True
    busy: bool = False
    card: Card | None = None
    bodies: list[dict[str, Any]] = field(default_factory=list)
    paths: list[str] = field(default_factory=list)
    cancelled: list[str] = field(default_factory=list)

    def reset(self) -> None:
        self.key, self.allow_parameters, self.busy = None, True, False
        self.card = None
        self.bodies, self.paths, self.cancelled = [], [], []


def refusal(status: int, message: str, **headers: str) -> JSONResponse:
    return JSONResponse(
        {
            "error": {
                "message": message,
                "type": "invalid_request_error",
                "param": None,
                "code": None,
            }
        },
        status,
        headers,
    )


def card_files(card: Card | None) -> dict[str, bytes]:
    """A card as a bundle has it; empty without one."""
    if card is None:
        return {}
    return {CARD_JSON: card.model_dump_json().encode(), CARD_PAGE: card_html(card).encode()}


def fake_app(fake: Fake) -> FastAPI:
    app = FastAPI()
    app.include_router(page_router())
    app.include_router(card_router(lambda: card_files(fake.card)))

    def lacks_key(request: Request) -> bool:
        return fake.key is not None and request.headers.get("authorization") != f"Bearer {fake.key}"

    @app.get("/v1/speculation")
    async def offer(request: Request) -> Response:
        return (
            refusal(401, "a key is needed")
            if lacks_key(request)
            else JSONResponse(
                OFFER | {"allow_parameters": fake.allow_parameters, "card": fake.card is not None}
            )
        )

    @app.get("/health")
    async def health() -> dict[str, Any]:
        return {"running": 8, "draft_length_by_batch": {"1": 5, "8": 3}}

    @app.post("/v1/{path:path}")
    async def answer(path: str, request: Request) -> Response:
        if lacks_key(request):
            return refusal(401, "a key is needed")
        if fake.busy:
            return refusal(429, "the queue is full", **{"Retry-After": "7"})
        body = await request.json()
        fake.paths.append(path)
        fake.bodies.append(body)
        prompt = body["prompt"] if "prompt" in body else body["messages"][0]["content"]
        return StreamingResponse(stream(fake, body, prompt), media_type="text/event-stream")

    return app


async def stream(fake: Fake, body: dict[str, Any], prompt: str) -> AsyncIterator[bytes]:
    if "for ever" in prompt:
        cancelled = fake.cancelled  # of this test: the next one's list is another
        try:
            while True:
                yield event({"tokens": [{"text": " on", "origin": "accepted"}]})
                await asyncio.sleep(0.02)
        finally:
            cancelled.append(prompt)
    plain = body["speculation"].get("enabled") is False
    tokens = [{"text": text, "origin": "target" if plain else origin} for text, origin in TOKENS]
    if "LONG" in prompt:
        tokens = [{"text": "x" * 400, "origin": "accepted"}, *tokens]
    whole = b"".join(
        [
            event(None),
            *(event({"tokens": [token]}) for token in tokens),
            event(PLAIN if plain else SPECULATIVE, "stop"),
        ]
    )
    whole += event({"tokens": []}, None) if "broken" in prompt else b"data: [DONE]\n\n"
    # seven bytes end inside lines, and inside characters
    size = 7 if "in pieces" in prompt else len(whole)
    for at in range(0, len(whole), size):
        yield whole[at : at + size]
        if size == 7:
            await asyncio.sleep(0)


def event(speculation: dict[str, Any] | None, finish: str | None = None) -> bytes:
    chunk = {
        "id": "x",
        "model": "fake",
        "choices": [{"index": 0, "delta": {}, "finish_reason": finish}],
        "speculation": speculation,
    }
    return f"data: {json.dumps(chunk, ensure_ascii=False)}\r\n\r\n".encode()


@contextmanager
def fake_server() -> Iterator[Fake]:
    """A running server: what it was asked is in `bodies`."""
    fake = Fake()
    with running(fake_app(fake)) as url:
        fake.url = url
        yield fake
