"""The gate on another engine: a slower setting, a lossy one, a near-tie, and a record that is used elsewhere."""

from __future__ import annotations

import pytest

from components.bench.engines.figures import figure_of
from components.bench.engines.measure import Beside, Side
from components.engines.port import EngineSettings
from components.gate.engine_checks import Difference, EngineGateRecord, differences, judge_engine
from components.gate.verdict import Thresholds
from tests.support.errors import raises_code
from tests.support.peers.fake_engine import FakeEngine

THRESHOLDS = Thresholds(min_speedup_lower_bound=1.0)
PROMPTS = [[5], [6]]


def beside(factor: list[float], other: list[list[list[int]]] | None = None) -> Beside:
    outputs = [[[5, 5, 5]], [[6, 6, 6]]]
    return Beside(at_once=1, plain=Side(seconds=[1.0] * len(factor), tokens=[3] * len(factor), outputs=outputs),
                  other=Side(seconds=factor, tokens=[3] * len(factor), outputs=other or outputs))


@pytest.mark.parametrize(("factor", "result"), [
    ([0.7] * 8, "passed"), ([1.15] * 8, "failed"), ([0.5, 1.5, 0.7, 1.2, 0.5, 1.4, 0.9, 1.1], "not enough evidence")])
def test_the_lower_bound_decides(factor: list[float], result: str) -> None:
    assert judge_engine([figure_of("x", beside(factor))], [], THRESHOLDS).checks[0].result == result


def test_outputs_that_differ_fail_and_near_ties_do_not() -> None:
    engine = FakeEngine("off", {}, [])
    engine.start(EngineSettings())
    lossy = beside([0.5] * 2, [[[5, 9, 5]], [[6, 6, 6]]])
    found = differences(lossy, PROMPTS, engine, "bfloat16")
    assert found == [Difference(prompt=0, at=1, gap=None, near_tie=False)]
    verdict = judge_engine([figure_of("x", lossy)], found, THRESHOLDS)
    assert verdict.checks[-1].result == "failed"
    assert "prompt 0 at token 1" in verdict.checks[-1].detail
    close = differences(beside([0.5] * 2, [[[5, 6, 5]], [[6, 6, 6]]]), PROMPTS, engine, "bfloat16")
    assert [one.near_tie for one in close] == [True]
    assert judge_engine([figure_of("x", lossy)], close, THRESHOLDS).checks[-1].passed
    strict = differences(beside([0.5] * 2, [[[5, 6, 5]], [[6, 6, 6]]]), PROMPTS, engine, "float32")
    assert [one.near_tie for one in strict] == [False]


@pytest.mark.parametrize("output", [[5, 5], [5, 5, 5, 5]])
def test_an_output_that_ends_elsewhere_is_no_near_tie(output: list[int]) -> None:
    engine = FakeEngine("off", {}, [])
    engine.start(EngineSettings())
    found = differences(beside([0.5] * 2, [[output], [[6, 6, 6]]]), PROMPTS, engine, "bfloat16")
    assert [(one.at, one.near_tie) for one in found] == [(min(3, len(output)), False)]


def test_plain_decoding_has_nothing_to_prove() -> None:
    assert judge_engine([], None, THRESHOLDS).passed


def test_a_record_is_valid_where_it_was_made_only() -> None:
    made = EngineGateRecord(engine="vllm", version="0.32.0", device_class="cpu-x", dtype="bfloat16", fingerprint="f" * 64, settings=None,
                            passed=True, checks=[], made="2026-11-25T00:00:00+00:00")
    made.check(version="0.32.0", device_class="cpu-x")
    with raises_code("gated_elsewhere", "0.33.0", "--engine vllm"):
        made.check(version="0.33.0")
    with raises_code("gate_not_passed", "vllm"):
        made.model_copy(update={"passed": False}).check(version="0.32.0")
