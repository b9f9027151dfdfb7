"""The load test of servers, with a fake of `vllm bench serve`: turns, rest, medians, the table, and
errors."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
import typer
from typer.testing import CliRunner

from draftwell.components.bench.servers import __main__ as command, load_test
from draftwell.components.bench.servers.__main__ import commands, names, numbers
from draftwell.components.bench.servers.load_test import (
    LoadTest,
    Row,
    compare,
    failures,
    load_table,
    median_of,
)
from draftwell.components.bench.servers.long_prompt import Stall
from draftwell.components.bench.servers.processes import Server
from draftwell.components.prompts.prompt import Prompt
from draftwell.serving.server.settings import ServerSettings
from tests.support.errors import raises_code
from tests.support.paths import REPO
from tests.support.peers.environments import install, is_stopped
from tests.support.server.server_process import wait_until

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")

SUPPORT = REPO / "tests" / "support" / "peers"
COMMAND = [sys.executable, str(SUPPORT / "fake_server.py")]
PROMPTS = [Prompt("a", None, ["one"]), Prompt("b", None, ["two", "and then?"])]


@pytest.fixture
def servers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Server]]:
    install(tmp_path / "peers", monkeypatch, ("vllm",))
    monkeypatch.setattr(load_test, "VLLM_COMMAND", SUPPORT / "fake_vllm_command.py")
    made = [Server(label, COMMAND, tmp_path / f"{label}.log") for label in ("ours", "theirs")]
    yield made
    for server in made:
        server.close()


def test_servers_are_asked_in_turn_and_rest_otherwise(
    servers: list[Server], tmp_path: Path
) -> None:
    rows = compare(servers, [1, 8], LoadTest(PROMPTS, 16, tmp_path, tmp_path), rounds=2)
    asked = [json.loads(line) for line in (tmp_path / "asked.jsonl").read_text().splitlines()]
    ours, theirs = (server.url for server in servers)
    assert [(url, clients) for url, clients, _ in asked] == [
        (ours, 1),
        (theirs, 1),
        (theirs, 8),
        (ours, 8),
        (theirs, 1),
        (ours, 1),
        (ours, 8),
        (theirs, 8),
    ]
    assert all(prompts == ["one", "two"] for _, _, prompts in asked)
    assert [
        (row.server, row.clients, row.tokens_per_second, row.completed, row.failed) for row in rows
    ] == [
        ("ours", 1, 1.0, 2, 2),
        ("theirs", 1, 1.0, 2, 2),
        ("ours", 8, 8.0, 2, 2),
        ("theirs", 8, 8.0, 2, 2),
    ]
    for server in servers:
        wait_until(lambda: is_stopped(server.group.pid), f"{server.label} goes on")  # noqa: B023


def test_servers_get_the_same_random_prompts_and_each_run_others(
    servers: list[Server], tmp_path: Path
) -> None:
    rows = compare(
        servers,
        [8],
        LoadTest(PROMPTS, 16, tmp_path, tmp_path, ["random", "prefix_repetition"]),
        rounds=2,
    )
    asked = [json.loads(line)[2] for line in (tmp_path / "asked.jsonl").read_text().splitlines()]
    assert (
        asked[::2]
        == asked[1::2]
        == [
            [f"{name} 16 {seed}"] * 2
            for seed, name in enumerate(["random", "prefix_repetition"] * 2)
        ]
    )
    assert [(row.dataset, row.server) for row in rows] == [
        (name, server) for name in ("random", "prefix_repetition") for server in ("ours", "theirs")
    ]
    assert failures(rows) == [
        f"2 of 4 requests failed: {row.server}, {row.dataset}, 8 at once" for row in rows
    ]


def test_prompts_with_a_common_beginning_are_as_many_as_asked(
    servers: list[Server], tmp_path: Path
) -> None:
    """vLLM sends as many of each beginning, and drops a remainder without a word."""
    compare(servers[:1], [8], LoadTest(PROMPTS * 5, 16, tmp_path, tmp_path, ["prefix_repetition"]))
    assert len(json.loads((tmp_path / "asked.jsonl").read_text())[2]) == 10


def test_a_failed_request_is_exit_code_1(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever runs it in a script should not have to read the table."""
    (tmp_path / "config.json").write_text("{}")
    install(tmp_path / "peers", monkeypatch, ("vllm",))
    bundle = SimpleNamespace(
        path=tmp_path / "bundle",
        manifest=SimpleNamespace(pair="tiny", dtype="float32"),
        files=lambda root: SimpleNamespace(target=tmp_path),
    )
    monkeypatch.setattr(command, "open_bundle", lambda folder: bundle)
    monkeypatch.setattr(command, "Server", lambda label, *args, **options: Idle(label))
    monkeypatch.setattr(command, "text_of", lambda *args: "text")
    monkeypatch.setattr(command, "stall", lambda *args: Stall("ours", 8, 1.0, 1.0, 1.0, 1.0, 1.0))
    app = typer.Typer()
    app.command()(command.main)
    for failed, code in ((0, 0), (2, 1)):
        rows = [Row("ours", 8, 1.0, 1.0, 1.0, 4, failed, "random")]
        monkeypatch.setattr(command, "compare", lambda *args, rows=rows, **options: rows)
        done = CliRunner().invoke(
            app, ["--bundle", str(tmp_path), "--clients", "8", "--datasets", "random"]
        )
        assert done.exit_code == code, done.output
        assert ("2 of 6 requests failed: ours, random, 8 at once" in done.stderr) == bool(failed)
    seen, out = list[int](), tmp_path / "rows.json"

    def broken(
        servers: list[Idle], *args: object, after: Callable[[Row], None], **options: object
    ) -> None:
        seen.append(len(servers))
        after(rows[0])
        raise KeyboardInterrupt

    monkeypatch.setattr(command, "compare", broken)
    done = CliRunner().invoke(app, ["--bundle", str(tmp_path), "--alone", "--json", str(out)])
    assert (done.exit_code, seen) == (130, [1])
    assert "random, 8 at once, ours: 1.0 tokens/s, 4 of 6 answered" in done.stderr
    assert [row["failed"] for row in json.loads(out.read_text())["rows"]] == [2], (
        "what was measured is kept"
    )


