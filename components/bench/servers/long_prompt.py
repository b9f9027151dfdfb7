"""What answers that are being written feel when somebody sends a long prompt: the time between
their tokens, before and meanwhile."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Generator, Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import cycle, islice, pairwise
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from draftwell.components.bench.servers.processes import Server
from draftwell.components.prompts.prompt import Prompt
from draftwell.components.report.tables import number, rich_table
from draftwell.serving.errors import DraftwellError

if TYPE_CHECKING:
    from rich.table import Table

COLUMNS = (
    "server",
    "clients",
    "before, ms",
    "p99 before, ms",
    "meanwhile, ms",
    "p99, ms",
    "p99 / before",
    "TTFT of the long prompt, s",
)
STEADY_SECONDS = 8.0
"""For so long the clients are alone; then the long prompt is sent."""
ANSWER_TOKENS = 200
LIMIT_SECONDS = 300


@dataclass(frozen=True)
class Stall:
    """Milliseconds between two parts of an answer: median and 99th percentile before the long
    prompt, and while it is read. Pauses have a tail before it, too, in which others' short prompts
    are read."""

    server: str
    clients: int
    before_ms: float
    before_p99_ms: float
    median_ms: float
    p99_ms: float
    ttft_seconds: float


def text_of(prompts: Sequence[Prompt], tokens: int, tokenizer: Path) -> str:
    """The prompts one after another, again and again, up to so many tokens."""
    from tokenizers import Tokenizer

    known = Tokenizer.from_file(str(tokenizer / "tokenizer.json"))
    words = "\n".join(prompt.prompt for prompt in prompts)
    ids = known.encode(words).ids
    return str(known.decode(list(islice(cycle(ids), tokens))))


def stall(
    server: Server,
    clients: int,
    prompts: Sequence[Prompt],
    long_prompt: str,
    *,
    steady_seconds: float = STEADY_SECONDS,
) -> Stall:
    """Let `clients` read answers all the while, send the long prompt, and stop at its first token.

    Raises:
        DraftwellError: the server refused a request, or no answer was being written
            (`load_test_failed`).
    """
    arrivals: list[list[float]] = []
    over = threading.Event()
    failed: list[Exception] = []

    def client(number: int) -> None:
        for prompt in islice(cycle(prompts), number, None):
            times: list[float] = []
            arrivals.append(times)
            try:
                with closing(parts(server, prompt.prompt, ANSWER_TOKENS)) as answer:
                    for _ in answer:
                        times.append(time.monotonic())
                        if over.is_set():
                            return
            except Exception as error:  # told by the caller
                failed.append(error)
            if failed or over.is_set():
                return

    threads = [threading.Thread(target=client, args=(i,), daemon=True) for i in range(clients)]
    for thread in threads:
        thread.start()
    over.wait(steady_seconds)
    sent = time.monotonic()
    try:
        with closing(parts(server, long_prompt, 4)) as answer:
            next(answer)
    except Exception as error:  # told below
        failed.append(error)
    read = time.monotonic()
    over.set()
    for thread in threads:
        thread.join(LIMIT_SECONDS)
    if failed:
        raise DraftwellError(
            f"{server.label} failed: {failed[0]}; see {server.log}", code="load_test_failed"
        ) from failed[0]
    return summary(server.label, clients, arrivals, sent, read)


def summary(
    label: str, clients: int, arrivals: Sequence[Sequence[float]], sent: float, read: float
) -> Stall:
    """The row of one trial.

    Args:
        arrivals: of each answer, the times at which its parts arrived.
        sent, read: when the long prompt was sent and when its first token arrived.
    """
    pairs = [(a, b) for times in list(arrivals) for a, b in pairwise(times)]
    before = [b - a for a, b in pairs if b < sent]
    # a pause that begins while the prompt is read counts, also if it ends with the last part after
    # it
    meanwhile = [b - a for a, b in pairs if b >= sent and a <= read]
    if not before or not meanwhile:
        raise DraftwellError(
            f"{label}: no answer was being written before or while the long prompt was read",
            code="load_test_failed",
        )
    (usual, usual_p99), (middle, p99) = (
        1e3 * np.quantile(gaps, [0.5, 0.99]) for gaps in (before, meanwhile)
    )
    return Stall(label, clients, usual, usual_p99, middle, p99, read - sent)


def parts(server: Server, prompt: str, max_tokens: int) -> Generator[str, None, None]:
    """The text of an answer, part by part as it is streamed."""
    body = {
        "messages": [{"role": "user", "content": prompt}],
        "max_tokens": max_tokens,
        "temperature": 0,
        "stream": True,
    }
    with server.post("/v1/chat/completions", body, LIMIT_SECONDS) as answer:
        for line in answer:
            if not line.startswith(b"data: ") or line.startswith(b"data: [DONE]"):
                continue
            choices = json.loads(line[6:]).get("choices") or [{}]
            if text := choices[0].get("delta", {}).get("content"):
                yield text


def stall_table(rows: Sequence[Stall], caption: str) -> Table:
    """The rows as a table for the terminal."""
    figures = [
        [
            number(one, ".0f")
            for one in (row.before_ms, row.before_p99_ms, row.median_ms, row.p99_ms)
        ]
        for row in rows
    ]
    cells = [
        [
            row.server,
            str(row.clients),
            *found,
            number(row.p99_ms / row.before_ms, ".2f"),
            number(row.ttft_seconds, ".2f"),
        ]
        for row, found in zip(rows, figures, strict=True)
    ]
    return rich_table(COLUMNS, cells, caption)
