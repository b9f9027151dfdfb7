"""`--engine vllm`: tune, gate, bench and collect over a fake vLLM in a process of its own; what is
kept, what resumes, what is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest


def line(done: Any) -> str:
    assert done.exit_code == 2, (done.output, done.exception)
    return str(done.stderr.strip().splitlines()[-1])


def test_sampled_requests_have_a_choice_of_their_own(
    vllm: Callable[..., Any], folder: Path, more: Path
) -> None:
    for options in ((), ("--temperature", 0.7)):
        assert vllm("tune", "--methods", "draft_model", "--limit", 8, *options).exit_code == 0
    greedy, sampled = (
        json.loads((folder / name).read_text()) for name in ("tuned.json", "tuned-t0.7.json")
    )
    assert (greedy["temperature"], sampled["temperature"]) == (0.0, 0.7)
    judged = vllm("gate", "--prompts", more)
    assert "at temperature 0.7" in judged.output
    records = [json.loads((folder / name).read_text()) for name in ("gate.json", "gate-t0.7.json")]
    assert [record["temperature"] for record in records] == [0.0, 0.7]
    assert [
        any("outputs" in check["name"] for check in record["checks"]) for record in records
    ] == [True, False]


def test_tune_gate_and_what_is_kept(
    vllm: Callable[..., Any], folder: Path, more: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "draftwell tune --engine vllm" in line(vllm("gate"))
    done = vllm("tune", "--methods", "draft_model", "--limit", 8, "--levels", "1,2")
    assert done.exit_code == 0, (done.output, done.exception)
    assert "chosen: draft_model(k=2)" in done.stdout
    document = json.loads((folder / "tuned.json").read_text())
    settings = document["exports"]["vllm"]
    assert (settings["method"], settings["num_speculative_tokens"]) == ("draft_model", 2)
    assert document["exports"]["tensorrt_llm"] == {
        "max_draft_len": 2,
        "draft_len_schedule": {"1": 2, "2": 2},
    }
    assert len(document["prompt_hashes"]) == 8
    again = vllm("tune", "--methods", "draft_model", "--limit", 8, "--levels", "1,2")
    assert "are reused" in again.stderr
    assert vllm("gate", "--dry-run").exit_code == 3  # four prompts are left
    judged = vllm("gate", "--prompts", more)
    assert judged.exit_code == 0, (judged.output, judged.exception)
    record = json.loads((folder / "gate.json").read_text())
    assert record["passed"]
    assert record["settings"] == settings
    assert [check["name"] for check in record["checks"]][:2] == [
        f"speed over plain decoding, {load} at once" for load in (1, 2)
    ]
    monkeypatch.setenv("FAKE_PEER_FAULT", "die@draft_model")
    assert vllm("gate", "--prompts", more, "--dry-run").exit_code == 2
    assert (folder / "gate.json").exists()
    assert vllm("gate", "--prompts", more).exit_code == 2
    assert not (folder / "gate.json").exists()
    (folder / "gate.json").touch()
    monkeypatch.setenv("FAKE_PEER_FAULT", "")
    assert vllm("tune", "--methods", "draft_model", "--limit", 8, "--levels", "1,2").exit_code == 0
    assert not (folder / "gate.json").exists()
    monkeypatch.setenv("FAKE_PEER_FAULT", "lossy")
    assert vllm("gate", "--prompts", more, "--dry-run").exit_code == 1
    monkeypatch.setenv("FAKE_PEER_FAULT", "")
    monkeypatch.setenv("FAKE_ENGINE_SPEEDS", json.dumps({"draft_model": 0.85}))
    assert vllm("gate", "--prompts", more, "--dry-run").exit_code == 1
    assert not (folder / "gate.json").exists()


def test_one_that_is_killed_is_a_line_and_the_next_run_resumes(
    vllm: Callable[..., Any], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_PEER_FAULT", "killed@draft_model")
    said = line(vllm("tune", "--methods", "ngram,draft_model", "--limit", 8))
    assert said.startswith("Error: vllm/draft_model(k=3) was ended by signal 9")
    assert not (folder / "tuned.json").exists()
    kept = json.loads((folder / "measurements.json").read_text())["measurements"]
    assert [name for name in kept if "ngram" in name]
    monkeypatch.setenv("FAKE_PEER_FAULT", "")
    done = vllm("tune", "--methods", "ngram,draft_model", "--limit", 8)
    assert done.exit_code == 0, (done.output, done.exception)
    assert f"{len(kept)} measurements" in done.stderr


def test_a_method_that_crashes_while_it_decodes_is_left_out(
    vllm: Callable[..., Any], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_PEER_FAULT", "die@draft_model")
    done = vllm("tune", "--methods", "ngram,draft_model", "--limit", 8)
    assert done.exit_code == 0, (done.output, done.exception)
    assert (
        "left out: draft_model, the engine fails while it decodes with it: "
        "vllm/draft_model(k=3) ended with exit code 3"
    ) in done.stderr
    assert json.loads((folder / "tuned.json").read_text())["choice"]["method"] == "ngram"


def test_bench_and_collect(vllm: Callable[..., Any], folder: Path, tmp_path: Path) -> None:
    done = vllm(
        "bench",
        "--strategies",
        "ngram:k=4:n=2,draft_model",
        "--limit",
        4,
        "--json",
        tmp_path / "r.json",
    )
    assert done.exit_code == 0, (done.output, done.exception)
    figures = json.loads((tmp_path / "r.json").read_text())["figures"]
    assert [figure["label"] for figure in figures] == ["ngram(k=4,n=2)", "draft_model(k=2)"]
    assert figures[1]["ratio"] == pytest.approx(1.6)
    done = vllm("collect", "--method", "ngram", "--limit", 3, "--logprobs", 2)
    assert done.exit_code == 0, (done.output, done.exception)
    rows = [json.loads(row) for row in (folder / "texts.jsonl").read_text().splitlines()][1:]
    assert len(rows) == 3
    assert len(rows[0]["top_logprobs"]) == len(rows[0]["tokens"])


def test_what_does_not_go_together_is_refused(
    vllm: Callable[..., Any],
    run: Any,
    pair_file: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert "--peer" in line(vllm("bench", "--peer", "transformers"))
    assert "--levels" in line(run("tune", "--pair", pair_file, "--levels", "1,4"))
    assert "1,4,16" in line(vllm("tune", "--levels", "1,x"))
    monkeypatch.setenv("DRAFTWELL_PEERS", str(tmp_path / "nothing"))
    assert "make peers" in line(vllm("tune"))
