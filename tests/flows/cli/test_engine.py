"""`--engine vllm`: tune, gate, bench and collect over a fake vLLM in a process of its own; what is
kept, what resumes, what is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from draftwell.components.engines.texts import rows_of
from draftwell.components.export.measured import profile_from
from draftwell.components.export.profile import profile_of, write_profile
from draftwell.registry.store import Store
from tests.support.loop.refusals import line
from tests.support.peers.releases import released, tuned, verdict


def test_sampled_requests_have_a_choice_of_their_own(
    vllm: Callable[..., Any], folder: Path, more: Path
) -> None:
    for options in ((), ("--set", "temperature=0.7")):
        assert vllm("step choose --set methods=draft_model --set limit=8", *options).exit_code == 0
    greedy, sampled = tuned(folder).contents, tuned(folder, sampled=True).contents
    assert (greedy.temperature, sampled.temperature) == (0.0, 0.7)
    judged = vllm(f"gate --prompts {more}")
    assert "at temperature 0.7" in judged.output
    records = [verdict(device=device) for device in ("cpu-vllm", "cpu-vllm-sampled")]
    assert [
        record and any("outputs" in check.name for check in record.checks) for record in records
    ] == [True, False]


def test_tune_gate_and_what_is_kept(
    vllm: Callable[..., Any], folder: Path, more: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "draftwell step choose --engine vllm" in line(vllm("gate"))
    tune = (
        "step choose",
        "--set",
        "methods=draft_model",
        "--set",
        "limit=8",
        "--set",
        "levels=1,2",
    )
    done = vllm(*tune)
    assert done.exit_code == 0, (done.output, done.exception)
    assert "chosen: draft_model(k=2)" in done.stdout
    config, one = tuned(folder), released()
    settings = config.contents.settings
    assert settings is not None
    assert (settings["method"], settings["num_speculative_tokens"]) == ("draft_model", 2)
    assert config.contents.exports["tensorrt_llm"] == {
        "max_draft_len": 2,
        "draft_len_schedule": {"1": 2, "2": 2},
    }
    assert len(config.provenance.training_prompts or ()) == 8
    again = vllm(*tune)
    assert "are reused" in again.stderr
    assert released() == one, "the same choice is the same release"
    assert vllm(f"gate --dry-run --prompts {more}").exit_code == 0
    assert verdict() is None
    assert vllm("gate").exit_code == 3  # four prompts are left
    assert Store().get_aliases("release", "tiny.cpu-vllm") == {"candidate": 1}
    judged = vllm(f"gate --prompts {more}")
    assert judged.exit_code == 0, (judged.output, judged.exception)
    assert Store().get_aliases("release", "tiny.cpu-vllm") == {"candidate": 1, "challenger": 1}
    record = verdict()
    assert record is not None
    assert record.passed
    assert record.prompts == more.name, "promotion asks for a reason then"
    assert [check.name for check in record.checks][:2] == [
        f"speed over plain decoding, {load} at once" for load in (1, 2)
    ]
    monkeypatch.setenv("FAKE_PEER_FAULT", "die@draft_model")
    assert vllm(f"gate --prompts {more}").exit_code == 2
    assert verdict() == record
    monkeypatch.setenv("FAKE_PEER_FAULT", "lossy")
    assert vllm(f"gate --prompts {more} --dry-run").exit_code == 1
    monkeypatch.setenv("FAKE_PEER_FAULT", "")
    monkeypatch.setenv("FAKE_ENGINE_SPEEDS", json.dumps({"draft_model": 0.85}))
    assert vllm(f"gate --prompts {more} --dry-run").exit_code == 1
    assert verdict() == record


def test_the_choice_is_registered_with_figures_and_parents(
    vllm: Callable[..., Any], folder: Path, more: Path
) -> None:
    """One that a person marks is released in the place of a newer one; `publish=false` registers
    nothing."""
    tune = ("step choose", "--set", "methods=draft_model", "--set")
    assert vllm(*tune, "limit=7", "--set", "publish=false").exit_code == 0
    store = Store()
    assert store.versions("engine_config", "tiny") == []
    assert vllm(*tune, "limit=7").exit_code == 0
    assert vllm(*tune, "limit=8").exit_code == 0
    first, second = store.versions("engine_config", "tiny")
    assert store.metrics(second)["speedup"] == pytest.approx(1.6)
    assert (second.tags["strategy"], second.digest) == ("draft_model(k=2)", tuned(folder).digest)
    assert released().pins == {"engine_config": 2}
    assert released().contents.device == "cpu-vllm"
    store.set_alias(first, "picked")  # as a person does in MLflow's UI
    done = vllm(*tune, "limit=8")
    assert "engine_config.tiny version 1, marked in MLflow" in done.stderr
    assert released().pins == {"engine_config": 1}


def test_a_method_that_crashes_while_it_decodes_is_left_out(
    vllm: Callable[..., Any], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_PEER_FAULT", "die@draft_model")
    done = vllm("step choose --set methods=ngram,draft_model --set limit=8")
    assert done.exit_code == 0, (done.output, done.exception)
    assert (
        "left out: draft_model, the engine fails while it decodes with it: "
        "vllm/draft_model(k=3) ended with exit code 3"
    ) in done.stderr
    assert tuned(folder).contents.choice["method"] == "ngram"


def test_bench_and_collect(vllm: Callable[..., Any], folder: Path, tmp_path: Path) -> None:
    done = vllm(
        f"bench --strategies ngram:k=4:n=2,draft_model --limit 4 --out {tmp_path}/r.json",
    )
    assert done.exit_code == 0, (done.output, done.exception)
    figures = json.loads((tmp_path / "r.json").read_text())["figures"]
    assert [figure["label"] for figure in figures] == ["ngram(k=4,n=2)", "draft_model(k=2)"]
    assert figures[1]["ratio"] == pytest.approx(1.6)
    done = vllm("step collect --set method=ngram --set limit=3 --set logprobs=2")
    assert done.exit_code == 0, (done.output, done.exception)
    rows = rows_of(folder / "texts.jsonl")
    assert len(rows) == 3
    assert len(rows[0]["top_logprobs"]) == len(rows[0]["tokens"])


def test_bench_by_category_beside_a_profile_becomes_a_profile(
    vllm: Callable[..., Any], tmp_path: Path
) -> None:
    file, report = tmp_path / "speed.jsonl", tmp_path / "r.json"
    rows = [
        {"question_id": f"q{i}", "category": name, "sub_category": "x", "turns": [f"the {i} man"]}
        for i, name in enumerate(("coding", "math", "math", "coding"))
    ]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    write_profile(tmp_path, profile_of(10, (9, 8), method="draft_model", k=2))
    command = f"bench --strategies draft_model --limit 4 --prompts {file} --out {report}"
    done = vllm(f"{command} --set profile={tmp_path}")
    assert done.exit_code == 0, (done.output, done.exception)
    assert "macro average" in done.stdout
    assert "0.90 0.80" in done.stdout
    (figure,) = json.loads(report.read_text())["figures"]
    found = {one["category"]: one["prompts"] for one in figure["categories"]}
    assert found == {"coding": 2, "math": 2, "macro average": 4}
    made, _ = profile_from(report, "draft_model")
    counted = figure["acceptance"]
    assert made.expected == tuple(
        round(count / counted["rounds"], 6) for count in counted["accepted_at"]
    )
    conditions = made.measurement_conditions or {}
    assert all(conditions[name] for name in ("machine", "engine_version", "dtype", "dataset"))
    assert set(made.per_category or {}) == {"coding", "math"}
    (tmp_path / "none.json").write_text("{}")
    assert "no schema_version" in line(vllm(f"{command} --set profile={tmp_path}/none.json"))


def test_a_schedule_from_elsewhere_is_refused_before_an_engine_starts(
    vllm: Callable[..., Any], tmp_path: Path
) -> None:
    (tmp_path / "wrong.json").write_text("{}")
    (tmp_path / "nameless.json").write_text("[[1, 4, 2]]")
    tune = "step choose --set levels=1,2 --set methods=draft_model"
    assert "no schedule" in line(vllm(f"{tune} --set schedule={tmp_path}/wrong.json"))
    nameless = vllm(f"{tune},ngram --set schedule={tmp_path}/nameless.json")
    assert "with --set methods=" in line(nameless)
