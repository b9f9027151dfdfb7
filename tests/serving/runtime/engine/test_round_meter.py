"""Rounds of an engine: how long they take, what they bring, and which of them read prompts."""

from __future__ import annotations

from draftwell.serving.runtime.engine.engine import Engine
from draftwell.serving.runtime.engine.round_meter import Round
from draftwell.serving.runtime.requests import Sampling
from draftwell.serving.runtime.strategies import build_strategy
from tests.support.models.resources import table_pair


def rounds(engine: Engine) -> list[Round]:
    """Step until nobody runs; the rounds that ended."""
    found = []
    while engine.jobs:
        engine.step()
        if ended := engine.meter.take():
            found.append(ended)
    return found


def ticking(engine: Engine) -> Engine:
    """An engine whose clock goes on by a second with each pass of the target."""
    now, run = [0.0], engine.models["target"].forward
    engine.meter.clock = lambda: now[0]

    def forward(rows):
        now[0] += 1.0
        return run(rows)

    engine.models["target"].forward = forward  # type: ignore[method-assign]
    return engine


def test_a_round_is_a_pass_of_the_target_with_all_drafts_before_it() -> None:
    engine = ticking(Engine(table_pair(vocab=8, noise=0.0)))
    jobs = [
        engine.submit(
            [1, 2],
            Sampling(max_tokens=25),
            build_strategy("vanilla_sd", {"num_speculative_tokens": 3}),
        )
        for _ in range(2)
    ]
    found = rounds(engine)
    assert {one.seconds for one in found} == {1.0}
    assert found[0].tokens == 8, "three drafted and one more, of each of two"
    # the first tokens come with the prompt, and the first round begins where the second tokens come
    assert sum(one.tokens for one in found) == sum(len(job.output) for job in jobs) - 2 - 8


def test_a_round_in_which_a_prompt_is_read_is_not_clean() -> None:
    engine = ticking(Engine(table_pair(vocab=8)))
    plain = build_strategy("autoregressive")
    engine.submit([1, 2], Sampling(max_tokens=12), plain)
    for _ in range(5):
        engine.step()
    assert engine.meter.take() == Round(1.0, 1, True)
    assert engine.meter.take() is None, "once"
    engine.submit([1, 2, 3], Sampling(max_tokens=12), plain)
    engine.step()
    assert engine.meter.take() == Round(1.0, 1, False)
    engine.step()
    assert engine.meter.take() == Round(1.0, 2, True)


def test_time_in_which_nobody_ran_is_no_round() -> None:
    engine = ticking(Engine(table_pair(vocab=8)))
    plain = build_strategy("autoregressive")
    engine.generate([1, 2], Sampling(max_tokens=4), plain)
    engine.meter.take()
    engine.models["target"].forward([])
    engine.models["target"].forward([])
    engine.submit([1, 2], Sampling(max_tokens=4), plain)
    assert {one.seconds for one in rounds(engine)} == {1.0}


def test_time_after_a_request_that_was_cancelled_is_no_round() -> None:
    engine = ticking(Engine(table_pair(vocab=8)))
    plain = build_strategy("autoregressive")
    job = engine.submit([1, 2], Sampling(max_tokens=40), plain)
    for _ in range(4):
        engine.step()
    engine.cancel(job)
    engine.meter.take()
    engine.models["target"].forward([])
    engine.models["target"].forward([])
    engine.submit([1, 2], Sampling(max_tokens=4), plain)
    assert {one.seconds for one in rounds(engine)} == {1.0}
