"""Engines beside plain decoding: turns, intervals, and a store that a killed run resumes from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from draftwell.components.bench.engines.figures import Figure, figure_of, figure_table
from draftwell.components.bench.engines.measure import (
    Beside,
    Side,
    groups_of,
    measure_beside,
    measurements_of,
)
from draftwell.components.engines.port import EngineSettings
from draftwell.serving.runtime.requests import Sampling
from tests.support.errors import raises_code
from tests.support.peers.fake_engine import FakeEngine

PROMPTS = [[5, 6, 7], [8, 9], [10], [11, 12, 13, 14]]
SAMPLING = Sampling(max_tokens=20)


def both(speed: float, log: list[str], slots: int = 1) -> tuple[FakeEngine, FakeEngine]:
    plain, other = FakeEngine("off", {}, log), FakeEngine("ngram", {"ngram": speed}, log)
    plain.start(EngineSettings(slots=slots))
    other.start(
        EngineSettings(speculation={"method": "ngram", "num_speculative_tokens": 3}, slots=slots)
    )
    log.clear()
    return plain, other


def test_both_decode_every_group_in_turn_after_a_warm_up() -> None:
    log: list[str] = []
    shown: list[tuple[int, int, str]] = []
    found = measure_beside(
        *both(2.0, log),
        groups_of(PROMPTS[:3], 1, 8),
        SAMPLING,
        progress=lambda *one: shown.append(one),
    )
    assert [line.split()[1] for line in log] == [
        "off",
        "ngram",
        "off",
        "ngram",
        "ngram",
        "off",
        "off",
        "ngram",
    ]
    assert shown[-1] == (6, 6, "ngram")
    assert found.plain.outputs == found.other.outputs
    assert found.plain.tokens == [20, 20, 20]
    assert found.other.acceptance.accepted_at == (6, 3)


def test_groups_of_several_sizes_are_refused() -> None:
    with raises_code("unequal_groups"):
        measure_beside(*both(2.0, [], slots=2), [[[5]], [[5], [6]]], SAMPLING)
    with raises_code("no_prompts"):
        groups_of([], 1, 8)


@pytest.mark.parametrize(
    ("speed", "faster", "slower"), [(2.0, True, False), (0.8, False, True), (1.0, False, False)]
)
def test_a_figure_says_what_is_sure(speed: float, faster: bool, slower: bool) -> None:
    figure = figure_of(
        "ngram", measure_beside(*both(speed, [], slots=2), groups_of(PROMPTS, 2, 8), SAMPLING)
    )
    assert figure.ratio == pytest.approx(speed)
    assert (figure.at_once, figure.groups, figure.prompts) == (2, 8, 4)
    assert (figure.surely_faster, figure.surely_slower) == (faster, slower)
    assert figure.low <= figure.ratio <= figure.high
    assert figure_table([figure], "x").row_count == 1


def test_a_prompt_that_comes_again_is_no_further_one() -> None:
    """Two prompts, one faster and one slower: sent four times each they are two still."""
    side: dict[str, Any] = {"tokens": [10] * 8, "outputs": [[[5] * 10]] * 8}
    found = Beside(
        at_once=1,
        plain=Side(seconds=[1.0] * 8, each_seconds=[[1.0]] * 8, **side),
        prompts=[[0], [1]] * 4,
        other=Side(seconds=[0.3, 1.02] * 4, each_seconds=[[0.3], [1.02]] * 4, **side),
    )
    often, once = figure_of("x", found.model_copy(update={"prompts": []})), figure_of("x", found)
    assert (once.prompts, often.prompts) == (2, 8)
    assert once.ratio == pytest.approx(often.ratio)
    assert often.surely_faster
    assert not once.surely_faster


def test_the_interval_is_wide_where_groups_differ() -> None:
    """Every prompt was in fast groups and in slow ones, so that prompts do not differ: the clock
    does."""
    places = [[0, 1, 2, 3], [4, 5, 6, 7]] * 4
    shared: dict[str, Any] = {"tokens": [8] * 8, "outputs": [[[5] * 2] * 4] * 8}

    def side(seconds: list[float]) -> Side:
        return Side(seconds=seconds, each_seconds=[[one] * 4 for one in seconds], **shared)

    def ratio_of(others: list[float], at_once: int) -> Figure:
        return figure_of(
            "x", Beside(at_once=at_once, plain=side([1.0] * 8), other=side(others), prompts=places)
        )

    noisy, steady = [0.5, 0.5, 1.3, 1.3] * 2, [0.9] * 8
    figure = ratio_of(noisy, 4)
    assert figure.ratio == pytest.approx(8 / 7.2)
    assert figure.low < 1 < figure.high
    assert not figure.surely_faster
    assert ratio_of(steady, 4).surely_faster


def test_groups_differ_and_take_every_prompt_equally_often() -> None:
    prompts = [[i] for i in range(12)]
    groups = groups_of(prompts, 16, 9)
    assert len({tuple(sorted(map(tuple, group))) for group in groups}) == 9
    assert {sum(group.count(ids) for group in groups) for ids in prompts} == {12}
    assert groups_of(prompts, 16, 9) == groups


def test_the_interval_is_wide_where_prompts_differ() -> None:
    seconds = [1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0]
    mixed = [0.5, 1.4, 0.6, 1.3, 0.5, 1.5, 0.7, 1.3]
    side = [10] * 8
    figure = figure_of(
        "x",
        Beside(
            at_once=1,
            plain=Side(seconds=seconds, tokens=side),
            other=Side(seconds=mixed, tokens=side),
        ),
    )
    assert figure.ratio > 1
    assert not figure.surely_faster


def test_what_was_measured_is_there_after_a_kill_and_not_for_another_subject(
    tmp_path: Path,
) -> None:
    file, made = (
        tmp_path / "measurements.jsonl",
        Beside(
            at_once=1, plain=Side(seconds=[1.0], tokens=[3]), other=Side(seconds=[0.5], tokens=[3])
        ),
    )
    first = measurements_of({"version": 1}, file)
    first.put("a", made)
    again = measurements_of({"version": 1}, file)
    assert again.read == 1
    assert again.get("a", lambda: pytest.fail("it is known")) == made
    assert measurements_of({"version": 1}, file, fresh=True).read == 0
    assert measurements_of({"version": 2}, file).read == 0
    file.write_text(file.read_text()[:-20])
    assert measurements_of({"version": 1}, file).read == 0
