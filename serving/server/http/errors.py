"""Errors in OpenAI's format, wherever they come from: `{"error": {"message", "type", "param",
"code"}}`."""

from __future__ import annotations

import logging
import math
import random
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from draftwell.serving.server.http.addresses import meant

log = logging.getLogger(__name__)

LONGEST_MESSAGE, LONGEST_FIELD = 500, 64
UNION_BRANCHES = ("str", "int", "constrained-str", "constrained-int")
"""What pydantic adds to the location of an error inside a union; other branches contain a bracket,
such as `list[int]`."""
TOO_MANY_REQUESTS = 429
NO_RETRY = {"x-should-retry": "false"}
"""OpenAI's clients otherwise send a request that failed twice more."""
LATE = "the request was not answered before its deadline"


class APIError(Exception):
    """An answer that is an error.

    Args:
        status: HTTP status code.
        param: the request field at fault.
        code: OpenAI's machine-readable code.
        headers: of the answer.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ):
        super().__init__(message)
        self.status, self.message, self.headers = status, clean(message), headers
        self.param, self.code = param and clean(param), code

    @property
    def kind(self) -> str:
        """OpenAI's type of the error."""
        if self.status == TOO_MANY_REQUESTS:
            return "rate_limit_error"
        return "server_error" if self.status >= 500 else "invalid_request_error"

    @property
    def body(self) -> dict[str, Any]:
        fields = {"message": self.message, "type": self.kind, "param": self.param}
        return {"error": fields | {"code": self.code}}

    @property
    def cause(self) -> str:
        """What the log says of it: no message, which may hold words of the client's."""
        field = re.sub(r"[^\w.\[\]-]", "?", self.param or "", flags=re.ASCII)[:LONGEST_FIELD]
        return ": ".join(part for part in (self.code or self.kind, field) if part)

    @property
    def response(self) -> ErrorResponse:
        return ErrorResponse(self)


MESSAGES_PATH = "/v1/messages"
ANTHROPIC_KINDS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


def anthropic_body(error: APIError) -> dict[str, Any]:
    """An error as Anthropic's clients read it: the message names the field, as Anthropic has it."""
    other = "api_error" if error.status >= 500 else "invalid_request_error"
    kind, message, field = ANTHROPIC_KINDS.get(error.status, other), error.message, error.param
    if field:
        own = re.sub(r"^response_format(\.json_schema)?", "output_config.format", field)
        own = own.replace(".function.parameters", ".input_schema")
        message = message.replace(field, own) if field in message else f"{own}: {message}"
    return {"type": "error", "error": {"type": kind, "message": message}}


class ErrorResponse(JSONResponse):
    """An error as the answer to a request, in whose state it leaves the cause for the log."""

    def __init__(self, error: APIError):
        super().__init__(error.body, error.status, error.headers)
        self.error = error

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope.setdefault("state", {})["cause"] = self.error.cause
        if scope["path"].startswith(MESSAGES_PATH):
            own = JSONResponse(anthropic_body(self.error), self.status_code, self.error.headers)
            await own(scope, receive, send)
            return
        await super().__call__(scope, receive, send)


class Refused(HTTPException):
    """An error on its way through FastAPI, which passes on this type alone while it reads a
    body."""

    def __init__(self, error: APIError):
        super().__init__(error.status, error.message)
        self.error = error


def retry_after(seconds: int) -> dict[str, str]:
    """The header that says when to try again: up to half as long again as `seconds`, so that those
    refused together do not come back together, but at most a minute, beyond which OpenAI's client
    ignores it."""
    return {"Retry-After": str(min(60, math.ceil(seconds * random.uniform(1.0, 1.5))))}


def deadline_exceeded(message: str = LATE, *, own: bool) -> APIError:
    """The request was not answered before its deadline.

    Args:
        own: the client set it; else OpenAI's client would retry, for three times its timeout.
    """
    if own:
        return APIError(408, message, param="timeout", code="deadline_exceeded", headers=NO_RETRY)
    # a retry would triple the overload
    return APIError(504, message, code="deadline_exceeded", headers=NO_RETRY)


def queue_full(message: str, retry_after_seconds: int) -> APIError:
    """429: too many requests wait."""
    return APIError(
        TOO_MANY_REQUESTS, message, code="queue_full", headers=retry_after(retry_after_seconds)
    )


def shutting_down() -> APIError:
    """503: another server may answer."""
    return APIError(503, "the server is shutting down", headers=retry_after(1))


def clean(text: str) -> str:
    """Text of bounded length that any JSON encoder accepts (no lone surrogates)."""
    text = text.encode("utf-8", "replace").decode()
    return text if len(text) <= LONGEST_MESSAGE else text[: LONGEST_MESSAGE - 1] + "…"


_folders: set[str] = set()


def hide_folders(*folders: Path) -> None:
    """Register folders and their parents with `without_paths`: their names may contain spaces or
    quotes."""
    for folder in folders:
        for path in {folder.absolute(), folder.resolve()}:
            _folders.update(str(part) for part in (path, *path.parents) if part != part.parent)


