"""The budget of prompt tokens follows what pauses cost, grows with those who wait, and never stops anybody."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable
from typing import Any

import pytest

from serving.runtime.commands import Forward
from serving.runtime.engine import engine as engine_module
from serving.runtime.engine.engine import Engine
from serving.runtime.engine.prompt_budget import CLEAN_EVERY, EXTRA, START_TOKENS, PromptBudget
from serving.runtime.engine.prompt_pieces import LEAST
from serving.runtime.requests import Sampling
from serving.runtime.strategies import build_strategy
from tests.support.models.resources import table_pair

LONG = [1 + i % 7 for i in range(450)]


def learnt(usual: float = 0.020, per_token: float = 0.001, pauses: int = 30) -> PromptBudget:
    """A budget after some pauses beside a prompt without an end."""
    budget = PromptBudget()
    budget.learn(usual, 0)
    for _ in range(pauses):
        room = budget.room(8, 1)
        assert room is not None
        budget.learn(usual + per_token * room, room)
    return budget


def test_nobody_waits_nothing_is_limited() -> None:
    assert learnt().room(answering=0, waiting=5) is None
    assert PromptBudget(32).room(answering=0, waiting=5) is None


def test_a_fixed_number_stays_whatever_is_measured() -> None:
    budget = PromptBudget(32)
    for read in (0, 500, 500, 0):
        budget.learn(0.5, read)
    assert budget.room(answering=1, waiting=100) == 32


def test_before_anything_is_measured_there_is_a_start() -> None:
    budget = PromptBudget()
    budget.learn(0.3, 50)
    assert budget.room(answering=3, waiting=1) == START_TOKENS


@pytest.mark.parametrize(("usual", "per_token"), [(0.020, 0.001), (0.060, 0.0007), (0.012, 0.0002), (0.020, 0.004)])
def test_a_pause_grows_by_no_more_than_its_share(usual: float, per_token: float) -> None:
    """Dear tokens, as at the end of a long prompt, are read in the smallest pieces."""
    assert learnt(usual, per_token).room(8, 1) == pytest.approx(max(LEAST, EXTRA * usual / per_token), rel=0.2)


def test_many_who_wait_for_one_weigh_more_than_that_one() -> None:
    budget = learnt()
    alike = budget.room(8, 8)
    assert alike is not None
    assert budget.room(1, 31) == pytest.approx(31 * alike, rel=0.05)
    assert budget.room(31, 1) == alike


def test_what_many_may_cost_together_teaches_the_same() -> None:
    """A pause that was longer because many waited does not shrink the budget for one."""
    budget = learnt()
    before = budget.room(8, 8)
    room = budget.room(2, 8)
    assert before is not None
    assert room is not None
    budget.learn(0.020 + 0.001 * room, room)
    assert budget.room(8, 8) == pytest.approx(before, rel=0.1)


def test_a_short_prompt_says_nothing_about_the_budget() -> None:
    budget = learnt()
    before = budget.room(8, 1)
    budget.learn(0.025, 5)
    assert budget.room(8, 1) == before


def test_the_budget_follows_as_tokens_become_dearer() -> None:
    budget = learnt(per_token=0.0005)
    rooms = []
    for i in range(10):
        room = budget.room(8, 1)
        assert room is not None
        if room:  # else the usual pause is measured
            rooms.append(room)
        budget.learn(0.020 + room * (0.001 + 0.0002 * i), room)
    assert rooms == sorted(rooms, reverse=True)
    assert rooms[-1] < rooms[0] / 2


def test_the_usual_pause_is_measured_again_while_prompts_never_end() -> None:
    """Answers of one request became answers of thirty, and in every pause a prompt was read."""
    budget = learnt(usual=0.010)
    clean = 0
    for _ in range(6 * CLEAN_EVERY):
        room = budget.room(30, 1)
        assert room is not None
        clean += room == 0
        budget.learn(0.050 + 0.001 * room, room)
    assert clean == 5
    assert budget.room(30, 1) == pytest.approx(EXTRA * 50, rel=0.3)


def test_idle_time_between_requests_is_no_pause() -> None:
    budget = learnt(usual=0.020)
    budget.room(1, 0)
    budget.end_pause(10.0)
    budget.end_pause(10.020)
    budget.room(0, 1)
    budget.end_pause(500.0)
    before = budget.room(1, 1)
    budget.spend(30)
    budget.end_pause(500.050)
    assert budget.room(1, 1) == pytest.approx(before, rel=0.2), "a usual pause of minutes would allow thousands of tokens"


def clocked(monkeypatch: pytest.MonkeyPatch, budget: PromptBudget) -> tuple[Engine, list[int], Callable[[], float]]:
    """An engine on a clock of its own, where a step takes 10 ms and 1 ms for each token; the tokens of its steps; the clock."""
    now = itertools.count()
    models = table_pair(vocab=8)
    steps: list[int] = []

    def record(run: Callable[[list[Forward]], Any]) -> Callable[[list[Forward]], Any]:
        def forward(rows: list[Forward]) -> Any:
            steps.append(sum(len(row.tokens) for row in rows))
            return run(rows)

        return forward

    def clock() -> float:
        return 0.010 * len(steps) + 0.001 * sum(steps) + 1e-9 * next(now)

    for model in models.values():
        model.forward = record(model.forward)
    monkeypatch.setattr(engine_module.time, "perf_counter", clock)
    return Engine(models, budget=budget), steps, clock


@pytest.mark.parametrize("strategy", ["autoregressive", "vanilla_sd"])
def test_a_long_prompt_keeps_pauses_below_three_times_the_usual(strategy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, _, clock = clocked(monkeypatch, PromptBudget())
    jobs = [engine.submit([1, 2], Sampling(max_tokens=450), build_strategy(strategy)) for _ in range(7)]

    def pauses(until: Callable[[], bool]) -> list[float]:
        """Seconds between steps that brought tokens."""
        times, known = [clock()], sum(len(job.output) for job in jobs)
        while not until():
            engine.step()
            if (now := sum(len(job.output) for job in jobs)) > known:
                times.append(clock())
                known = now
        return [b - a for a, b in itertools.pairwise(times)]

    before = statistics.median(pauses(lambda: all(len(job.output) > 60 for job in jobs)))
    late = engine.submit(LONG, Sampling(max_tokens=2), build_strategy("autoregressive"))
    meanwhile = pauses(lambda: bool(late.output))
    assert max(meanwhile[2:]) <= 3 * before, "it has found its measure"
    assert not any(job.finished for job in jobs)
    assert len(meanwhile) < len(LONG) / LEAST, "nor is the prompt starved"


def test_requests_that_arrive_together_do_not_wait_for_the_first_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first is answered before the others come; in pieces that spare it, they would wait for dozens of steps."""
    engine, steps, _ = clocked(monkeypatch, learnt(0.011, 0.001, 3))
    first = engine.submit([1, 2], Sampling(max_tokens=400), build_strategy("autoregressive"))
    while not first.output:
        engine.step()
    others = [engine.submit(LONG[:90], Sampling(max_tokens=50), build_strategy("autoregressive")) for _ in range(7)]
    steps.clear()
    while not all(job.output for job in others):
        engine.step()
    assert len(steps) < 30, "pieces of sixteen tokens would take 40"


def test_a_clean_step_stops_nobody() -> None:
    """Whoever is answered when no prompt may be read gets its token; one that reads a prompt itself is nobody to wait for."""
    budget = learnt()
    while budget.room(1, 1):
        budget.learn(0.1, 50)
    assert budget.room(1, 1) == 0
    engine = Engine(table_pair(vocab=8), budget=budget)
    job = engine.submit(LONG[:300], Sampling(max_tokens=20), build_strategy("vanilla_sd"))
    engine.run([job])  # its draft reads the prompt after the first token
    assert len(job.output) == 20
