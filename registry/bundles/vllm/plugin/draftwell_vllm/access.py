"""The API key for every path. vLLM's own check covers a few prefixes, such as /v1; the likes of
/invocations, which answers as /v1 does, and /metrics are open beside it.

    --middleware draftwell_vllm.access.KeyForAllPaths
"""

from __future__ import annotations

import hmac
import json
import os
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

KEY = "VLLM_API_KEY"
OPEN_PATHS = ("/health", "/ping")
"""What probes ask."""

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Any]]
Send = Callable[[Scope], Awaitable[None]]
REFUSAL = json.dumps(
    {"error": {"message": "Send the API key: Authorization: Bearer KEY", "code": 401}}
).encode()


class KeyForAllPaths:
    """ASGI middleware: requests without the key that `VLLM_API_KEY` names get 401; without the
    variable all pass. A browser's question ahead of a request (OPTIONS) has no key to send."""

    def __init__(self, app: Callable[[Scope, Receive, Send], Awaitable[None]]):
        self.app, self._key = app, os.environ.get(KEY, "").encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if not self._key or scope["type"] == "lifespan" or self._may(scope):
            await self.app(scope, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
        else:
            headers = [
                (b"content-type", b"application/json"),
                (b"content-length", str(len(REFUSAL)).encode()),
                (b"www-authenticate", b"Bearer"),
            ]
            await send({"type": "http.response.start", "status": 401, "headers": headers})
            await send({"type": "http.response.body", "body": REFUSAL})

    def _may(self, scope: Scope) -> bool:
        path = scope["path"].removeprefix(scope.get("root_path", ""))
        if path in OPEN_PATHS or scope.get("method") == "OPTIONS":
            return True
        scheme, _, key = dict(scope["headers"]).get(b"authorization", b"").partition(b" ")
        return scheme.lower() == b"bearer" and hmac.compare_digest(key.strip(), self._key)
