"""The time between tokens while a long prompt is read: on planted times, and against a running
server."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from draftwell.components.bench.servers.long_prompt import Stall, parts, stall, stall_table, summary
from draftwell.components.bench.servers.processes import Server
from draftwell.components.prompts.prompt import Prompt
from tests.support.errors import raises_code
from tests.support.server.served_pair import served_pair, serving

PROMPTS = [Prompt("a", None, ["one two three"]), Prompt("b", None, ["four five"])]


def running_server(url: str) -> Any:
    server: Any = SimpleNamespace(label="ours", url=url, model="tiny", log=Path("log"))
    server.post = partial(Server.post, server)
    return server


def test_a_pause_that_ends_with_the_long_prompt_counts() -> None:
    """The longest pause begins while the prompt is read and ends behind its first token, so a
    window of ends alone misses it."""
    row = summary("ours", 1, [[0.0, 0.1, 0.2, 0.3, 5.3], [0.0, 0.15]], sent=0.25, read=5.2)
    assert row == Stall(
        "ours", 1, *(pytest.approx(figure) for figure in (100.0, 149.0, 2550.0, 4951.0, 4.95))
    )
    cells = [list(column.cells) for column in stall_table([row], "caption").columns]
    assert [str(cells[i][0]) for i in (0, 2, 3, 5, 6)] == ["ours", "100", "149", "4951", "49.51"]


def test_the_99th_percentile_of_a_hundred_pauses_is_not_the_longest() -> None:
    """Pauses of 1 to 100 ms; the longest alone would be a figure of one moment."""
    arrivals = np.cumsum([0.0, *np.arange(1, 101) / 1e3]).tolist()
    row = summary("ours", 1, [[-2.0, -1.9], arrivals], sent=-1.0, read=10.0)
    assert (row.median_ms, row.p99_ms) == (pytest.approx(50.5), pytest.approx(99.01))


def test_no_answers_are_no_figure() -> None:
    with raises_code("load_test_failed", "no answer"):
        summary("ours", 1, [[0.0, 0.1]], sent=0.2, read=0.4)


@pytest.mark.slow
def test_against_a_server() -> None:
    with serving(served_pair("autoregressive", slots=3)) as (url, _):
        server = running_server(url)
        assert len("".join(parts(server, "one two", 5)).split()) >= 1
        row = stall(server, 2, PROMPTS, " ".join(["one"] * 30), steady_seconds=0.5)
    assert (row.server, row.clients) == ("ours", 2)
    assert row.before_ms > 0
    assert row.median_ms <= row.p99_ms


def test_a_refused_request_is_told() -> None:
    with (
        serving(served_pair("autoregressive", slots=3)) as (url, _),
        raises_code("load_test_failed", "ours", "400"),
    ):
        stall(running_server(url), 1, PROMPTS, " ".join(["one"] * 5000), steady_seconds=0.2)
