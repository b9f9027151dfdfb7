"""The HTTP application: its routes, middleware and lifespan."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from functools import partial
from importlib.metadata import PackageNotFoundError, version as installed_version
from typing import Any

from fastapi import APIRouter, FastAPI, Request
from fastapi.responses import JSONResponse, Response

from draftwell.serving.server.deployment.deployments import CountUsers, Deployments
from draftwell.serving.server.feedback.feedback import Feedback
from draftwell.serving.server.http.addresses import Addresses, check_root
from draftwell.serving.server.http.bodies import JsonRoute
from draftwell.serving.server.http.conversation import Deadline
from draftwell.serving.server.http.errors import install_error_handlers
from draftwell.serving.server.http.keys import Keys
from draftwell.serving.server.http.messages_api import CountRequest, MessageAnswer, MessagesRequest
from draftwell.serving.server.http.page import card_router, page_router
from draftwell.serving.server.http.requests import LONGEST_TEXT, ChatRequest, CompletionRequest
from draftwell.serving.server.http.responses_api import ResponsesRequest
from draftwell.serving.server.http.security import RequestLog, Security, install_security
from draftwell.serving.server.http.tokens import tokens_router
from draftwell.serving.server.metrics.endpoint import CountAnswers, metrics_router
from draftwell.serving.server.metrics.metrics import Metrics
from draftwell.serving.server.model.served_model import ServedModel
from draftwell.serving.server.scheduling.observer import Observer
from draftwell.serving.server.settings import DRAIN_SECONDS, QUEUE

ERRORS: dict[int | str, dict[str, Any]] = {
    "4XX": {
        "description": 'the request is invalid: {"error": {"message", "type", "param", "code"}}'
    },
    "5XX": {"description": "the server failed, in the same shape"},
}


def create_app(
    served: ServedModel,
    *,
    drain_seconds: float | None = DRAIN_SECONDS,
    capacity: int = QUEUE,
    observers: Sequence[Observer] = (),
    security: Security | None = None,
    request_timeout: float | None = None,
    allow_parameters: bool = False,
    prompt_tokens: int | None = None,
) -> FastAPI:
    """The application that serves one model. Its schedulers start and end with the application's
    lifespan.

    `app.state.deployments` is what serves; `Deployments.switch` replaces it.

    Args:
        drain_seconds: how long running requests may take to finish when the server goes down; None:
            no limit.
        capacity: requests that may wait for a slot; further ones are answered 429.
        observers: notified of every request (observer.py).
        security: keys, origins, sizes and prefix; None: no key, no other site's pages.
        request_timeout: seconds after which a request is cancelled; None: no limit.
        allow_parameters: let requests change the parameters of strategies.
        prompt_tokens: as in `PromptBudget`.
    """
    metrics, security = Metrics(served.name), security or Security()
    deployments = Deployments(
        served, capacity=capacity, observers=[metrics, *observers], prompt_tokens=prompt_tokens
    )
    metrics.watch(
        deployments,
        next((observer for observer in observers if isinstance(observer, Feedback)), None),
    )

    app = FastAPI(
        title="Draftwell",
        servers=[{"url": security.root}] if security.root else None,
        redirect_slashes=False,  # `Addresses` takes them out
        lifespan=partial(_running, deployments, security.keys, drain_seconds),
        docs_url=None,
        redoc_url=None,
        responses=ERRORS,
        # a page of another site can send bodies of other types without asking first
        strict_content_type=True,
    )
    app.add_middleware(CountUsers, deployments=deployments)
    install_error_handlers(app)
    install_security(app, security)
    # around the others: what they refuse is counted too
    app.add_middleware(CountAnswers, metrics=metrics)
    app.state.request_timeout = request_timeout
    app.state.allow_parameters = allow_parameters
    app.state.deployments = deployments
    _add_routes(app, metrics, deployments, security.root)
    return app


@asynccontextmanager
async def _running(
    deployments: Deployments, keys: Keys, drain_seconds: float | None, app: FastAPI
) -> AsyncIterator[None]:
    """Schedulers run as long as the application, and its keys follow their file."""
    deployments.start()
    keys.start()
    try:
        yield
    finally:
        keys.close()
        await asyncio.to_thread(deployments.close, drain_seconds)


def _add_routes(app: FastAPI, metrics: Metrics, deployments: Deployments, root: str) -> None:
    """All addresses, under a prefix or none, and the log of requests to them."""
    routers = [
        metrics_router(metrics),
        page_router(root),
        card_router(lambda: deployments.current.served.card),
        model_router(deployments),
        messages_router(deployments),
        probe_router(deployments),
        tokens_router(lambda: deployments.current.service),
    ]
    for router in routers:
        app.include_router(router)
    app.state.root, app.state.routes = root, [one for router in routers for one in router.routes]
    if root:
        check_root(root, app.state.routes)
    app.add_middleware(Addresses, root=root)
    app.add_middleware(RequestLog, routes=app.state.routes)


def model_router(deployments: Deployments) -> APIRouter:
    """`/v1/models`, `/v1/speculation`, and the endpoints that answer."""
    router = APIRouter(route_class=JsonRoute)

    def card() -> dict[str, Any]:
        now = deployments.current.served
        return {
            "id": now.name,
            "object": "model",
            "created": now.created,
            "owned_by": "draftwell",
            "max_model_len": now.max_context,
            "exact": now.pair.exact and now.strategy.lossless,
        }

    @router.get("/v1/models")
    async def list_models() -> dict[str, Any]:
        """The one model that this server has."""
        return {"object": "list", "data": [card()]}

    @router.get("/v1/models/{name:path}")
    async def get_model(name: str) -> dict[str, Any]:
        """A model by name."""
        deployments.current.service.check_model(name)
        return card()

    @router.get("/v1/speculation")
    def speculation(request: Request) -> dict[str, Any]:
        """The strategies that a request may ask for in `speculation.strategy`, with their
        parameters."""
        return deployments.current.service.offer(request)

    @router.post("/v1/chat/completions", response_model=None)
    async def chat_completions(body: ChatRequest, request: Request) -> Response:
        """Answer a conversation."""
        with deployments.use() as now:
            return await now.service.chat(body, request)

    @router.post("/v1/responses", response_model=None)
    async def responses(body: ResponsesRequest, request: Request) -> Response:
        """Answer a text or a conversation; nothing is stored."""
        with deployments.use() as now:
            return await now.service.respond(body, request)

    @router.post("/v1/completions", response_model=None)
    async def completions(body: CompletionRequest, request: Request) -> Response:
        """Continue a prompt."""
        with deployments.use() as now:
            return await now.service.complete(body, request)

    return router


def messages_router(deployments: Deployments) -> APIRouter:
    """Anthropic's API."""
    router = APIRouter(route_class=JsonRoute)
    streamed = {"content": {"text/event-stream": {}}, "description": "a message"}

    @router.post("/v1/messages", response_model=None, responses={200: streamed})
    async def messages(body: MessagesRequest, request: Request) -> Response:
        """Answer a conversation in the shape of Anthropic's API."""
        with deployments.use() as now:
            return await now.service.chat(body.chat(), request, MessageAnswer)

    @router.post("/v1/messages/count_tokens")
    async def count_tokens(body: CountRequest, request: Request) -> dict[str, int]:
        """Tokens of the prompt that a conversation becomes."""
        service, chat = deployments.current.service, body.chat()
        service.check_model(chat.model)
        async with Deadline.of(None, request.app.state.request_timeout).enforced():
            return {"input_tokens": len((await service.chat_prompt(chat, LONGEST_TEXT)).ids)}

    return router


def own_version() -> str:
    """Of the bundle's runtime or, in a checkout, of the project."""
    try:
        return installed_version("draftwell-runtime")
    except PackageNotFoundError:
        return installed_version("draftwell")


def probe_router(deployments: Deployments) -> APIRouter:
    """`/health`, `/ready` and `/version`."""
    router = APIRouter()

    @router.get("/version")
    async def version() -> dict[str, str]:
        """Version of the server."""
        return {"version": own_version()}

    @router.get("/health")
    async def health(request: Request) -> JSONResponse:
        """Whether the process works (503: restart it), what it serves and how busy it is."""
        state = deployments.health()
        if state["last_switch_error"] and not request.state.trusted:
            state["last_switch_error"] = (
                "a switch was refused: send an API key to see why, or read the log"
            )
        return JSONResponse(state, 200 if state["status"] != "failed" else 503)

    @router.get("/ready")
    async def ready() -> JSONResponse:
        """Whether new requests are accepted; 503 while the server starts or shuts down, and while
        a forward pass is stuck."""
        return JSONResponse({"ready": deployments.ready}, 200 if deployments.ready else 503)

    return router
