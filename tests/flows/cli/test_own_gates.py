"""Thresholds and baselines of one's own, outside the project's folders."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from draftwell.components.prompts import prompt as prompts
from draftwell.flows.cli.gate_run import record_baseline
from draftwell.flows.steps.gate_parts.checks import judge_baseline
from draftwell.registry import gates
from tests.support.errors import raises_code


@pytest.mark.slow  # two counts of six strategies
def test_counts_are_recorded_and_judged_in_a_folder_of_ones_own(
    pair_file: Path,
    prompts_file: Path,
    own_stores: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("DRAFTWELL_GATES", str(tmp_path))
    monkeypatch.setattr(prompts, "DEMO", prompts_file)
    before = {file: file.read_bytes() for file in (gates.HERE / "baselines").iterdir()}
    with raises_code("no_baseline"):
        judge_baseline(str(pair_file), print)
    record_baseline(str(pair_file))
    assert judge_baseline(str(pair_file), print).passed
    file = tmp_path / "baselines" / "tiny.json"
    recorded = json.loads(file.read_text())
    recorded["strategies"]["vanilla_sd"]["target_calls"] //= 2
    file.write_text(json.dumps(recorded))
    assert not judge_baseline(str(pair_file), print).passed
    assert before == {file: file.read_bytes() for file in (gates.HERE / "baselines").iterdir()}