def without_paths(error: Exception | str) -> str:
    """A message for clients: one line, and only the last part of every absolute path.

    >>> without_paths("the bundle /srv/dist/pair/7-cpu is damaged")
    'the bundle 7-cpu is damaged'
    """
    text = str(error)
    # the longest first: its parents are part of it
    for folder in sorted(_folders, key=len, reverse=True):
        text = re.sub(
            rf"(?<![\w.]){re.escape(folder)}(?![\w.-])",
            lambda found: "/" if found.string[found.end() :][:1] == "/" else Path(found[0]).name,
            text,
        )
    return " ".join(re.sub(r"(?<![\w.])/+(?:[^\s/:'\"]+/)*([^\s/:'\"]*)", r"\1", text).split())


def internal_error(error: Exception) -> APIError:
    """The answer to an error of the server; the details are only in the log."""
    log.error("a request failed", exc_info=error)
    return APIError(500, "the server failed to answer this request; the cause is in its log")


JSON_KINDS = {list: "an array", str: "a string", bool: "true or false", int: "a number"}


def from_validation(error: RequestValidationError) -> APIError:
    """The most specific of pydantic's errors: the deepest in the body, and not one of a union's
    other branch. `part` of an error's context names a field within its place."""
    found: Mapping[str, Any] = max(
        error.errors(), key=lambda e: (not e["type"].endswith("_type"), len(e["loc"]))
    )
    context: Mapping[str, Any] = found.get("ctx") or {}
    param, kind = context.get("param") or field_path(found["loc"]), found["type"]
    if part := context.get("part"):
        param = f"{param}.{part}"
    message, code = found["msg"], None
    if param is None and kind in ("model_attributes_type", "dict_type"):
        found_kind = JSON_KINDS.get(type(error.body), "a number")
        message = f"the body must be a JSON object, not {found_kind}"
    elif kind == "missing":
        message = (
            f"missing required parameter: '{param}'"
            if param
            else "the body is empty or null: send a JSON object"
        )
    elif kind in ("unknown_field", "unsupported_field"):
        code = kind
    elif param:
        message = f"invalid value for '{param}': {message}"
    return APIError(400, message, param=param, code=code)


def field_path(loc: tuple[int | str, ...]) -> str | None:
    """`("body", "messages", 0, "content", "str")` → `messages[0].content`."""
    path = ""
    for part in loc[1:]:
        if isinstance(part, int):
            path += f"[{part}]"
        elif part not in UNION_BRANCHES and "[" not in part:
            path += f".{part}" if path else part
    return path or None


def not_json(sent: str | None) -> APIError:
    """415: a body of another type, which a page of another site can send without asking first."""
    found = f"not {sent}" if sent else "which is missing"
    return APIError(
        415,
        f"send the header Content-Type: application/json, {found}",
        code="unsupported_media_type",
    )


def no_address(request: Request) -> APIError:
    """404: the address is none of the server's."""
    state = request.app.state
    right = meant(request.scope, getattr(state, "routes", ()))
    mend = f"did you mean {state.root}{right}?" if right else "GET /openapi.json lists all"
    return APIError(
        404, f"there is no {request.method} {request.url.path} here: {mend}", code="not_found"
    )


def other_method(request: Request, allowed: str) -> Response:
    """405, or what OPTIONS asks for: the methods that an address has."""
    every = f"{allowed}, {'HEAD, ' if allowed == 'GET' else ''}OPTIONS"
    if request.method == "OPTIONS":
        return Response(status_code=204, headers={"Allow": every})
    return APIError(
        405,
        f"{request.method} {request.url.path} is not possible: send {allowed}",
        code="method_not_allowed",
        headers={"Allow": every},
    ).response


def install_error_handlers(app: FastAPI) -> None:
    """Give every error of the app, including those of FastAPI and Starlette, OpenAI's format."""

    @app.exception_handler(APIError)
    async def on_api_error(request: Request, error: APIError) -> JSONResponse:
        return error.response

    @app.exception_handler(RequestValidationError)
    async def on_validation(request: Request, error: RequestValidationError) -> JSONResponse:
        if isinstance(error.body, bytes):  # it was not read as JSON
            return not_json(request.headers.get("content-type")).response
        return from_validation(error).response

    @app.exception_handler(HTTPException)
    async def on_http(request: Request, error: HTTPException) -> Response:
        if isinstance(error, Refused):
            return error.error.response
        if error.status_code == 404:
            return no_address(request).response
        if error.status_code == 405:
            return other_method(request, (error.headers or {}).get("Allow", ""))
        return APIError(error.status_code, str(error.detail), headers=error.headers).response

    app.add_middleware(CatchFaults)


class CatchFaults:
    """Answers unexpected errors with 500. Starlette's own handler answers too, but raises again,
    which closes the connection: a client that has already sent its next request over it would get
    no answer."""

    def __init__(self, app: ASGIApp):
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        started = False

        async def noted(message: Message) -> None:
            nonlocal started
            started = started or message["type"] == "http.response.start"
            await send(message)

        try:
            await self.app(scope, receive, noted)
        except Exception as error:
            if started or scope["type"] != "http":
                raise
            await internal_error(error).response(scope, receive, send)
