"""What CSD and lossy SD are expected to do on a trace, against a trace written by hand and against
real runs."""

from __future__ import annotations

from dataclasses import replace

import pytest

from draftwell.components.prompts.prompt import Prompt
from draftwell.components.replay.replay import replay_strategy
from draftwell.components.replay.texts import Texts, read_texts
from draftwell.components.replay.traced_text import TracedText
from draftwell.components.tune.evaluator import Evaluator
from draftwell.components.tune.evidence import Trial
from draftwell.components.tune.search.rescue_model import (
    Rejection,
    RescueModel,
    estimate_rescues,
    fastest_for_losses,
)
from draftwell.components.tune.search.space import combinations
from draftwell.serving.artifacts.correction_memory import CorrectionMemory
from draftwell.serving.recording.trace import TraceSet
from draftwell.serving.runtime.pair import LoadedPair
from draftwell.serving.runtime.strategies import StrategyChoice, StrategyResources
from tests.support.collecting import collect_traces
from tests.support.loop.tuning import ORIGIN, PROFILE
from tests.support.models.tiny import table_pair

PROMPTS = [
    Prompt(f"p{i}", None, [text])
    for i, text in enumerate(
        ["hello world", "abc", "so it goes", "xyzzy!", "ok?", "1984", "q", "hm"]
    )
]
SPECIAL = 99


def csd(gamma: int = 2, count: float = 2, tau: float = 0.5) -> StrategyChoice:
    return StrategyChoice("csd", {"num_speculative_tokens": gamma, "min_count": count, "tau": tau})


def model_of(found: list[Rejection], tokens: int = 9) -> RescueModel:
    """A text 10, 11, 12, … whose draft is right at the even places and writes 50 and more at the
    odd ones."""
    output = list(range(10, 10 + tokens))
    drafted = [
        [token if place % 2 == 0 else 50 + place, 0, 0] for place, token in enumerate(output)
    ]
    text = TracedText("p", [1, 2, *output], 2, drafted, [[0.9] * 3] * tokens, [[0.1] * 3] * tokens)
    memory = CorrectionMemory({(51, 11): 2, (53, 13): 1, (55, 15): 9, (57, SPECIAL): 9}, ORIGIN)
    resources = StrategyResources({memory.kind: memory}, frozenset({SPECIAL}))
    return RescueModel(
        Texts([text], tokens, frozenset({3}), 3), [found], resources, PROFILE, tokens
    )


FOUND = [
    Rejection(1, 51, 11, 0.6),
    Rejection(3, 53, 13, 0.9),
    Rejection(5, 55, 15, 0.4),
    Rejection(7, 57, SPECIAL, 1.0),
]


def rescued(choice: StrategyChoice) -> list[int]:
    model = model_of(FOUND)
    stays = model.rule(choice)
    return [found.place for found in FOUND if stays(found)]


def test_the_rule_is_memory_and_gate_and_spares_special_tokens() -> None:
    assert rescued(csd(count=2, tau=0.5)) == [1], (
        "3 was seen once, 5 is too unlikely, 7 is against a special token"
    )
    assert rescued(csd(count=1, tau=0.3)) == [1, 3, 5]
    assert rescued(csd(count=9, tau=0.01)) == [5]
    assert rescued(StrategyChoice("lossy_sd", {"num_speculative_tokens": 2, "tau": 0.5})) == [
        1,
        3,
    ], "the gate alone"


def test_a_stop_token_is_never_rescued() -> None:
    model = model_of(FOUND)
    ending = replace(model, texts=replace(model.texts, stop_token_ids=frozenset({51})))
    assert not ending.rule(csd())(FOUND[0])


def test_a_rescued_token_counts_as_the_drafts_own() -> None:
    """Gamma 2 over nine tokens of which the first comes with the prompt."""
    model = model_of(FOUND)
    none, one = model.estimate(csd(count=100)), model.estimate(csd())
    plain = replay_strategy(
        model.texts, "vanilla_sd", {"num_speculative_tokens": 2}, model.resources, PROFILE
    )
    assert none.predicted_seconds_per_token == plain.predicted_seconds_per_token
    assert none.divergence == 0
    assert one.target_calls_per_token is not None
    assert none.target_calls_per_token is not None
    assert one.target_calls_per_token < none.target_calls_per_token
    assert one.divergence == pytest.approx(1 / 8 * reached(model, one), abs=0.05)
    assert not one.exact
    assert one.source == "estimated"


