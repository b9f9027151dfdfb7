"""Asking an engine over HTTP: JSON, texts and events, within bounds of time and size. Whatever goes
wrong is one line with a code and what to do; no line holds a key."""

from __future__ import annotations

import json
import re
import ssl
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import httpx

from draftwell.components.engines.failures import one_line
from draftwell.components.engines.remote.address import KEY_VARIABLE, EngineAddress
from draftwell.serving.errors import DraftwellError

CONNECT_SECONDS = 10.0
QUESTION_SECONDS = 20.0
"""For what an engine says of itself, and its metrics."""
ANSWER_SECONDS = 600.0
"""For an answer, from the request to its last token."""
WAIT_SECONDS = 60.0
"""How long a request that is refused because the engine is busy (429) is tried again."""
KEPT_SECONDS = 2.0
"""For which an idle connection is used again; servers close them after 5 s."""
CONNECTIONS = 512
MOST_BYTES = 64 << 20
"""Of an answer."""
ABSENT = (404, 405, 501)
"""Statuses of a path that a server does not have."""
PASSING = (502, 503, 504)
"""Statuses of a proxy whose server is unavailable, or of a server that does not serve yet."""
TOO_LONG = ("context length", "context size", "maximum context", "max_model_len", "longer than the")
"""How engines word a prompt that they have no room for."""

Json = dict[str, Any]
Event = tuple[float, Json]
"""Seconds after the request was sent, and what came."""


