"""The HTTP application: routes, error shapes, and the scheduler's life."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response

from serving.server.errors import APIError, install_error_handlers
from serving.server.scheduler import Scheduler
from serving.server.schemas import ChatRequest, CompletionRequest
from serving.server.served import ServedModel
from serving.server.service import Service

ERRORS: dict[int | str, dict[str, Any]] = {
    "4XX": {"description": "the request is wrong: {\"error\": {\"message\", \"type\", \"param\", \"code\"}}"},
    "5XX": {"description": "the server failed, in the same shape"},
}


def create_app(served: ServedModel, *, drain_seconds: float | None = 30.0) -> FastAPI:
    """The application that serves one model. Its scheduler starts and ends with the application's lifespan.

    Args:
        drain_seconds: how long requests in flight may still run when the server goes down; None: as long as they need.
    """
    scheduler = Scheduler(served.pair.engine(), served.strategy, served.slots, threads=served.threads)
    service = Service(served, scheduler)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        scheduler.start()
        try:
            yield
        finally:
            await asyncio.to_thread(scheduler.close, drain_seconds)

    app = FastAPI(title="Draftwell", lifespan=lifespan, docs_url=None, redoc_url=None, responses=ERRORS)
    install_error_handlers(app)
    card = {"id": served.name, "object": "model", "created": served.created, "owned_by": "draftwell"}

    @app.get("/v1/models")
    async def list_models() -> dict[str, Any]:
        """The one model that this server has."""
        return {"object": "list", "data": [card]}

    @app.get("/v1/models/{name:path}")
    async def get_model(name: str) -> dict[str, Any]:
        """A model by name."""
        if name != served.name:
            raise APIError(404, f"the model '{name}' does not exist", param="model", code="model_not_found")
        return card

    @app.post("/v1/chat/completions", response_model=None)
    async def chat_completions(body: ChatRequest, request: Request) -> Response:
        """Answer a conversation."""
        return await service.chat(body, request)

    @app.post("/v1/completions", response_model=None)
    async def completions(body: CompletionRequest, request: Request) -> Response:
        """Continue a prompt."""
        return await service.complete(body, request)

    @app.get("/health")
    async def health() -> JSONResponse:
        """Whether requests are answered, and how busy the slots are."""
        state = {"status": "ok" if scheduler.accepts else "unavailable", "model": served.name, "strategy": served.strategy.name,
                 "slots": served.slots, "running": scheduler.running, "waiting": scheduler.waiting}
        return JSONResponse(state, 200 if scheduler.accepts else 503)

    app.state.scheduler = scheduler
    return app
