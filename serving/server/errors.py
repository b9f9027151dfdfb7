"""Errors in OpenAI's shape: `{"error": {"message", "type", "param", "code"}}`, whatever went wrong and wherever."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

log = logging.getLogger(__name__)

LONGEST_MESSAGE = 500
UNION_BRANCHES = ("str", "int", "constrained-str")
"""What pydantic adds to the place of an error inside a union; others hold a bracket, as `list[int]`."""


class APIError(Exception):
    """An answer that is an error.

    Args:
        status: HTTP status code.
        param: the request field at fault.
        code: OpenAI's machine-readable code.
    """

    def __init__(self, status: int, message: str, *, param: str | None = None, code: str | None = None):
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code

    @property
    def body(self) -> dict[str, Any]:
        kind = "server_error" if self.status >= 500 else "invalid_request_error"
        param = None if self.param is None else clean(self.param)
        return {"error": {"message": clean(self.message), "type": kind, "param": param, "code": self.code}}


def clean(text: str) -> str:
    """Text that any JSON encoder takes (no lone surrogates) and of bounded length."""
    text = text.encode("utf-8", "replace").decode()
    return text if len(text) <= LONGEST_MESSAGE else text[: LONGEST_MESSAGE - 1] + "…"


def internal_error(error: Exception) -> APIError:
    """What a client sees of a fault of ours; the details stay in the log."""
    log.error("a request failed", exc_info=error)
    return APIError(500, "the server failed to answer this request; its log says why")


def from_validation(error: RequestValidationError) -> APIError:
    """The most telling of pydantic's complaints: the deepest in the body, and not that of a union's other branch."""
    found = max(error.errors(), key=lambda e: (len(e["loc"]), not e["type"].endswith("_type")))
    context: Mapping[str, Any] = found.get("ctx") or {}
    param = context.get("param") or field_path(found["loc"])
    if found["type"] == "json_invalid":
        return APIError(400, f"the body is not JSON: {context.get('error', found['msg'])}")
    if found["type"] == "missing":
        return APIError(400, f"missing required parameter: '{param}'" if param else "the body is empty: send JSON", param=param)
    if found["type"] in ("unknown_field", "unsupported_field"):
        return APIError(400, found["msg"], param=param, code=found["type"])
    return APIError(400, f"invalid value for '{param}': {found['msg']}" if param else found["msg"], param=param)


def field_path(loc: tuple[int | str, ...]) -> str | None:
    """`("body", "messages", 0, "content", "str")` → `messages[0].content`."""
    path = ""
    for part in loc[1:]:
        if isinstance(part, int):
            path += f"[{part}]"
        elif part not in UNION_BRANCHES and "[" not in part:
            path += f".{part}" if path else part
    return path or None


def install_error_handlers(app: FastAPI) -> None:
    """Give every error of the app, FastAPI's and Starlette's own included, OpenAI's shape."""

    def answer(error: APIError, headers: Mapping[str, str] | None = None) -> JSONResponse:
        return JSONResponse(error.body, error.status, headers)

    @app.exception_handler(APIError)
    async def on_api_error(request: Request, error: APIError) -> JSONResponse:
        return answer(error)

    @app.exception_handler(RequestValidationError)
    async def on_validation(request: Request, error: RequestValidationError) -> JSONResponse:
        return answer(from_validation(error))

    @app.exception_handler(HTTPException)
    async def on_http(request: Request, error: HTTPException) -> JSONResponse:
        return answer(APIError(error.status_code, f"{error.detail}: {request.method} {request.url.path}"), error.headers)

    @app.exception_handler(Exception)
    async def on_fault(request: Request, error: Exception) -> JSONResponse:
        return answer(internal_error(error))
