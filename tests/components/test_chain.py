"""From prompts to a tuned config through every component that reads a trace, on a pair made of random weights."""

from __future__ import annotations

from pathlib import Path

from components.acceptance_head_training import train_acceptance_head
from components.calibration import build_acceptance_table, correction_memory_from_trace
from components.collection import collect
from components.constraints import Constraints
from components.contest import Contest, Quality
from components.profiling import profile
from components.prompts import demo_prompts
from components.provenance import provenance
from components.tuning import tune
from components.verifier_training import train_verifier
from serving.runtime.strategies import Kit, build_strategy
from tests.components.tiny import llama_pair


def test_a_trace_feeds_training_calibration_and_tuning(tmp_path: Path) -> None:
    pair, prompts = llama_pair(), demo_prompts(16)
    trace = collect(pair, prompts, tmp_path, max_tokens=16, prefix_kinds=("bare", "draft", "target", "mixed"), batch=4)
    origin = provenance(pair, trace_digest=trace.digest())
    verifier, report = train_verifier(trace, origin)
    assert verifier.provenance.trace_digest == trace.digest()
    head, _ = train_acceptance_head(pair, trace, origin, blocks=1)
    table = build_acceptance_table(trace, origin)
    times = profile(pair, origin, repeats=1, context=16)
    kit = Kit({"verifier": verifier, "acceptance_head": head, "acceptance_table": table, "hardware_profile": times,
               "correction_memory": correction_memory_from_trace(trace, origin)}, pair.special_tokens)
    tuned = tune(pair, trace, prompts[:3], kit, times, evaluate=Contest(pair, kit, max_tokens=8),
                 quality=lambda prompts, measured: Quality(1.0), trials=9, max_tokens=8, explore=1, measure_top=20,
                 constraints=Constraints(lossless_only=False))
    assert {figure["strategy"] for figure in tuned.evidence["measured"]} >= {"autoregressive", "sprinter", "csd", "specdec_pp"}
    assert all("qualifier" in why for why in tuned.evidence["left_out"].values())
    build_strategy(tuned.strategy, tuned.parameters, kit)
    assert report
