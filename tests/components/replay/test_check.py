"""Predictions beside measurements, on models that take a known time; and the tables of seconds that
they rest on."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest

from draftwell.components.calibrate import hardware_profile
from draftwell.components.calibrate.hardware_profile import measure_profile
from draftwell.components.prompts.prompt import Prompt
from draftwell.components.replay.costs import costs_of
from draftwell.components.replay.replay import replay_strategy
from draftwell.components.replay.texts import Texts, read_texts
from draftwell.components.report.provenance import provenance
from draftwell.serving.artifacts.base import Provenance
from draftwell.serving.artifacts.forward_costs import seconds_table
from draftwell.serving.artifacts.hardware_profile import (
    HardwareProfile,
    RequestTimes,
    RoundOverheads,
)
from draftwell.serving.runtime.commands import Forward, Role
from draftwell.serving.runtime.engine import engine, task
from draftwell.serving.runtime.pair import LoadedPair
from draftwell.serving.runtime.strategies import StrategyChoice, StrategyResources
from tests.support.collecting import collect_traces
from tests.support.models.priced import Clock, Priced, PricedWorkers, wait_for_first
from tests.support.models.tiny import pair_of, table_pair
from tests.support.replay_check import check_prediction, median_error, tiled

ORIGIN = Provenance(pair="tiny", fingerprint="f" * 64)
PROMPTS = [
    Prompt(f"p{i}", None, [text]) for i, text in enumerate(["hello world", "abc", "so it goes"])
]


@pytest.fixture
def pair(monkeypatch: pytest.MonkeyPatch) -> LoadedPair:
    """Forward passes take a fixed time and one for each token, on a clock that nothing else moves;
    of models that run at once each has its own."""
    clock, models = Clock(), table_pair().models
    for module in (hardware_profile, engine, task):
        monkeypatch.setattr(module, "time", clock)
    monkeypatch.setattr(engine, "Workers", partial(PricedWorkers, clock))
    monkeypatch.setattr(engine, "wait", wait_for_first)

    def priced(role: Role, seconds: float, per_token: float) -> Priced:
        return Priced(models[role], clock, lambda row, _: seconds + per_token * len(row.tokens))

    return pair_of(priced("target", 0.012, 0.0004), priced("draft", 0.002, 0.0001))


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Texts:
    return read_texts(
        collect_traces(
            table_pair(),
            PROMPTS,
            tmp_path_factory.mktemp("trace"),
            max_tokens=20,
            rollout=24,
            hidden=False,
        )
    )


def test_predictions_are_what_is_measured(texts: Texts, pair: LoadedPair) -> None:
    times = measure_profile(pair, provenance(pair), repeats=6, context=32)
    resources = StrategyResources({"hardware_profile": times}, deterministic=True)
    configs: list[tuple[str, dict[str, Any]]] = [
        StrategyChoice("vanilla_sd", {"num_speculative_tokens": 2}),
        StrategyChoice("vanilla_sd", {"num_speculative_tokens": 6}),
        StrategyChoice("svip", {"threshold": 0.55}),
        StrategyChoice("pearl", {"num_speculative_tokens": 4}),
        StrategyChoice("prompt_lookup"),
    ]
    rows = check_prediction(pair, texts, resources, times, configs, PROMPTS)
    assert [row.strategy for row in rows] == [
        "autoregressive",
        "vanilla_sd",
        "vanilla_sd",
        "svip",
        "pearl",
        "prompt_lookup",
    ]
    assert all(row.exact and row.count_error == 0 for row in rows)
    assert rows[0].scaled == pytest.approx(rows[0].measured)
    for told in ([row.predicted for row in rows], [row.scaled for row in rows]):
        assert told == pytest.approx([row.measured for row in rows])
    assert median_error(rows) == pytest.approx(0, abs=1e-6)


def test_tables_are_those_of_the_profile_and_never_fall_behind_its_end() -> None:
    old = HardwareProfile(2.0, {1: 10.0, 4: 13.0, 8: 21.0}, 0.5, ORIGIN)
    costs = costs_of(old, False, 20)
    for tokens in (1, 2, 4, 6, 8, 30):
        assert costs.alone.seconds(Forward("target", 0, (0,) * tokens), 7) == pytest.approx(
            old.verify_seconds(tokens)
        )
        ratio = old.verify_seconds(tokens) / old.verify_seconds(1)
        assert costs.busy.seconds(Forward("draft", 0, (0,) * tokens), 7) == pytest.approx(
            2.0 * ratio
        )
    assert seconds_table({1: 10.0, 8: 12.0, 16: 11.5}, 40)[16:] == [11.5] * 25


def test_an_overlap_costs_its_shorter_side_busy_and_the_rest_of_the_longer_one_alone() -> None:
    rest = RoundOverheads(round=0.0, token=0.0, figure=0.0)
    details = RequestTimes(t_draft={1: 1.0}, prefill={}, per_context_token={}, context=0, rest=rest)
    costs = costs_of(HardwareProfile(1.0, {1: 1.0}, 0.0, ORIGIN, details=details), True, 4)
    assert costs.together([(8.0, 10.0), (1.0, 4.0)]) == pytest.approx(4.0 + 8.0 * 0.6)
    assert costs.together([(1.0, 4.0), (8.0, 10.0)]) == costs.together([(8.0, 10.0), (1.0, 4.0)])
    assert costs.together([(8.0, 10.0), (9.0, 10.0)]) == pytest.approx(10.0)


def test_a_text_of_a_later_turn_is_named_by_its_number(tmp_path: Path) -> None:
    talk = Prompt("talk", None, ["hello world", "abc", "so it goes"])
    trace = collect_traces(table_pair(), [talk], tmp_path, max_tokens=4, rollout=1, turns=0)
    names = [text.name for text in read_texts(trace).texts]
    assert names == ["talk", "talk, turn 2", "talk, turn 3"]


def test_tiled_texts_replay_to_as_many_times_the_counts(texts: Texts) -> None:
    resources = StrategyResources()
    flat = HardwareProfile(1.0, {1: 5.0}, 0.0, ORIGIN)
    count = sum(len(text.output) for text in texts.texts)
    once, often = (
        replay_strategy(some, "vanilla_sd", {}, resources, flat).stats
        for some in (texts, tiled(texts, 3 * count - 1))
    )
    assert (often.emitted, often.target_calls, often.accepted) == (
        3 * once.emitted,
        3 * once.target_calls,
        3 * once.accepted,
    )


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "p"


def test_a_profile_keeps_its_details_on_disk_and_an_old_file_has_none(folder: Path) -> None:
    details = RequestTimes(
        t_draft={1: 1.0, 2: 1.5},
        prefill={"target": {64: 20.0}, "draft": {64: 3.0}},
        per_context_token={"target": 0.001},
        context=128,
        split_alone=(1.25, {1: 9.0}),
        rest=RoundOverheads(round=0.5, token=0.25, figure=0.125),
        chains=True,
    )
    HardwareProfile(1.0, {1: 10.0}, 0.5, ORIGIN, (2.0, {1: 12.0}), details=details).save(folder)
    assert HardwareProfile.load(folder).details == details
    HardwareProfile(1.0, {1: 10.0}, 0.5, ORIGIN).save(folder)
    assert HardwareProfile.load(folder).details is None
