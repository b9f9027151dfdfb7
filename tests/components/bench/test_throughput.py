"""Throughput alone and at once: what is measured, and that outputs do not depend on it."""

from __future__ import annotations

import json
import time

import pytest

from draftwell.components.bench import throughput
from draftwell.components.bench.settings import BenchSettings
from draftwell.components.bench.throughput import batch_throughput, drive
from draftwell.components.prompts.prompt import Prompt
from draftwell.serving.runtime.engine.engine import Engine
from draftwell.serving.runtime.requests import Sampling
from draftwell.serving.runtime.strategies import PLAIN, StrategyChoice, build_strategy
from tests.support.errors import raises_code
from tests.support.models.resources import table_resources
from tests.support.models.tiny import VOCAB, table_pair

PROMPTS = [
    Prompt(f"p{i}", "qa", [text])
    for i, text in enumerate(
        ["abc", "hello", "xyz", "one", "two", "speculate", "drafts", "tokens", "more"]
    )
]


def slow_pair(tick):
    """A forward pass takes as long for eight rows as for one; `tick` is called in each."""
    pair = table_pair(slots=8)
    for model in pair.models.values():
        forward = model.forward

        def slow(rows, forward=forward):
            tick()
            return forward(rows)

        model.forward = slow
    return pair


class Clock:
    """A clock that moves by 4 ms with every forward pass and not otherwise."""

    def __init__(self):
        self.now = 0.0

    def tick(self):
        self.now += 0.004

    def perf_counter(self):
        return self.now


def test_eight_at_once_are_faster_where_a_batch_costs_what_one_costs(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(throughput, "time", clock)
    report = batch_throughput(
        slow_pair(clock.tick),
        table_resources(VOCAB),
        [
            StrategyChoice("autoregressive"),
            StrategyChoice("vanilla_sd", {"num_speculative_tokens": 2}),
        ],
        PROMPTS,
        BenchSettings(max_tokens=12, runs=1),
    )
    json.dumps(report)
    assert set(report["configs"]) == {"autoregressive", "vanilla_sd"}
    for figures in report["configs"].values():
        assert figures["ratio"] == pytest.approx(figures["together"] / figures["alone"])
        assert figures["ratio"] > 3
        assert figures["identical"] == len(PROMPTS)
        assert figures["near_ties"] == figures["differences"] == []
    plain = report["configs"]["autoregressive"]
    assert plain["alone"] == pytest.approx(1 / 0.004), (
        "one forward pass per token, the prompt's among them"
    )


@pytest.mark.timed
def test_eight_at_once_are_faster_by_a_real_clock():
    report = batch_throughput(
        slow_pair(lambda: time.sleep(0.004)),
        table_resources(VOCAB),
        [PLAIN],
        PROMPTS,
        BenchSettings(max_tokens=12),
    )
    assert report["configs"]["autoregressive"]["ratio"] > 2


def test_never_more_than_asked_for_are_in_flight():
    engine, most = Engine(table_pair(slots=8).models), []
    step = engine.step

    def watched():
        most.append(len(engine.jobs))
        step()

    engine.step = watched
    requests = [([3, i], Sampling(max_tokens=4 + i)) for i in range(9)]
    _, outputs = drive(engine, build_strategy("autoregressive"), requests, at_once=3)
    assert max(most) == 3
    assert [len(output) for output in outputs] == [4 + i for i in range(9)], (
        "outputs come in the order of the requests"
    )


def test_fewer_prompts_than_requests_at_once_are_refused():
    with raises_code("too_few_prompts", "9 prompts", "10 requests at once"):
        batch_throughput(
            table_pair(),
            table_resources(VOCAB),
            [StrategyChoice("autoregressive")],
            PROMPTS,
            BenchSettings(concurrency=10),
        )
