"""examples/emulated_devices.py, as it stands, on tiny models."""

from __future__ import annotations

import json
import runpy
from pathlib import Path

import pytest

from draftwell.components.emulation import run as emulation
from draftwell.components.emulation.result import read_run
from draftwell.flows import workspace
from draftwell.serving.runtime.pair import LoadedPair
from tests.support.models.tiny import llama_pair
from tests.support.paths import REPO


class TinyWorkspace:
    def __init__(self, pair: str, dtype: str):
        assert (pair, dtype) == ("tiny", "bfloat16")

    def load(self) -> LoadedPair:
        return llama_pair(slots=1)


def test_the_example_leaves_a_result(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(workspace, "Workspace", TinyWorkspace)
    monkeypatch.setattr(emulation, "needed_stretch", lambda passes: 0.002)  # whatever else runs
    prompts, result = tmp_path / "prompts.jsonl", tmp_path / "result.json"
    prompts.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in ("abc", "de", "f")))
    example = runpy.run_path(str(REPO / "examples" / "emulated_devices.py"))
    example["main"]("tiny", "c0.3", str(prompts), str(result), "own", "2", "8")
    run = read_run(result)
    assert run.curve.cost == 0.3
    assert len(run.prompt_ids) == 2
    assert run.calibration == 1
    assert run.identical == 2
    assert list(run.rows) == ["vanilla_sd", "spide", "pearl", "duo_decoding"]
    row = run.rows["vanilla_sd"]
    assert row.parameters["num_speculative_tokens"] == 5  # the fastest at α 0.9, c 0.3
    more = ("own", "1", "4", "0.87", "0.9,0.5", "vanilla_sd,spide")
    example["main"]("tiny", "c0.3", str(prompts), str(result), *more)
    found = read_run(result).rows
    assert found["vanilla_sd"].parameters["num_speculative_tokens"] == 4
    assert [one.parameters["tau"] for one in found.values() if one.strategy == "spide"] == [
        0.9,
        0.5,
    ]
    assert {one.strategy for one in found.values()} == {"vanilla_sd", "spide"}
    # a busy machine may make it void; then the table says so
    said = capsys.readouterr().out
    assert ("| void: " in said) == (run.void is not None)
    assert "| `tiny` | 0.3 | two |" in said
