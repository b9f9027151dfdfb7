"""From prompts to a tuned config through every component that reads a trace, on a pair made of
random weights."""

from __future__ import annotations

from pathlib import Path

import pytest

from draftwell.components.calibrate.acceptance_table import build_acceptance_table
from draftwell.components.calibrate.correction_memory import MemorySettings, build_correction_memory
from draftwell.components.calibrate.hardware_profile import measure_profile
from draftwell.components.prompts.prompt import demo_prompts
from draftwell.components.report.provenance import provenance
from draftwell.components.train.acceptance_head import train_acceptance_head
from draftwell.components.train.verifier import train_verifier
from draftwell.components.tune.evaluator import Evaluator, Quality
from draftwell.components.tune.settings import Constraints, TuneSettings
from draftwell.components.tune.tune import TuneInputs, tune_strategy
from draftwell.serving.runtime.strategies import StrategyResources, build_strategy
from tests.support.collecting import collect_traces
from tests.support.models.tiny import llama_pair


@pytest.mark.slow
def test_a_trace_feeds_training_calibration_and_tuning(tmp_path: Path) -> None:
    pair, prompts = llama_pair(), demo_prompts(16)
    trace = collect_traces(
        pair,
        prompts,
        tmp_path,
        max_tokens=16,
        prefix_kinds=("bare", "draft", "target", "mixed"),
        batch=4,
    )
    origin = provenance(pair, trace_digest=trace.digest())
    verifier, report = train_verifier(trace, origin)
    assert verifier.provenance.trace_digest == trace.digest()
    head, _ = train_acceptance_head(pair, trace, origin)
    table = build_acceptance_table(trace, origin)
    times = measure_profile(pair, origin, repeats=1, context=16)
    resources = StrategyResources(
        {
            "verifier": verifier,
            "acceptance_head": head,
            "acceptance_table": table,
            "hardware_profile": times,
            "correction_memory": build_correction_memory(
                pair, prompts[:4], origin, MemorySettings(max_tokens=16)
            ),
        },
        pair.special_tokens,
    )
    limits = Constraints(lossless_only=False, max_quality_loss=0.1)
    settings = TuneSettings(constraints=limits, trials=9, max_tokens=8)
    tuned = tune_strategy(
        TuneInputs(pair, trace, prompts[:3], resources, times, explored=1, measured=20),
        settings,
        Evaluator(pair, resources, max_tokens=8),
        lambda prompts, measured: Quality(1.0),
    )
    # which of them are measured at length depends on this machine's times
    assert {trial.strategy for trial in tuned.trials} >= {"sprinter", "csd", "specdec_pp"}
    assert "autoregressive" in {figure.strategy for figure in tuned.measured}
    unmade = ("qualifier", "eagle3_head", "datastore", "medusa_heads")
    assert all(any(lacking in why for lacking in unmade) for why in tuned.left_out.values())
    build_strategy(tuned.choice.name, dict(tuned.choice.parameters), resources)
    assert report
