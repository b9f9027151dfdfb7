"""Our own load test: against a running server, and with requests that it refuses."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from draftwell.components.bench.servers import closed_loop
from draftwell.components.bench.servers.closed_loop import Answer, ask_closed_loop, load_rows
from draftwell.components.bench.servers.processes import Server
from draftwell.components.prompts.prompt import Prompt
from tests.support.server.served_pair import served_pair, serving


def running_server(url: str) -> Any:
    """A server of which only the address is known."""
    server: Any = SimpleNamespace(label="ours", url=url, model="tiny", running=nullcontext)
    server.post = partial(Server.post, server)
    return server


PROMPTS = [Prompt(str(i), None, [text]) for i, text in enumerate(["one two", "three", "four five"])]


def test_every_answer_is_counted_with_its_tokens() -> None:
    seen = []
    with serving(served_pair("autoregressive", slots=3)) as (url, _):
        server = running_server(url)
        rows = load_rows(server, (1, 3), PROMPTS, 4, lambda rows: seen.append(len(rows)))
        broken = ask_closed_loop(server, 2, [*PROMPTS, Prompt("x", None, ["one " * 5000])], 4)
    assert [(row.clients, row.completed, row.failed) for row in rows] == [(1, 3, 0), (3, 3, 0)]
    assert seen == [1, 2], "a row is there as soon as it is measured"
    assert all(row.tokens_per_second > 0 and row.ttft_ms > 0 for row in rows)
    assert (broken.completed, broken.failed) == (3, 1)


def test_the_figures_are_those_of_the_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    """10 tokens in 1 s of which the first came after .1 s, twice, in 2 s."""
    ticks = iter([0.0, 2.0])
    monkeypatch.setattr(closed_loop.time, "perf_counter", lambda: next(ticks))
    monkeypatch.setattr(closed_loop, "_ask", lambda *asked: Answer(0.1, 1.0, 10))
    row = ask_closed_loop(running_server("http://127.0.0.1:1"), 1, PROMPTS[:2], 10)
    assert (row.tokens_per_second, round(row.ttft_ms), round(row.tpot_ms)) == (10.0, 100, 100)
