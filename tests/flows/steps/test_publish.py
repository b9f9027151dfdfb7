"""Collecting, training and calibrating from the command line, and what `fresh` may throw
away."""

from __future__ import annotations

import html
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from draftwell.components.tune.report.html import CAPTIONS
from tests.support.loop.tiny_files import snapshot


@pytest.fixture
def collect(run: Any, pair_file: Path, prompts_file: Path, own_stores: Path) -> Callable[..., Any]:
    return lambda *more, limit=4, max_tokens=8: run(
        f"step collect --pair {pair_file} --prompts {prompts_file} --set limit={limit} --set "
        f"max_tokens={max_tokens}",
        *more,
    )


def test_the_same_collection_is_not_done_twice(collect: Callable[..., Any], tmp_path: Path) -> None:
    first = collect(f"--set out={tmp_path}/traces")
    assert first.exit_code == 0, first.output
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "traces").iterdir()}
    assert collect(f"--set out={tmp_path}/traces").stdout == first.stdout
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "traces").iterdir()} == before


def test_only_fresh_replaces_another_trace(collect: Callable[..., Any], tmp_path: Path) -> None:
    collect(f"--set out={tmp_path}/traces")
    before = snapshot(tmp_path / "traces")
    done = collect(f"--set out={tmp_path}/traces", max_tokens=9)
    assert done.exit_code == 2
    assert "other inputs" in done.stderr
    assert snapshot(tmp_path / "traces") == before
    done = collect(f"--set out={tmp_path}/traces --set fresh=true", max_tokens=9)
    assert done.exit_code == 0, done.output
    assert snapshot(tmp_path / "traces") != before


def test_fresh_keeps_what_is_no_trace(collect: Callable[..., Any], tmp_path: Path) -> None:
    """Not the files beside a trace, and nothing at all where the request itself is wrong."""
    mine = tmp_path / "traces" / "mine.txt"
    mine.parent.mkdir()
    mine.write_text("keep")
    assert collect(f"--set out={mine.parent}").exit_code == 0
    before = snapshot(mine.parent)
    done = collect(f"--set out={mine.parent} --set fresh=true", max_tokens=9999)
    assert done.exit_code == 2
    assert snapshot(mine.parent) == before
    assert collect(f"--set out={mine.parent} --set fresh=true", max_tokens=9).exit_code == 0
    assert mine.read_text() == "keep"


@pytest.mark.slow
def test_stations_one_by_one(
    collect: Callable[..., Any], run: Any, pair_file: Path, prompts_file: Path, own_stores: Path
) -> None:
    """Without the registry; what is made lies in the workspace, where the next command finds it."""
    assert collect(limit=8, max_tokens=16).exit_code == 0
    some = f"--pair {pair_file} --set publish=false"
    for arguments, told in (
        (f"step train {some}", "auc"),
        (f"step train {some} --kind acceptance_head", "constant_loss"),
        (f"step calibrate {some} --prompts {prompts_file} --set limit=2", "memory:"),
        (
            f"step choose {some} --prompts {prompts_file} --set limit=2 --set max_tokens=8 "
            f"--set trials=2",
            "chosen:",
        ),
    ):
        done = run(arguments)
        assert done.exit_code == 0, (done.output, done.exception)
        assert told in done.stdout
    made = own_stores / "draftwell" / "pairs" / "tiny" / "float32" / "artifacts"
    assert {path.name for path in made.iterdir()} == {
        "verifier",
        "acceptance_head",
        "acceptance_table",
        "correction_memory",
    }
    of_device = made.parent / "cpu"
    assert {path.name for path in (of_device / "artifacts").iterdir()} == {
        "hardware_profile",
        "decoding_config",
    }
    page = html.unescape((of_device / "reports" / "tuning.html").read_text())
    assert [
        stem
        for stem in ("acceptance_by_confidence", "rejections", "roc", "reliability")
        if CAPTIONS[stem] not in page
    ] == []
    for strategy in ("sprinter", "specdec_pp"):
        done = run(
            f"generate --pair {pair_file} --strategy {strategy} --prompt",
            "the inn",
            "--max-tokens 8",
        )
        assert done.exit_code == 0, done.output
    assert not (own_stores / "mlflow.db").exists()