class EngineClient:
    """Connections to an engine; several threads may ask at once.

    Args:
        address: where it is.
        answer_seconds: bound for a whole answer.
        sleep: waits; tests replace it.
    Raises:
        DraftwellError: (of every method) unreachable (`engine_unreachable`), TLS (`engine_tls`), no
            answer in time (`engine_timeout`), key (`engine_key`), redirect (`engine_redirect`), a
            proxy's answer or a server that does not serve yet (`engine_unavailable`), busy for too
            long (`engine_busy`), an unknown model (`engine_model`), too long a prompt
            (`context_too_long`), a path that it does not have (`engine_no_path`), another refusal
            (`engine_refused`), an answer that ended early (`engine_broke_off`) or that is not JSON
            (`engine_bad_answer`).
    """

    def __init__(
        self,
        address: EngineAddress,
        *,
        answer_seconds: float = ANSWER_SECONDS,
        question_seconds: float = QUESTION_SECONDS,
        wait_seconds: float = WAIT_SECONDS,
        sleep: Callable[[float], None] = time.sleep,
    ):
        self.address = address
        self.model_name: str | None = None
        """The name that requests give to the model, once it was asked for."""
        self.answer_seconds, self.question_seconds = answer_seconds, question_seconds
        self.wait_seconds, self._sleep = wait_seconds, sleep
        headers = dict(address.headers)
        if address.key is not None:
            headers["Authorization"] = f"Bearer {address.key}"
        self._http = httpx.Client(
            base_url=address.url,
            headers=headers,
            verify=trusted(address),
            follow_redirects=False,
            limits=httpx.Limits(
                max_connections=CONNECTIONS,
                max_keepalive_connections=CONNECTIONS,
                keepalive_expiry=KEPT_SECONDS,
            ),
        )

    @property
    def url(self) -> str:
        """Where it asks."""
        return self.address.url

    def close(self) -> None:
        """Close all connections; the engine runs on."""
        self._http.close()

    def find(self, path: str) -> Json | None:
        """The JSON object of a path; None where the server has no such path, or answers with
        something else."""
        text = self.find_text(path)
        return None if text is None else object_in(text)

    def find_text(self, path: str) -> str | None:
        """The text of a path; None where the server has no such path."""
        with self._answer("GET", path, None, self.question_seconds) as (response, deadline):
            if response.status_code in ABSENT:
                return None
            self._check(response, deadline)
            return self._read(response, deadline)

    def ask(self, path: str, body: Mapping[str, Any]) -> Json:
        """The JSON object that a request is answered with."""
        with self._asked(path, body) as (response, deadline):
            text = self._read(response, deadline)
        found = object_in(text)
        if found is None:
            raise self._no_json(text)
        return found

    def try_to_ask(self, path: str, body: Mapping[str, Any]) -> Json | None:
        """What a request is answered with; None where the server has no such path."""
        try:
            return self.ask(path, body)
        except DraftwellError as error:
            if error.code in ("engine_no_path", "engine_bad_answer"):
                return None
            raise

    def events(self, path: str, body: Mapping[str, Any]) -> Iterator[Event]:
        """What a request is answered with, event by event (SSE); one JSON object is one event."""
        begun = time.perf_counter()
        with self._asked(path, body) as (response, deadline):
            if "event-stream" not in response.headers.get("content-type", ""):
                text = self._read(response, deadline)
                found = object_in(text)
                if found is None:
                    raise self._no_json(text)
                yield time.perf_counter() - begun, found
                return
            for line in self._lines(response, deadline):
                if not line.startswith("data:"):
                    continue
                data = line.removeprefix("data:").strip()
                if data == "[DONE]":
                    return
                event = object_in(data)
                if event is None:
                    raise self._no_json(line)
                if "error" in event:
                    raise self._refused(200, said_in(event))
                yield time.perf_counter() - begun, event

    @contextmanager
    def _asked(self, path: str, body: Mapping[str, Any]) -> Iterator[tuple[httpx.Response, float]]:
        """The accepted answer to a request; one that is refused for load is sent again."""
        waited, pause = 0.0, 1.0
        while True:
            with self._answer("POST", path, body, self.answer_seconds) as (response, deadline):
                if response.status_code != httpx.codes.TOO_MANY_REQUESTS:
                    self._check(response, deadline)
                    yield response, deadline
                    return
                named = response.headers.get("retry-after", "")
                pause = max(float(named), 1.0) if named.isdecimal() else pause
            if waited + pause > self.wait_seconds:
                raise DraftwellError(
                    f"{self.url} is busy: it refused a request for {waited:g} s and asks to wait "
                    f"{pause:g} s more: ask for fewer requests at once, or later",
                    code="engine_busy",
                )
            self._sleep(pause)
            waited, pause = waited + pause, 2 * pause

    @contextmanager
    def _answer(
        self, method: str, path: str, body: Mapping[str, Any] | None, seconds: float
    ) -> Iterator[tuple[httpx.Response, float]]:
        """The beginning of an answer, and the time (`perf_counter`) at which it has to be whole;
        what goes wrong until the block is left is one line."""
        deadline = time.perf_counter() + seconds
        timeout = httpx.Timeout(seconds, connect=min(CONNECT_SECONDS, seconds))
        started = False
        try:
            with self._open(method, path, body, timeout) as response:
                started = True
                yield response, deadline
        except httpx.TimeoutException as error:
            raise self._late(seconds, connecting=isinstance(error, httpx.ConnectTimeout)) from error
        except httpx.ConnectError as error:
            raise self._unreachable(error) from error
        except (httpx.TransportError, httpx.DecodingError, httpx.InvalidURL) as error:
            raise self._broke(error, started) from error

    @contextmanager
    def _open(
        self, method: str, path: str, body: Mapping[str, Any] | None, timeout: httpx.Timeout
    ) -> Iterator[httpx.Response]:
        """The beginning of an answer. A server may close a kept connection in the moment in which
        it is used again: then the request is sent once more."""
        request = self._http.build_request(method, path, json=body, timeout=timeout)
        try:
            response = self._http.send(request, stream=True)
        except (httpx.RemoteProtocolError, httpx.ReadError, httpx.WriteError):
            response = self._http.send(request, stream=True)
        try:
            yield response
        finally:
            response.close()

    def _read(self, response: httpx.Response, deadline: float) -> str:
        return "\n".join(self._lines(response, deadline))

    def _lines(self, response: httpx.Response, deadline: float) -> Iterator[str]:
        """The lines of an answer, while there is time and room: a line may be without an end."""
        size, rest = 0, bytearray()
        for part in response.iter_bytes():
            size += len(part)
            if time.perf_counter() > deadline:
                raise httpx.ReadTimeout("the answer is not whole in time")
            if size > MOST_BYTES:
                raise DraftwellError(
                    f"{self.url} answered more than {MOST_BYTES >> 20} MiB: check the address",
                    code="engine_bad_answer",
                )
            rest += part
            if b"\n" in part:
                *lines, rest = rest.split(b"\n")
                yield from (line.decode(errors="replace").rstrip("\r") for line in lines)
        yield rest.decode(errors="replace")

    def _check(self, response: httpx.Response, deadline: float) -> None:
        """Raise what a status means, unless it is 200."""
        status = response.status_code
        if status == httpx.codes.OK:
            return
        if 300 <= status < 400:
            raise DraftwellError(
                f"{self.url} redirects to {one_line(response.headers.get('location', '?'))}: name "
                "that address, if you trust it",
                code="engine_redirect",
            )
        text = self._read(response, deadline)
        found = object_in(text)
        raise self._refused(status, said_in(found) if found is not None else page_title(text))

    def _refused(self, status: int, said: str) -> DraftwellError:
        """The error for a status and what the server says to it."""
        how = f"{self.url} answered {status}" + (f" ({said})" if said else "")
        if status in (401, 403):
            had = "refuses the key" if self.address.key is not None else "wants a key"
            return DraftwellError(
                f"{self.url} {had} ({status}): name another by {KEY_VARIABLE} or --set "
                f"engine_key_file=…",
                code="engine_key",
            )
        if status in PASSING:
            return DraftwellError(
                f"{how}: it does not serve yet, or a proxy does not reach it; look at its log",
                code="engine_unavailable",
            )
        if any(words in said.lower() for words in TOO_LONG):
            return DraftwellError(
                f"{how}: leave out the longest prompts, or ask for fewer tokens",
                code="context_too_long",
            )
        if status == httpx.codes.NOT_FOUND and "model" in said.lower():
            return DraftwellError(
                f"{how}: name a model that it serves with --set engine_model=…", code="engine_model"
            )
        return DraftwellError(
            f"{how}: look at its log, or leave out what it refuses",
            code="engine_no_path" if status in ABSENT else "engine_refused",
        )

    def _late(self, seconds: float, *, connecting: bool = False) -> DraftwellError:
        what = "let nobody connect" if connecting else "gave no whole answer"
        seconds = min(seconds, CONNECT_SECONDS) if connecting else seconds
        return DraftwellError(
            f"{self.url} {what} within {seconds:g} s: look whether it still works, or ask for "
            "less at once",
            code="engine_timeout",
        )

    def _unreachable(self, error: Exception) -> DraftwellError:
        if (failed := tls_failure(error)) is not None:
            mend = "name its certificates with --set engine_ca=…"
            if not failed.startswith("certificate"):
                mend = "does it speak http instead of https?"
            return DraftwellError(
                f"{self.url}: no connection by TLS ({one_line(failed)}): {mend}", code="engine_tls"
            )
        return DraftwellError(
            f"{self.url} cannot be reached ({one_line(str(error))}): start the engine, or check "
            "host and port",
            code="engine_unreachable",
        )

    def _broke(self, error: Exception, started: bool) -> DraftwellError:
        if started:
            return DraftwellError(
                f"{self.url} broke off in the middle of an answer ({one_line(str(error))}): look "
                "at its log, then run the same again",
                code="engine_broke_off",
            )
        return DraftwellError(
            f"{self.url} closed the connection without an answer ({one_line(str(error))}): does "
            "it speak https instead of http, or has it just ended?",
            code="engine_unreachable",
        )

    def _no_json(self, text: str) -> DraftwellError:
        return DraftwellError(
            f"{self.url} answered {page_title(text)!r} where JSON was expected: check the address; "
            "a proxy or another program may answer there",
            code="engine_bad_answer",
        )


