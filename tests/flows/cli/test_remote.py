"""`--engine URL`: figures and texts of a server that others started; what it lacks is said; keys
are in nothing that is written."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from draftwell.components.engines.remote.address import KEY_VARIABLE
from draftwell.components.engines.texts import rows_of
from tests.support.engines.server import EngineServer, serving
from tests.support.engines.simulated import SimulatedEngine

KEY = "sk-very-secret-4711"
Serve = Callable[..., str]


@pytest.fixture
def served_by(pair_file: Path, own_stores: Path) -> Iterator[Serve]:
    """The URL of a server that splits texts as the pair's target does."""
    tokenizer = AutoTokenizer.from_pretrained(pair_file.parent / "target")

    def split(text: str) -> list[int]:
        found: list[int] = tokenizer.encode(text, add_special_tokens=False)
        return found

    with ExitStack() as stack:

        def serve(speaks: str = "vllm", **more: Any) -> str:
            engine = SimulatedEngine(
                accepts=more.pop("accepts", (0.8, 0.6)),
                step_seconds=more.pop("step_seconds", 0.001),
                split=more.pop("split", split),
            )
            return stack.enter_context(serving(EngineServer(engine, speaks, **more)))

        yield serve


@pytest.fixture
def ask(run: Any, pair_file: Path, prompts_file: Path, own_stores: Path) -> Callable[..., Any]:
    """Runs a command of an engine at a URL."""
    return lambda command, url, *more: run(
        f"{command} --engine {url} --pair {pair_file} --prompts {prompts_file} --set max_tokens=12",
        *more,
    )


def test_bench_beside_a_plain_address(
    ask: Callable[..., Any], served_by: Serve, tmp_path: Path
) -> None:
    plain = served_by(accepts=(), step_seconds=0.004)
    fast = served_by(step_seconds=0.004)
    done = ask("bench", fast, f"--set plain={plain} --set concurrency=1,3 --out {tmp_path}/b.json")
    assert done.exit_code == 0, (done.output, done.exception)
    made = json.loads((tmp_path / "b.json").read_text())
    assert (made["engine"], made["address"], made["remarks"]) == ("vllm", fast, [])
    assert [figure["at_once"] for figure in made["figures"]] == [1, 3]
    for figure in made["figures"]:
        assert figure["beside"]["ratio"] > 1.2
        assert figure["beside"]["low"] <= figure["beside"]["ratio"] <= figure["beside"]["high"]
        first, second = figure["acceptance"]["accepted_at"]
        assert figure["acceptance"]["rounds"] > first > second > 0
        assert figure["first_token_seconds"] > 0
    assert "0.0.1" not in done.stderr


def test_bench_says_what_it_could_not_compare(ask: Callable[..., Any], served_by: Serve) -> None:
    done = ask("bench", served_by("sglang"), "--limit 2")
    assert done.exit_code == 0, (done.output, done.exception)
    assert "nothing was compared with plain decoding" in done.stderr
    done = ask("bench", served_by("llama.cpp", lengths_by_request=True), "--limit 2")
    assert done.exit_code == 0, (done.output, done.exception)
    assert "nothing was compared" not in done.stderr


def test_collect_resumes_and_keeps_no_key(
    ask: Callable[..., Any], served_by: Serve, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "key").write_text(KEY)
    url, file = served_by(key=KEY), tmp_path / "texts.jsonl"
    options = f"--set engine_key_file={tmp_path}/key --set logprobs=2 --set concurrency=1"
    options += f" --set out={file}"
    done = ask("step collect", url, options, "--set limit=4")
    assert done.exit_code == 0, (done.output, done.exception)
    whole = file.read_bytes()
    assert [len(row["tokens"]) for row in rows_of(file)] == [12] * 4
    assert all(row["acceptance"]["accepted_at"] for row in rows_of(file))
    assert all(len(row["top_logprobs"]) == 12 for row in rows_of(file))
    lines = whole.splitlines(keepends=True)
    file.write_bytes(b"".join(lines[:3]) + lines[3][:20])  # killed in the third text
    done = ask("step collect", url, options, "--set limit=4")
    assert done.exit_code == 0, (done.output, done.exception)
    assert [row["tokens"] for row in rows_of(file)[:2]] == [
        json.loads(line)["value"]["tokens"] for line in lines[1:3]
    ]
    monkeypatch.setenv(KEY_VARIABLE, KEY)
    done = ask("step collect", url, f"--set concurrency=1 --set out={file}", "--set limit=3")
    assert done.exit_code == 2
    assert "--set fresh=true" in done.stderr
    written = [path for path in tmp_path.rglob("*") if path.is_file() and path.name != "key"]
    assert not [path for path in written if KEY.encode() in path.read_bytes()]


def test_mistakes_are_one_line(ask: Callable[..., Any], run: Any, served_by: Serve) -> None:
    for command, url, options, told in (
        ("bench", served_by(split=lambda text: [1, 2]), "", "--pair"),
        ("bench", served_by("openai"), "", "without token ids"),
        ("bench", served_by(key=KEY), "", KEY_VARIABLE),
        ("bench", served_by(), "--set plain=ftp://host", "http://HOST:PORT"),
        ("bench", served_by(), "--strategies spide", "--strategies means nothing"),
        (
            "step collect",
            served_by(),
            "--set prefix_kinds=target",
            "--set prefix_kinds means nothing",
        ),
    ):
        limit = "--limit 2" if command == "bench" else "--set limit=2"
        done = ask(command, url, options, limit)
        assert done.exit_code == 2, (command, options, done.output, done.exception)
        last = done.stderr.strip().splitlines()[-1]
        assert last.startswith("Error: ")
        assert told in last
        assert KEY not in done.output
    for words, told in (
        ("bench --set plain=http://host:1", "--set plain means nothing with --engine draftwell"),
    ):
        done = run(words)
        assert done.exit_code == 2
        assert told in done.stderr
