"""What a lossy strategy must keep is data of the gate, and nothing else has a number of its own."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from draftwell.components.bench.settings import BenchSettings, QualityFloor
from draftwell.components.gate.settings import ROUNDS, GateSettings
from draftwell.components.tune.regret import SETTINGS
from draftwell.flows.settings import PipelineSettings, quality_floor
from draftwell.flows.steps.gate_parts import bench as gate_bench
from draftwell.flows.steps.gate_parts.bench import measured
from draftwell.flows.steps.gate_parts.champion import ChampionComparison
from draftwell.flows.steps.tune import constraints_of, tune_settings_of
from draftwell.registry import gates
from tests.support.patching import replace_everywhere


def test_the_gates_file_is_the_one_floor_of_bench_tuner_and_gate(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With other numbers in the file, all of them follow."""
    stricter = gates.load_gates().model_copy(
        update={"min_quality_ratio": 0.97, "max_rouge_l_loss": 0.5}
    )
    replace_everywhere(monkeypatch, gates, "load_gates", lambda path=None: stricter)
    floor = QualityFloor(min_argmax_share=0.97, max_rouge_l_loss=0.5, max_surprisal_shift=0.1)
    assert quality_floor() == floor
    for limits in (
        constraints_of(False, None, None),
        tune_settings_of(PipelineSettings(lossless_only=False)).constraints,
    ):
        assert (limits.max_quality_loss, limits.max_rouge_l_loss) == (0.03, 0.5)
    assert constraints_of(False, 0.01, None).max_quality_loss == 0.01, (
        "unless a person names another"
    )
    seen: list[tuple[BenchSettings, Any]] = []

    def run_bench(
        pair: Any, choices: Any, prompts: Any, resources: Any, settings: BenchSettings, **more: Any
    ) -> Any:
        seen.append((settings, more["floor"]))
        return SimpleNamespace(strategies={})

    monkeypatch.setattr(gate_bench, "run_bench", run_bench)
    judging: Any = SimpleNamespace(strategy="csd", parameters={}, of=lambda report: None)
    step: Any = SimpleNamespace(
        pair=None, bar=None, workspace=SimpleNamespace(say=lambda line: None)
    )
    measured(step, [], judging, None, ChampionComparison(), GateSettings(max_tokens=8))  # type: ignore[arg-type]
    ((settings, given),) = seen
    assert given == floor
    assert (settings.runs, settings.max_tokens) == (ROUNDS, 8)


def test_the_regret_study_has_the_same_limits() -> None:
    """A script of components, which cannot read the gates file."""
    assert SETTINGS.constraints == constraints_of(False, None, None)