def trusted(address: EngineAddress) -> ssl.SSLContext | bool:
    """What certificates are checked against."""
    if address.ca is None:
        return True
    try:
        return ssl.create_default_context(cafile=str(address.ca))
    except (ssl.SSLError, OSError) as error:
        raise DraftwellError(
            f"--set engine_ca={address.ca}: it holds no certificates in PEM: name another file",
            code="bad_engine_address",
        ) from error


def object_in(text: str) -> Json | None:
    """The JSON object that a text is; None where it is something else."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def said_in(answer: Mapping[str, Any]) -> str:
    """The message of a refusal, as OpenAI, FastAPI and llama.cpp write it.

    >>> said_in({"error": {"message": "no such model", "code": 404}}), said_in({"detail": "no"})
    ('no such model', 'no')
    """
    error = answer.get("error", answer)
    if isinstance(error, dict):
        error = error.get("message") or error.get("detail") or ""
    return one_line(str(error))


def page_title(text: str) -> str:
    """The beginning of a text, without the tags of a page."""
    return one_line(re.sub(r"<(script|style)\b.*?</\1>|<[^>]*>", " ", text, flags=re.S)[:2000], 80)


def tls_failure(error: BaseException | None) -> str | None:
    """What went wrong with TLS, in the causes of an error; None where nothing did."""
    while error is not None:
        if isinstance(error, ssl.SSLError):
            if isinstance(error, ssl.SSLCertVerificationError):
                return f"certificate: {error.verify_message}"
            return str(error.reason or error)
        error = error.__cause__ or error.__context__
    return None
