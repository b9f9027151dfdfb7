"""A load test of our own, for machines without vLLM: so many clients, each with its next request as
soon as it has read an answer."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from draftwell.components.bench.servers.load_test import Row
from draftwell.components.bench.servers.processes import Server
from draftwell.components.prompts.prompt import Prompt

LIMIT_SECONDS = 120


@dataclass(frozen=True)
class Answer:
    """One answer as its client saw it: seconds to the first part and to the end, and its tokens."""

    first: float
    seconds: float
    tokens: int


def ask_closed_loop(
    server: Server, clients: int, prompts: Sequence[Prompt], max_tokens: int
) -> Row:
    """Send every prompt once, `clients` at a time; the server must be running.

    Requests that fail are counted in the row; time counts from the first request to the last
    answer.
    """
    start = time.perf_counter()
    with ThreadPoolExecutor(clients) as pool:
        found = list(pool.map(lambda prompt: _try(server, prompt, max_tokens), prompts))
    seconds = time.perf_counter() - start
    answers = [one for one in found if one is not None]
    paces = [(one.seconds - one.first) / (one.tokens - 1) for one in answers if one.tokens > 1]
    return Row(
        server.label,
        clients,
        sum(one.tokens for one in answers) / seconds,
        _median_ms([one.first for one in answers]),
        _median_ms(paces),
        len(answers),
        len(found) - len(answers),
    )


def load_rows(
    server: Server,
    clients: Sequence[int],
    prompts: Sequence[Prompt],
    max_tokens: int,
    after: Callable[[list[Row]], object],
) -> list[Row]:
    """A row for each number of clients, after a request that nothing is measured of.

    Args:
        after: called with all rows so far as soon as there is another.
    """
    rows: list[Row] = []
    with server.running():
        ask_closed_loop(server, 1, prompts[:1], max_tokens)
        for count in clients:
            rows.append(ask_closed_loop(server, count, prompts, max_tokens))
            after(rows)
    return rows


def _try(server: Server, prompt: Prompt, max_tokens: int) -> Answer | None:
    """An answer, None where the request failed."""
    try:
        return _ask(server, prompt, max_tokens)
    except Exception:  # of the connection, of HTTP, of an answer of another shape
        return None


def _ask(server: Server, prompt: Prompt, max_tokens: int) -> Answer:
    """One greedy answer, read as a stream whose last part counts its tokens."""
    body = {
        "messages": [{"role": "user", "content": prompt.prompt}],
        "max_tokens": max_tokens,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    start, first = time.perf_counter(), None
    usage: dict[str, Any] = {}
    with server.post("/v1/chat/completions", body, LIMIT_SECONDS) as answer:
        for line in answer:
            if not line.startswith(b"data: ") or line.startswith(b"data: [DONE]"):
                continue
            part = json.loads(line[6:])
            usage = part.get("usage") or usage
            if first is None and (part.get("choices") or [{}])[0].get("delta", {}).get("content"):
                first = time.perf_counter() - start
    seconds = time.perf_counter() - start
    return Answer(seconds if first is None else first, seconds, usage["completion_tokens"])


def _median_ms(seconds: Sequence[float]) -> float:
    """The median in milliseconds; 0 of nothing."""
    return 1e3 * statistics.median(seconds) if seconds else 0.0