def test_the_pipeline_collects_what_the_command_line_collects(
    run: Any,
    pair_file: Path,
    prompts_file: Path,
    own_stores: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As many texts at once, in slots as long; and one pair at a time in memory."""
    from draftwell.flows import loading as context
    from draftwell.flows.orchestration import loop_flow as loop
    from draftwell.flows.settings import PipelineSettings
    from draftwell.flows.steps.collect import SAMPLED_ROLLOUT
    from draftwell.flows.workspace import Workspace
    from draftwell.serving.recording.trace import TraceSet

    settings = PipelineSettings(
        pair=str(pair_file),
        prompts=prompts_file,
        bench_prompts=2,
        collect_prompts=3,
        max_tokens=8,
    )
    monkeypatch.setattr(loop.shown, "table", lambda *given: None)
    made = loop.collect.fn(settings)["traces"]
    rows = tmp_path / "same.jsonl"
    prompts = [prompt.id for prompt in context.prompts_of(settings)["collect"]]
    lines = [json.loads(line) for line in prompts_file.read_text().splitlines()[2:5]]
    rows.write_text(
        "".join(
            json.dumps({"id": name, **line}) + "\n"
            for name, line in zip(prompts, lines, strict=True)
        )
    )
    done = run(
        f"step collect --pair {pair_file} --prompts {rows} --set max_tokens=8 --set "
        f"out={tmp_path}/traces",
    )
    assert done.exit_code == 0, (done.output, done.exception)
    space = Workspace(str(pair_file))
    plans = [
        json.loads((folder / "plan.json").read_text())
        for folder in (space.traces, tmp_path / "traces")
    ]
    assert plans[0] == plans[1]
    sampled = TraceSet(space.traces_at(1.0))
    assert made == {"traces": TraceSet(space.traces).digest(), "traces_sampled": sampled.digest()}
    assert (sampled.header.temperature, sampled.header.rollout) == (1.0, SAMPLED_ROLLOUT)
    assert set(sampled.read(["kind"]).column(0).to_pylist()) == {"target"}
    assert (plans[0]["batch"], len(context._kept)) == (16, 1)


def test_calibration_decodes_several_prompts_at_once(
    collect: Callable[..., Any],
    run: Any,
    pair_file: Path,
    prompts_file: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from draftwell.components.calibrate import correction_memory

    real, at_once = correction_memory.decode_all, []
    monkeypatch.setattr(
        correction_memory,
        "decode_all",
        lambda engine, requests, strategies, count, finished: (
            at_once.append(count) or real(engine, requests, strategies, count, finished)
        ),
    )
    assert collect().exit_code == 0
    done = run(
        f"step calibrate --pair {pair_file} --set publish=false --prompts {prompts_file} --set "
        f"limit=3"
    )
    assert done.exit_code == 0, (done.output, done.exception)
    assert at_once == [8], "as many as it is told to"


@pytest.mark.slow
def test_baseline_of_a_pair_named_by_its_file(
    run: Any, pair_file: Path, prompts_file: Path, monkeypatch: pytest.MonkeyPatch, own_stores: Path
) -> None:
    """What is recorded is found again, a second run counts the same, and twice the target calls
    fail with exit code 1."""
    from draftwell.components.prompts import prompt as prompts
    from draftwell.registry import gates

    (own_stores / "baselines").mkdir()
    shutil.copyfile(gates.HERE / "gates.yaml", own_stores / "gates.yaml")
    monkeypatch.setattr(gates, "HERE", own_stores)
    monkeypatch.setattr(prompts, "DEMO", prompts_file)
    judge = f"gate --pair {pair_file} --set counts_only=true"
    assert run(judge).exit_code == 2
    done = run(f"gate --pair {pair_file} --set record_counts=true")
    assert done.exit_code == 0, (done.output, done.exception)
    done = run(judge)
    assert done.exit_code == 0, (done.output, done.exception)
    file = own_stores / "baselines" / "tiny.json"
    recorded = json.loads(file.read_text())
    recorded["strategies"]["vanilla_sd"]["target_calls"] //= 2
    file.write_text(json.dumps(recorded))
    done = run(judge)
    assert done.exit_code == 1, (done.output, done.exception)