class Idle:
    """A server that is not asked."""

    def __init__(self, label: str):
        self.label = label

    @contextmanager
    def running(self) -> Iterator[None]:
        yield

    def close(self) -> None:
        pass


def test_no_server_has_a_prefix_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ours would read a prompt once in all runs, theirs every time."""
    install(tmp_path / "peers", monkeypatch, ("vllm",))
    (tmp_path / "config.json").write_text("{}")
    bundle = SimpleNamespace(
        path=tmp_path / "bundle", manifest=SimpleNamespace(pair="tiny", dtype="float32")
    )
    ours, *theirs = [
        command for _, command, _ in commands(bundle, tmp_path, 8, prefix_caching=False)
    ]  # type: ignore[arg-type]
    options = ours[ours.index("--bundle") :]
    chosen = {
        name.removeprefix("--").replace("-", "_"): value
        for name, value in zip(options[::2], options[1::2], strict=True)
    }
    assert chosen["prefix_caching"] == "off"
    assert set(chosen) <= set(ServerSettings.model_fields), "options that the server has"
    assert len(theirs) == 2
    assert all("--no-enable-prefix-caching" in command for command in theirs)
    ours, *theirs = [
        command for _, command, _ in commands(bundle, tmp_path, 8, prefix_caching=True)
    ]  # type: ignore[arg-type]
    assert ours[ours.index("--prefix-caching") + 1] == "tenant"
    assert all("--enable-prefix-caching" in command for command in theirs)


def test_only_the_one_that_is_asked_runs(servers: list[Server]) -> None:
    with servers[0].running():
        wait_until(lambda: not is_stopped(servers[0].group.pid), "it does not run")
        wait_until(lambda: is_stopped(servers[1].group.pid), "the other one runs")
    wait_until(lambda: is_stopped(servers[0].group.pid), "it goes on")


def test_a_failed_test_is_named_in_a_line(servers: list[Server], tmp_path: Path) -> None:
    with raises_code("load_test_failed", "ours", "model") as caught:
        compare(servers, [13], LoadTest(PROMPTS, 16, tmp_path, tmp_path))
    assert "\n" not in str(caught.value)


def test_a_server_that_does_not_start_is_named(tmp_path: Path) -> None:
    with raises_code("server_failed", "vllm serve", "exit code 1", "no bundle"):
        Server("vllm serve", [*COMMAND, "--fail"], tmp_path / "log")


def test_medians_and_ratios() -> None:
    rows = [Row("ours", 8, speed, 10.0, 2.0, 4, 0) for speed in (10.0, 30.0, 20.0)]
    assert median_of(rows) == Row("ours", 8, 20.0, 10.0, 2.0, 12, 0)
    table = load_table(
        [
            rows[2],
            Row("theirs", 8, 30.0, 10.0, 2.0, 3, 1),
            Row("theirs", 8, 40.0, 10.0, 2.0, 4, 0, "random"),
        ],
        "caption",
    )
    cells = [list(column.cells) for column in table.columns]
    assert [str(cell) for cell in cells[0]] == ["custom", "custom", "random"]
    assert [str(cell) for cell in cells[4]] == ["1.00", "1.50", "1.00"]
    assert [str(cell) for cell in cells[7]] == ["4 of 4", "3 of 4", "4 of 4"]


@pytest.mark.parametrize(
    ("text", "cached", "named"),
    [
        ("sharegpt", False, "prefix_repetition"),
        ("", False, "custom"),
        ("random,custom", True, "repeat"),
    ],
)
def test_wrong_data_sets_are_refused(text: str, cached: bool, named: str) -> None:
    with raises_code("bad_datasets", named):
        names(text, prefix_caching=cached)


@pytest.mark.parametrize("text", ["", "0", "1,x", "1;8"])
def test_wrong_numbers_of_clients_are_refused(text: str) -> None:
    with raises_code("bad_clients", "1,8,32"):
        numbers(text)
