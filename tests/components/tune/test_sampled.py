"""Tuning for sampled requests: on traces of their temperature, by replay in expectation, without
artifacts of greedy texts."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from draftwell.components.collect.trace_checks import check_temperature
from draftwell.components.prompts.prompt import Prompt
from draftwell.components.replay.replay import replay_strategy
from draftwell.components.replay.sampled import DRAWS, read_sampled, texts_of
from draftwell.serving.artifacts.acceptance_table import AcceptanceTable
from draftwell.serving.recording.trace import TraceSet
from draftwell.serving.runtime.pair import LoadedPair
from draftwell.serving.runtime.strategies import StrategyResources
from tests.support.collecting import collect_traces
from tests.support.errors import raises_code
from tests.support.expected_replay import replay_expected
from tests.support.loop.scripted_clock import Clock
from tests.support.loop.tuning import ORIGIN, PROFILE, RESOURCES, run_tuner
from tests.support.models.tiny import table_pair

PROMPTS = [
    Prompt(f"p{i}", None, [text])
    for i, text in enumerate(
        ["hello world", "abc", "so it goes", "xyzzy!", "ok?", "1984", "q", "hm"]
    )
]


@pytest.fixture(scope="module")
def pair() -> LoadedPair:
    return table_pair()


@pytest.fixture(scope="module")
def sampled(pair: LoadedPair, tmp_path_factory: pytest.TempPathFactory) -> TraceSet:
    return collect_traces(
        pair,
        PROMPTS,
        tmp_path_factory.mktemp("sampled"),
        max_tokens=12,
        temperature=0.7,
        hidden=False,
    )


def test_draws_of_all_seeds_replay_to_their_mean(sampled: TraceSet) -> None:
    parameters = {"num_speculative_tokens": 3}
    each = replay_expected(
        read_sampled(sampled), "vanilla_sd", parameters, RESOURCES, PROFILE, seeds=DRAWS
    )
    together = replay_strategy(texts_of(sampled), "vanilla_sd", parameters, RESOURCES, PROFILE)
    assert together.stats.target_calls == pytest.approx(len(DRAWS) * each.mean["target_calls"])
    assert len({run.stats.target_calls for run in each.runs}) > 1, "the draws differ"
    assert together.predicted_seconds_per_token == pytest.approx(
        float(np.mean([run.predicted_seconds_per_token for run in each.runs]))
    )


def test_a_sampled_trace_gives_a_choice_for_sampled_requests(
    pair: LoadedPair, sampled: TraceSet
) -> None:
    table = AcceptanceTable.empty(ORIGIN.model_copy(update={"parameters": {"temperature": 0.0}}))
    found = run_tuner(
        pair,
        sampled,
        PROMPTS,
        Clock({"autoregressive": 1.0, "vanilla_sd": 2.0}),
        resources=StrategyResources(
            {**RESOURCES.artifacts, "acceptance_table": table}, deterministic=True
        ),
        temperature=0.7,
        trials=12,
        max_tokens=12,
    )
    assert found.choice.name == "vanilla_sd"
    assert (found.temperature, found.trace_digest) == (0.7, sampled.digest())
    assert {trial.strategy for trial in found.trials if trial.source == "replayed"} >= {
        "vanilla_sd",
        "svip",
    }
    assert "spide" not in {trial.strategy for trial in found.trials}
    assert "acceptance_table is for temperature 0" in found.left_out["spide"]


def test_a_table_of_sampled_texts_is_used_for_them_and_refused_for_greedy_ones(
    pair: LoadedPair, sampled: TraceSet, tmp_path: Path
) -> None:
    made = ORIGIN.model_copy(update={"parameters": {"temperature": 0.7}})
    resources = StrategyResources(
        {**RESOURCES.artifacts, "acceptance_table": AcceptanceTable.empty(made)}, deterministic=True
    )
    settings = {"trials": 4, "max_tokens": 12, "strategies": ["spide"], "resources": resources}
    found = run_tuner(pair, sampled, PROMPTS[:2], Clock({}), temperature=0.7, **settings)
    assert {trial.strategy for trial in found.trials} == {"spide"}
    greedy = collect_traces(pair, PROMPTS[:2], tmp_path, max_tokens=12, hidden=False)
    with raises_code("not_tunable", "spide", "acceptance_table", "0.7"):
        run_tuner(pair, greedy, PROMPTS[:2], Clock({}), **settings)


@pytest.mark.parametrize(
    ("wanted", "code"), [(0.0, "sampled_trace"), (1.0, "trace_of_another_temperature")]
)
def test_a_trace_of_another_temperature_is_refused_before_anything_is_measured(
    pair: LoadedPair, sampled: TraceSet, wanted: float, code: str
) -> None:
    clock = Clock({})
    with raises_code(code, "0.7"):
        run_tuner(pair, sampled, PROMPTS, clock, temperature=wanted)
    assert clock.calls == []


def test_texts_of_a_part_of_the_vocabulary_are_refused(pair: LoadedPair, tmp_path: Path) -> None:
    cut = collect_traces(
        pair, PROMPTS[:1], tmp_path, max_tokens=4, temperature=0.7, top_p=0.9, hidden=False
    )
    with raises_code("trace_of_another_temperature", "top-p 0.9"):
        check_temperature(cut, 0.7)


def test_spide_is_replayed_with_the_counts_of_sampled_texts(
    pair: LoadedPair, sampled: TraceSet
) -> None:
    """A replay's own requests are greedy: read for them, the table would be the one of greedy
    texts."""
    made = ORIGIN.model_copy(update={"parameters": {"temperature": 0.7}})
    never, always = (
        AcceptanceTable([10**6] * 20, [0] * 20, ORIGIN),
        AcceptanceTable([10**6] * 20, [10**6] * 20, made),
    )
    both = AcceptanceTable(never.total, never.accepted, ORIGIN, always)
    calls = []
    for table in (never, always, both):
        resources = StrategyResources({**RESOURCES.artifacts, "acceptance_table": table})
        replayed = replay_strategy(
            texts_of(sampled),
            "spide",
            {"parallel": False, "max_draft": 4},
            resources,
            PROFILE,
            extend=True,
        )
        calls.append(replayed.stats.target_calls)
    assert calls[2] == calls[1] < calls[0]
    found = run_tuner(
        pair,
        sampled,
        PROMPTS[:2],
        Clock({}),
        temperature=0.7,
        trials=4,
        max_tokens=12,
        resources=StrategyResources({**RESOURCES.artifacts, "acceptance_table": both}),
    )
    assert "spide" not in found.left_out
