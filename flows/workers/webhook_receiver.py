"""What takes MLflow's webhooks and lets a piece of work follow them: it answers at once, and works
in a thread of its own, in turn.

A delivery says only that it is time to look. So many of them are one run of the work, one that is
lost is made up for at the next start or within the hour, and one that is forged could deploy
nothing that the registry does not name.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import threading
from collections.abc import Callable

import uvicorn
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from draftwell.flows.progress import announce
from draftwell.registry.webhooks import Deliveries, moved_alias
from draftwell.serving.errors import DraftwellError

PATH = "/mlflow"
MOST_BYTES = 64 * 1024
"""Of a body; MLflow's has some hundred."""
BODY_SECONDS = 10.0
"""In which a body has to be here."""
AT_ONCE = 256
"""Connections, beyond which the answer is 503; MLflow tries again."""
HOUR = 3600.0
log = logging.getLogger(__name__)


class InTurn:
    """Runs a piece of work in a thread, one run at a time: at its start, when it is asked for, and
    each hour. However often it is asked for during a run, one more follows.

    Args:
        work: what it raises is said and forgotten; the next run begins again.
        patience: seconds without being asked after which it runs all the same.
    """

    def __init__(self, work: Callable[[], object], patience: float = HOUR):
        self._work, self._patience = work, patience
        self._asked = threading.Event()
        self._asked.set()
        # a daemon, for a deployment may take minutes, and one that is cut off harms nothing
        threading.Thread(target=self._run, name="deployments", daemon=True).start()

    def ask(self) -> None:
        """Let the work run, after the run that is under way."""
        self._asked.set()

    def _run(self) -> None:
        while True:
            self._asked.wait(self._patience)
            self._asked.clear()
            try:
                self._work()
            except DraftwellError as error:
                announce(" ".join(str(error).split()))
            except Exception:
                log.exception("the deployment failed; the next webhook, or hour, tries it again")


def application(deliveries: Deliveries, model: str, alias: str, turn: InTurn) -> Starlette:
    """The receiver: `POST /mlflow` for MLflow, `GET /health` for probes.

    Args:
        model: registered model whose `alias` matters; all others are answered with 200 and left.
    """

    async def receive(request: Request) -> Response:
        try:
            async with asyncio.timeout(BODY_SECONDS):
                body = await body_of(request)
        except (TimeoutError, ClientDisconnect):
            return answer(408, f"the body did not arrive within {BODY_SECONDS:.0f} s")
        if body is None:
            return answer(413, f"the body is larger than {MOST_BYTES} bytes")
        if (refused := deliveries.refusal(request.headers, body)) is not None:
            return answer(refused.status, refused.why)
        try:
            moved = moved_alias(body)
        except ValueError:
            return answer(400, "this is no delivery of MLflow's webhooks")
        if moved != (model, alias):
            return answer(200, f"nothing to do: only {alias} of {model} matters here")
        turn.ask()
        return answer(202, "it is looked at now")

    async def health(_: Request) -> Response:
        return answer(200, "ready")

    return Starlette(
        routes=[Route(PATH, receive, methods=["POST"]), Route("/health", health, methods=["GET"])]
    )


async def body_of(request: Request) -> bytes | None:
    """A request's body; None where it is too large, of which no more is read."""
    length = request.headers.get("content-length", "")
    if length.isdecimal() and int(length[:20]) > MOST_BYTES:
        return None
    body = b""
    async for part in request.stream():
        body += part
        if len(body) > MOST_BYTES:
            return None
    return body


def answer(status: int, words: str) -> Response:
    """An answer of one line."""
    return JSONResponse({"detail": words}, status)


def server_of(app: Starlette) -> uvicorn.Server:
    """The server of a receiver, which logs no request and says nothing of itself."""
    return uvicorn.Server(
        uvicorn.Config(
            app,
            access_log=False,
            date_header=False,
            limit_concurrency=AT_ONCE,
            log_level="warning",
            server_header=False,
            timeout_graceful_shutdown=5,
            timeout_keep_alive=5,
        )
    )


def serve(app: Starlette, listener: socket.socket) -> None:
    """Serve until SIGINT or SIGTERM."""
    server_of(app).run(sockets=[listener])
