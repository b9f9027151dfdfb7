"""`GET /metrics`, and the middleware that counts HTTP answers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fastapi import APIRouter, Response
from fastapi.responses import JSONResponse, PlainTextResponse
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4

from draftwell.serving.server.metrics.dashboards import GRAFANA
from draftwell.serving.server.metrics.metrics import Metrics

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send


class CountAnswers:
    """ASGI middleware that counts all answers by route and status, including those of other
    middleware."""

    def __init__(self, app: ASGIApp, metrics: Metrics):
        self.app, self.metrics = app, metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def counted(message: Message) -> None:
            if message["type"] == "http.response.start":
                # the route's pattern: with the client's path, every invented path would create a
                # new series
                self.metrics.answered(
                    getattr(scope.get("route"), "path", "other"), message["status"]
                )
            await send(message)

        await self.app(scope, receive, counted if scope["type"] == "http" else send)


def metrics_router(metrics: Metrics) -> APIRouter:
    """`GET /metrics`, and the dashboard that reads it."""
    router = APIRouter()
    dashboard = GRAFANA.read_bytes()

    @router.get("/metrics", response_class=PlainTextResponse)
    def read_metrics() -> Response:
        """Counters, gauges and histograms for Prometheus."""
        return Response(
            metrics.render(),
            headers={"Content-Type": CONTENT_TYPE_PLAIN_0_0_4, "Cache-Control": "no-store"},
        )

    @router.get("/metrics/grafana.json", response_class=JSONResponse)
    def read_dashboard() -> Response:
        """A dashboard to import into Grafana."""
        return Response(dashboard, media_type="application/json")

    return router
