"""The gate on another engine: a slower setting, a lossy one, a near-tie, and a record that is used
elsewhere."""

from __future__ import annotations

import pytest

from draftwell.components.bench.engines.figures import figure_of
from draftwell.components.bench.engines.measure import Beside, Side
from draftwell.components.engines.port import EngineSettings
from draftwell.components.gate.engine_checks import (
    Difference,
    differences,
    judge_engine,
    judge_regression,
)
from draftwell.serving.bundle.verdict import Thresholds
from draftwell.serving.runtime.requests import Sampling
from tests.support.errors import raises_code
from tests.support.peers.fake_engine import FakeEngine

THRESHOLDS = Thresholds(min_speedup_lower_bound=1.0)
PROMPTS = [[5], [6]]


GROUPS = [[ids] for ids in PROMPTS]
SAMPLING = Sampling(max_tokens=3)


def beside(factor: list[float], other: list[list[list[int]]] | None = None) -> Beside:
    outputs = [[[5, 5, 5]], [[6, 6, 6]]]
    return Beside(
        at_once=1,
        plain=Side(seconds=[1.0] * len(factor), tokens=[3] * len(factor), outputs=outputs),
        other=Side(seconds=factor, tokens=[3] * len(factor), outputs=other or outputs),
    )


@pytest.fixture
def engine() -> FakeEngine:
    made = FakeEngine("off", {}, [])
    made.start(EngineSettings(slots=4))
    return made


def unlike(output: list[int], engine: FakeEngine, dtype: str = "bfloat16") -> list[Difference]:
    return differences(beside([0.5] * 2, [[output], [[6, 6, 6]]]), GROUPS, engine, dtype, SAMPLING)


@pytest.mark.parametrize(
    ("factor", "result"),
    [
        ([0.7] * 8, "passed"),
        ([0.7] * 7, "not enough evidence"),
        ([1.15] * 2, "not enough evidence"),
        ([1.15] * 8, "failed"),
        ([0.5, 1.5, 0.7, 1.2, 0.5, 1.4, 0.9, 1.1], "not enough evidence"),
    ],
)
def test_the_lower_bound_decides(factor: list[float], result: str) -> None:
    assert judge_engine([figure_of("x", beside(factor))], [], THRESHOLDS).checks[0].result == result


@pytest.mark.parametrize(
    ("factor", "result"),
    [
        ([1.1] * 8, "failed"),
        ([1.04] * 8, "passed"),
        ([1.04] * 7, "not enough evidence"),
        ([0.9, 1.2] * 4, "not enough evidence"),
    ],
)
def test_a_setting_must_not_be_slower_than_the_champions(factor: list[float], result: str) -> None:
    """However much faster than plain decoding it is: the champion is what serves."""
    figures = [figure_of("x", beside(factor))]
    [check] = judge_regression(figures, Thresholds(max_regression=0.05)).checks
    assert (check.name, check.result) == ("regression, 1 at once", result), check.detail
    assert judge_regression(figures, Thresholds()).checks == ()


def test_a_missing_threshold_is_an_error() -> None:
    with raises_code("no_threshold", "min_speedup_lower_bound"):
        judge_engine([figure_of("x", beside([0.5] * 8))], [], Thresholds())


def test_a_load_without_drafts_must_not_be_surely_slower() -> None:
    even, slower = ([0.99, 1.02, 1.0, 1.01] * 2, [1.1] * 8)
    assert [
        judge_engine([figure_of("x", beside(factor))], [], THRESHOLDS, idle=frozenset(idle)).passed
        for factor, idle in ((even, ()), (even, (1,)), (slower, (1,)))
    ] == [False, True, False]


def test_outputs_that_differ_fail(engine: FakeEngine) -> None:
    found = unlike([5, 9, 5], engine)
    assert found == [Difference(prompt=0, at=1, gap=None, near_tie=False)]
    verdict = judge_engine([figure_of("x", beside([0.5] * 8))], found, THRESHOLDS)
    assert [check.result for check in verdict.checks] == ["passed", "failed"]
    assert "prompt 0 at token 1" in verdict.checks[1].detail


def test_what_follows_a_near_tie_is_compared_too(engine: FakeEngine) -> None:
    """The fake continues a prompt with its beginning: after 5 5 6 comes 5."""
    assert [(one.at, one.near_tie) for one in unlike([5, 6, 5], engine)] == [(1, True)]
    assert [(one.at, one.near_tie) for one in unlike([5, 6, 9], engine)] == [(1, True), (2, False)]
    assert [one.near_tie for one in unlike([5, 6, 5], engine, "float32")] == [False]


def test_near_ties_are_counted_and_pass() -> None:
    found = [Difference(prompt=i, at=1, gap=0.1, near_tie=True) for i in range(3)]
    verdict = judge_engine([figure_of("x", beside([0.5] * 8))], found, THRESHOLDS)
    assert verdict.passed
    assert "for 3 at near-ties only" in verdict.checks[-1].detail


def test_outputs_are_compared_at_every_level(engine: FakeEngine) -> None:
    groups = [[[5], [6]]]
    plain, other = ([[[5, 5, 5], [6, 6, 6]]], [[[5, 5, 5], [6, 9, 6]]])
    both = Beside(
        at_once=2,
        plain=Side(seconds=[1.0], tokens=[6], outputs=plain),
        other=Side(seconds=[0.5], tokens=[6], outputs=other),
    )
    assert differences(both, groups, engine, "float32", SAMPLING) == [
        Difference(prompt=1, at=1, at_once=2, gap=None, near_tie=False)
    ]


def test_settings_that_vllm_calls_lossy_are_refused() -> None:
    figure = figure_of("x", beside([0.5] * 8))
    for method, passed in (("standard", True), ("probabilistic", False), ("synthetic", False)):
        verdict = judge_engine(
            [figure],
            [],
            THRESHOLDS,
            settings={"method": "eagle3", "rejection_sample_method": method},
        )
        assert verdict.passed == passed


@pytest.mark.parametrize("output", [[5, 5], [5, 5, 5, 5]])
def test_an_output_that_ends_elsewhere_is_no_near_tie(
    output: list[int], engine: FakeEngine
) -> None:
    assert [(one.at, one.near_tie) for one in unlike(output, engine)] == [
        (min(3, len(output)), False)
    ]


def test_plain_decoding_has_nothing_to_prove() -> None:
    assert judge_engine([], None, THRESHOLDS).passed
