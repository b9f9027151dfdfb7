"""The engine: batching changes nothing, a bad request hurts nobody, every slot comes back."""

from __future__ import annotations

from itertools import groupby

import pytest

from draftwell.serving.errors import ContextTooLong
from draftwell.serving.runtime.engine.engine import Engine
from draftwell.serving.runtime.requests import Sampling, Text
from draftwell.serving.runtime.strategies import STRATEGIES, Strategy, build_strategy
from tests.support.cases import in_turn
from tests.support.errors import raises_code
from tests.support.models.asking import submit
from tests.support.models.resources import NEEDED, table_pair, table_resources


def usual(name: str) -> Strategy:
    """A strategy with its defaults."""
    return build_strategy(name, NEEDED.get(name, {}), table_resources(8))


def free_slots(engine: Engine) -> set[int]:
    return {len(model.slots._free) for model in engine.models.values()}


def test_a_stream_only_ever_grows():
    engine = Engine(table_pair(vocab=8, noise=2.0))
    job = submit(engine, [1], 50, build_strategy("spide", {}, table_resources(8)))
    streamed: list[int] = []
    while not job.finished:
        engine.step()
        streamed += [token.id for token in job.new_tokens()]
        assert job.output[: len(streamed)] == streamed
    assert streamed == job.output


def test_a_step_copies_no_text(monkeypatch):
    """Else the time of a token grows with the text."""
    copied, output = [], Text.output.fget
    monkeypatch.setattr(Text, "output", property(lambda text: copied.append(1) or output(text)))
    engine = Engine(table_pair(vocab=8))
    job = submit(engine, [1, 2], 30)
    engine.run([job])
    assert not copied
    assert len(job.output) == 30


def test_cancelled_requests_free_their_slots_at_once():
    engine = Engine(table_pair(vocab=8))
    job = submit(engine, [1], 400, build_strategy("spide", {}, table_resources(8)))
    engine.step()
    engine.cancel(job)
    assert job.finished
    assert free_slots(engine) == {8}
    assert engine.jobs == []


def test_cancelling_the_last_request_lets_the_worker_threads_go():
    engine = Engine(table_pair(vocab=5))
    job = submit(engine, [1], 30, build_strategy("pearl", {}, table_resources(5)))
    engine.step()
    assert engine._workers is not None
    engine.cancel(job)
    assert engine._workers is None


@pytest.mark.parametrize(("patience", "longest"), [(None, 8), (2, 3), (0, 1)])
def test_the_target_waits_for_drafts_no_longer_than_it_may(patience, longest):
    """One that drafts eight tokens a round holds up another one: by eight passes for each of its
    tokens, or by so many as are allowed."""
    models = table_pair(vocab=8)
    calls: list[str] = []
    for role, model in models.items():

        def noted(rows, forward=model.forward, role=role):
            calls.extend([role] * (len(rows) > 0))
            return forward(rows)

        model.forward = noted
    engine = Engine(models)
    engine.patience = patience
    eight = build_strategy("vanilla_sd", {"num_speculative_tokens": 8}, table_resources(8))
    plain = submit(engine, [1, 2], 9)
    drafting = submit(engine, [3, 2], 60, eight, temperature=1.0, seed=3)
    while not plain.finished:
        engine.step()
    between = [len(list(group)) for role, group in groupby(calls) if role == "draft"]
    assert max(between) == longest
    engine.run([drafting])
    assert (
        drafting.output
        == Engine(table_pair(vocab=8)).generate([3, 2], drafting.session.sampling, eight).output
    )


def test_a_failing_request_leaves_the_others_unharmed():
    models = table_pair(vocab=8)
    original = models["target"].forward

    def forward(rows):
        if any(7 in row.tokens for row in rows):
            raise RuntimeError("a kernel failed")
        return original(rows)

    for model in models.values():
        model.table[..., 7] = -50.0
    models["target"].forward = forward
    engine = Engine(models)
    good = submit(engine, [1, 2], 10, build_strategy("vanilla_sd"))
    bad = submit(engine, [7, 2], 10, build_strategy("vanilla_sd"))
    while not (good.finished and bad.finished):
        engine.step()
    assert isinstance(bad.error, RuntimeError)
    assert good.error is None
    models["target"].forward = original
    assert (
        good.output
        == Engine(models)
        .generate([1, 2], Sampling(max_tokens=10), build_strategy("vanilla_sd"))
        .output
    )
    assert free_slots(engine) == {8}


@pytest.mark.parametrize(("name", "temperature"), in_turn(STRATEGIES, [0.0, 0.8]))
def test_counters_add_up(name, temperature):
    sampling = Sampling(max_tokens=70, temperature=temperature)
    job = Engine(table_pair(vocab=8)).generate([1, 2, 3], sampling, usual(name))
    stats = job.session.stats
    assert stats.emitted == stats.accepted + stats.sampled == len(job.output) == 70
    assert stats.accepted <= stats.judged <= stats.drafted
    assert sum(stats.accepted_at.values()) == stats.accepted
    assert stats.prefill_calls == 1


def test_a_failed_submit_takes_no_slot():
    engine = Engine(table_pair(vocab=8))
    with raises_code("context_too_long", "600", error=ContextTooLong):
        submit(engine, [1], 600, build_strategy("vanilla_sd"))
    with raises_code("empty_prompt"):
        engine.submit([], Sampling(), build_strategy("vanilla_sd"))
    jobs = [engine.submit([1], Sampling(), build_strategy("vanilla_sd")) for _ in range(8)]
    with raises_code("no_free_slot", "8 slots"):
        engine.submit([1], Sampling(), build_strategy("vanilla_sd"))
    assert len(jobs) == len(engine.jobs) == 8


def test_text_is_cut_at_stop_tokens_and_budget():
    text = Text([1], Sampling(max_tokens=3, stop_token_ids=frozenset({9})))
    assert text.append([2, 3]) == 2
    assert text.remaining == 1
    assert text.append([4, 5]) == 1
    assert text.finish_reason == "length"
    text = Text([9], Sampling(max_tokens=3, stop_token_ids=frozenset({9})))
    assert not text.finished, "a stop token in the prompt ends nothing"
    assert text.append([9, 4]) == 1
    assert text.finish_reason == "stop"


@pytest.mark.parametrize(
    ("name", "parameters", "code", "named"),
    [
        ("vanila_sd", {}, "unknown_strategy", "vanilla_sd"),
        ("vanilla_sd", {"gamma": 3}, "unknown_parameter", "'gamma'"),
        (
            "vanilla_sd",
            {"num_speculative_tokens": 0},
            "bad_parameter",
            "greater than or equal to 1",
        ),
        ("spide", {"tau": "x"}, "bad_parameter", "valid number"),
    ],
)
def test_wrong_names_and_values_are_one_line(name, parameters, code, named):
    with raises_code(code, named) as caught:
        build_strategy(name, parameters)
    assert "\n" not in str(caught.value)


def test_a_missing_artifact_is_named():
    engine = Engine(table_pair(vocab=8))
    job = engine.submit([1], Sampling(), build_strategy("sprinter"))
    assert "verifier" in str(job.error)
    assert job.finished