def reached(model: RescueModel, trial: Trial) -> float:
    """Share of the draft's right tokens that some draft offers: the target adds the others
    itself."""
    altered = replace(
        model.texts.texts[0],
        tokens=[[11] if i == 1 else row for i, row in enumerate(model.texts.texts[0].tokens)],
    )
    texts = replace(model.texts, texts=[altered])
    stats = replay_strategy(
        texts, "vanilla_sd", {"num_speculative_tokens": 2}, model.resources, PROFILE
    ).stats
    assert stats.calls_per_token == trial.target_calls_per_token
    return stats.accepted / 5  # 1, 2, 4, 6 and 8


def trial(seconds: float, loss: float) -> Trial:
    return Trial.of(
        csd(tau=loss or 0.9),
        predicted_seconds_per_token=seconds,
        exact=False,
        target_calls_per_token=1.0,
        divergence=loss,
        source="estimated",
    )


def test_the_fastest_for_several_losses() -> None:
    trials = [
        trial(1.0, 0.2),
        trial(2.0, 0.09),
        trial(3.0, 0.08),
        trial(4.0, 0.04),
        trial(5.0, 0.01),
    ]
    assert [t.divergence for t in fastest_for_losses(trials, 0.1, 2)] == [0.09, 0.04], (
        "within .1 and within .05"
    )
    assert [t.divergence for t in fastest_for_losses(trials, 0.1, 1)] == [0.09]
    assert [t.divergence for t in fastest_for_losses(trials, None, 3)] == [0.2]
    assert fastest_for_losses(trials, 0.005, 2) == []


@pytest.fixture(scope="module")
def pair() -> LoadedPair:
    return table_pair()


@pytest.fixture(scope="module")
def trace(pair: LoadedPair, tmp_path_factory: pytest.TempPathFactory) -> TraceSet:
    return collect_traces(
        pair, PROMPTS, tmp_path_factory.mktemp("trace"), max_tokens=24, rollout=8, batch=4
    )


def test_estimates_order_real_runs(pair: LoadedPair, trace: TraceSet) -> None:
    """Without a loss the estimate is the replay of vanilla SD; the more is rescued, the fewer
    calls, both estimated and for real."""
    resources = StrategyResources({}, pair.special_tokens)
    model = RescueModel.read(trace, read_texts(trace), resources, PROFILE, 24)
    assert model is not None
    choices = [
        StrategyChoice("lossy_sd", {"num_speculative_tokens": 3, "tau": tau})
        for tau in (1.0, 0.6, 0.1, 0.001)
    ]
    estimates = [model.estimate(choice) for choice in choices]
    runs = Evaluator(pair, resources, max_tokens=24)(choices, PROMPTS)
    calls = [run.calls_per_token for run in runs]
    assert [e.divergence for e in estimates] == sorted(
        e.divergence for e in estimates if e.divergence is not None
    )
    assert estimates[-1].divergence is not None
    assert estimates[-1].divergence > 0.05, "this pair has something to rescue"
    assert calls[-1] < calls[0]
    for estimate, real in zip(estimates, calls, strict=True):
        assert estimate.target_calls_per_token == pytest.approx(real, rel=0.2)


def test_a_trace_without_the_targets_probabilities_has_no_model(
    trace: TraceSet, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = TraceSet.read

    def without(self: TraceSet, columns: list[str] | None = None) -> object:
        table = read(self, columns)
        place = table.column_names.index("draft_raw_p")
        import pyarrow as pa

        return table.set_column(place, "draft_raw_p", pa.nulls(table.num_rows, pa.float32()))

    texts = read_texts(trace)
    monkeypatch.setattr(TraceSet, "read", without)
    assert RescueModel.read(trace, texts, StrategyResources({}), PROFILE, 24) is None


def test_all_configurations_of_what_rescues_are_estimated() -> None:
    model = model_of(FOUND)
    assert {t.choice for t in estimate_rescues(("csd", "sprinter"), model)} == set(
        combinations("csd")
    )
    assert estimate_rescues(("csd",), None) == []
