"""The budget of prompt tokens follows what pauses cost, grows with those who wait, and never stops
anybody."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable
from typing import Any

import pytest

from draftwell.serving.runtime.commands import Forward
from draftwell.serving.runtime.engine import engine as engine_module, prompt_pieces
from draftwell.serving.runtime.engine.engine import Engine
from draftwell.serving.runtime.engine.prompt_budget import (
    CLEAN_EVERY,
    EXTRA,
    LONGEST_PAUSE,
    MOST_TOKENS,
    START_TOKENS,
    WAITING,
    PromptBudget,
)
from draftwell.serving.runtime.engine.prompt_pieces import LONGEST, SMALLEST
from draftwell.serving.runtime.models.lean_llama import LeanLlama
from draftwell.serving.runtime.strategies import build_strategy
from tests.support.models.asking import begun, submit
from tests.support.models.llama_shapes import llama
from tests.support.models.resources import table_pair

LONG = [1 + i % 7 for i in range(450)]


def room(budget: PromptBudget, answering: int, waiting: int, **more: Any) -> int:
    return budget.room("target", answering, waiting, **more)


def learnt(usual: float = 0.020, per_token: float = 0.001, pauses: int = 30) -> PromptBudget:
    """A budget after some pauses beside a prompt without an end."""
    budget = PromptBudget()
    beside(budget, usual, per_token, pauses)
    return budget


def beside(
    budget: PromptBudget, usual: float, per_token: float, pauses: int, model: str = "target"
) -> list[int]:
    """Pauses of eight requests beside a prompt; the tokens that were read in them."""
    rooms = []
    for _ in range(pauses):
        rooms.append(budget.room(model, 8, 1))
        budget.learn(usual + per_token * rooms[-1], {model: rooms[-1]} if rooms[-1] else {})
    return rooms


def test_where_nobody_waits_for_a_next_token_only_the_largest_budget_is_a_limit() -> None:
    for budget in (learnt(), PromptBudget(32)):
        assert budget.room("target", answering=0, waiting=5) == MOST_TOKENS, "but others may come"
        assert budget.room("draft", answering=1, waiting=0, reading=1) == MOST_TOKENS, (
            "it reads for itself alone"
        )
        assert budget.room("draft", answering=1, waiting=1, reading=1) < 100
        assert budget.room("draft", answering=2, waiting=0, reading=2) < 100, (
            "a short one may wait for a long one"
        )


def test_a_fixed_number_stays_whatever_is_measured() -> None:
    budget = PromptBudget(32)
    for read in (0, 500, 500, 0):
        budget.learn(0.5, {"target": read} if read else {})
    assert room(budget, 1, 100) == 32


def test_first_the_usual_pause_is_measured_then_there_is_a_start() -> None:
    budget = PromptBudget()
    assert room(budget, 3, 1) == 0
    budget.learn(0.3, {})
    assert room(budget, 3, 1) == START_TOKENS
    assert room(budget, 2, 2) == WAITING**2 * START_TOKENS
    assert room(budget, 2, 20) == LONGEST, (
        "a burst on a fresh server; nobody knows yet how long that takes"
    )


def test_nobody_waits_for_a_measurement_that_cannot_come() -> None:
    """The only request that is answered reads with its draft: no pause will end before it has
    read."""
    assert room(PromptBudget(), 1, 1, reading=1) == START_TOKENS
    budget = learnt()
    while room(budget, 1, 1):
        budget.learn(0.1, {"target": 50})
    assert room(budget, 1, 1, reading=1) >= SMALLEST


@pytest.mark.parametrize(
    ("usual", "per_token"), [(0.020, 0.001), (0.060, 0.0007), (0.012, 0.0002), (0.020, 0.004)]
)
def test_a_pause_grows_by_no_more_than_its_share(usual: float, per_token: float) -> None:
    """Dear tokens, as at the end of a long prompt, are read in the smallest pieces."""
    assert room(learnt(usual, per_token), 8, 1) == pytest.approx(
        max(SMALLEST, EXTRA * usual / per_token), rel=0.2
    )


def test_all_steps_of_a_pause_share_its_budget() -> None:
    """A draft of five tokens is five steps, in each of which another request's draft could read a
    prompt."""
    budget = learnt()
    whole, read = room(budget, 8, 1), 0
    for _ in range(6):
        now = room(budget, 8, 1)
        budget.spend("target", now)
        read += now
    assert read == pytest.approx(whole, rel=0.2)
    assert room(budget, 8, 1, reading=8) == SMALLEST, (
        "but where nobody goes on, nobody waits for the next pause"
    )


def test_prompts_of_a_few_tokens_without_end_stop_no_long_one() -> None:
    """They are always read, so no pause is without prompts; waiting for one would never end."""
    for budget in (PromptBudget(), learnt()):
        rooms = []
        for _ in range(10 * CLEAN_EVERY):
            rooms.append(room(budget, 8, 1))
            budget.learn(0.030 + 0.001 * rooms[-1], {"target": 10 + rooms[-1]})
        assert sum(now == 0 for now in rooms) <= 11
        assert min(now for now in rooms if now) >= SMALLEST


def test_models_that_read_in_one_pause_share_it_and_both_are_learnt() -> None:
    budget = learnt()
    cost = {"target": 0.004, "draft": 0.001}
    pauses = []
    for _ in range(60):
        read = {}
        for model in (*["draft"] * 5, "target"):
            now = budget.room(model, 8, 1, readers=2)
            budget.spend(model, now)
            read[model] = read.get(model, 0) + now
        pauses.append(0.060 + sum(cost[model] * tokens for model, tokens in read.items()))
        budget.learn(pauses[-1], {model: tokens for model, tokens in read.items() if tokens})
        budget._read = {}
        if all(read.values()):
            last = read
    assert last["target"] >= SMALLEST, "the draft's five steps leave the target its share"
    assert max(pauses[-20:]) < 3.5 * 0.060


def test_a_draft_that_reads_cheaply_says_nothing_about_the_target() -> None:
    budget = learnt(per_token=0.0007)
    before = room(budget, 8, 1)
    assert beside(budget, 0.020, 0.0001, 40, "draft")[-2] > 3 * before
    assert room(budget, 8, 1) == before


def test_many_who_wait_for_few_weigh_more_than_those_few() -> None:
    budget = learnt()
    one = room(budget, 8, 1)
    assert [room(budget, 8, waiting) for waiting in (2, 3, 4)] == [one] * 3
    assert room(budget, 8, 8) == pytest.approx(WAITING**2 * one, rel=0.05)
    assert room(budget, 31, 1) == one
    assert room(budget, 1, 1) == one, "a single one is no burst"
    assert room(budget, 1, 2) > 10 * one


@pytest.mark.parametrize(
    ("usual", "per_token"), [(0.025, 0.00075), (0.010, 0.0001), (0.010, 0.00001), (0.400, 0.010)]
)
def test_however_many_wait_a_pause_stays_below_its_longest(usual: float, per_token: float) -> None:
    """Thirty-one that wait for one would have it wait for 62² times what one costs it: 24 s at 25
    ms a pause."""
    budget = learnt(usual, per_token)
    longest = max(EXTRA * usual, LONGEST_PAUSE)
    for answering, waiting in ((1, 31), (1, 4), (8, 24), (2, 1000)):
        found = room(budget, answering, waiting)
        assert found <= MOST_TOKENS
        assert found == MOST_TOKENS or found * per_token == pytest.approx(longest, rel=0.1)


def test_what_many_may_cost_together_teaches_the_same() -> None:
    """A pause that was longer because many waited does not shrink the budget for one."""
    budget = learnt()
    before, many = room(budget, 8, 8), room(budget, 2, 8)
    budget.learn(0.020 + 0.001 * many, {"target": many})
    assert room(budget, 8, 8) == pytest.approx(before, rel=0.1)


def test_a_short_prompt_says_nothing_about_the_rate() -> None:
    budget = learnt()
    before = room(budget, 8, 1)
    budget.learn(0.025, {"target": 5})
    assert room(budget, 8, 1) == before


def test_one_pause_that_something_else_prolonged_changes_nothing() -> None:
    """Another process had the cores for two seconds: pauses of seconds are not usual now."""
    budget = learnt()
    before = room(budget, 8, 1)
    budget.learn(0.020, {})
    budget.learn(0.020, {})
    budget.learn(2.0, {})
    assert room(budget, 8, 1) == pytest.approx(before, rel=0.05)


def test_the_budget_follows_as_tokens_become_dearer() -> None:
    budget = learnt(per_token=0.0005)
    rooms: list[int] = []
    for i in range(10):
        rooms += [read for read in beside(budget, 0.020, 0.001 + 0.0002 * i, 1) if read]
    assert rooms == sorted(rooms, reverse=True)
    assert rooms[-1] < rooms[0] / 2


def test_short_prompts_do_not_make_pieces_of_a_long_one_longer() -> None:
    """A short prompt's tokens cost a third of those late in a long one: what they cost is no news
    about the latter."""
    position, usual, first = 3500, 0.020, 0.0007
    budget = PromptBudget()

    def pause(at: int) -> float:
        """Of eight requests, beside a prompt of which `at` tokens are read."""
        weight, allowed = 1 + at / 1536, budget.room("target", 8, 1)
        tokens = max(SMALLEST, int(allowed / weight)) if allowed else 0
        seconds = usual + first * weight * tokens
        budget.learn(seconds, {"target": tokens * weight} if tokens else {})
        return seconds

    for _ in range(30):
        pause(position)
    for _ in range(4):
        for _ in range(5):
            pause(20)
        assert pause(position) <= 3 * usual


@pytest.mark.parametrize("tokens", [None, 64])
def test_the_engine_counts_tokens_by_their_place_in_the_slot(tokens: int | None) -> None:
    """Also behind what a slot holds of an earlier request; under a fixed budget all alike, and
    while nobody is answered."""
    model, asked = LeanLlama(llama(max_position_embeddings=512), slots=3), list[int]()
    cost = model.token_cost
    model.token_cost = lambda position: (asked.append(position), cost(position))[1]  # type: ignore[method-assign]
    engine = Engine({"target": model}, budget=PromptBudget(tokens))
    engine.run([submit(engine, LONG[:200], 2, owner="me")])
    other = submit(engine, [1, 2, 3], 100)
    while not other.output:
        engine.step()
    asked.clear()
    late = submit(engine, LONG[:400], 2, owner="me")
    while not late.finished:
        engine.step()
    assert (min(asked) >= 150) if tokens is None else asked == []
    assert cost(0) == 1
    assert cost(300) == pytest.approx(1 + 100 * (cost(3) - 1))


def test_the_usual_pause_is_measured_again_while_prompts_never_end() -> None:
    """Answers of one request became answers of thirty, and in every pause a prompt was read."""
    budget = learnt(usual=0.010)
    clean = 0
    for _ in range(6 * CLEAN_EVERY):
        now = room(budget, 30, 1)
        clean += now == 0
        budget.learn(0.050 + 0.001 * now, {"target": now} if now else {})
    assert clean == 5
    assert room(budget, 30, 1) == pytest.approx(EXTRA * 50, rel=0.3)


def test_idle_time_between_requests_is_no_pause() -> None:
    budget = learnt(usual=0.020)
    room(budget, 1, 0)
    for now in (10.0, 10.020):
        budget.end_pause(now)
    for start in (500.0, 900.0, 1300.0):
        budget.room("target", 0, 1)
        budget.end_pause(start)
        before = room(budget, 1, 1)
        budget.spend("target", before)
        budget.end_pause(start + 0.020 + 0.001 * before)
    assert room(budget, 1, 1) == pytest.approx(before, rel=0.2), (
        "a usual pause of minutes would allow thousands of tokens"
    )


def clocked(
    monkeypatch: pytest.MonkeyPatch, budget: PromptBudget
) -> tuple[Engine, list[int], Callable[[], float]]:
    """An engine on a clock of its own, where a step takes 10 ms and 1 ms for each token; the tokens
    of its steps; the clock."""
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


def warmed(monkeypatch: pytest.MonkeyPatch) -> tuple[Engine, list[int], Callable[[], float]]:
    """As `clocked`: one request is being answered, and what a token of a prompt costs is known."""
    engine, steps, clock = clocked(monkeypatch, PromptBudget())
    for prompt, max_tokens in ((LONG[:2], 480), (LONG, 1)):
        job = submit(engine, prompt, max_tokens)
        while not job.output:
            engine.step()
    return engine, steps, clock


@pytest.mark.parametrize(
    ("strategy", "late_strategy", "answered"),
    [
        ("autoregressive", "autoregressive", 6),
        ("autoregressive", "vanilla_sd", 6),
        ("vanilla_sd", "autoregressive", 6),
        ("vanilla_sd", "vanilla_sd", 6),
        ("autoregressive", "autoregressive", 1),
        ("vanilla_sd", "autoregressive", 1),
        # beside a single one's plain decoding a draft's steps are as long as the usual pause: 3.1
        # times
        ("vanilla_sd", "vanilla_sd", 1),
    ],
)
def test_a_long_prompt_keeps_pauses_below_three_times_the_usual(
    strategy: str, late_strategy: str, answered: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Read by the target, and then by the draft of its request, while one other is answered, or
    several."""
    engine, _, clock = clocked(monkeypatch, PromptBudget())
    jobs = [submit(engine, [1, 2], 480, build_strategy(strategy)) for _ in range(answered)]

    def pauses(until: Callable[[], bool]) -> list[float]:
        """Seconds between steps that brought tokens to those who were there first."""
        times, known = [clock()], sum(len(job.output) for job in jobs)
        while not until():
            engine.step()
            if (now := sum(len(job.output) for job in jobs)) > known:
                times.append(clock())
                known = now
        return [b - a for a, b in itertools.pairwise(times)]

    before = statistics.median(pauses(lambda: all(len(job.output) > 30 for job in jobs)))
    warm = submit(engine, LONG[:200], 3, build_strategy(late_strategy))
    pauses(lambda: warm.finished)  # after this it has found its measure
    late = submit(engine, LONG, 3, build_strategy(late_strategy))
    meanwhile = pauses(lambda: len(late.output) > 1)
    assert max(meanwhile) <= 3 * before
    assert not any(job.finished for job in jobs)
    assert len(meanwhile) < 60, "nor is the prompt starved"


def test_requests_that_arrive_together_do_not_wait_for_the_first_of_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The first is answered before the others come; in pieces that spare it, they would wait for
    dozens of steps."""
    engine, steps, _ = warmed(monkeypatch)
    others = [submit(engine, LONG[:90], 50) for _ in range(7)]
    steps.clear()
    while not all(job.output for job in others):
        engine.step()
    assert len(steps) < 10, (
        "it takes 7; where pauses grow by twice the ratio instead of its square 12, by the "
        "ratio 17, without growth 32"
    )


def test_a_burst_of_long_prompts_holds_up_nobody_for_longer_than_the_longest_pause(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Seven wait for one that is answered: without a bound all of their 3,000 tokens would be read
    in one step of three seconds."""
    engine, _, clock = warmed(monkeypatch)
    others = [submit(engine, LONG, 2) for _ in range(7)]
    times = [clock()]
    while not any(job.output for job in others):
        engine.step()
        times.append(clock())
    usual = 0.011
    assert (
        LONGEST_PAUSE < max(b - a for a, b in itertools.pairwise(times)) < LONGEST_PAUSE + 2 * usual
    )


def test_who_is_answered_goes_on_while_no_prompt_may_be_read() -> None:
    budget = learnt()
    engine = Engine(table_pair(vocab=8), budget=budget)
    busy = begun(engine, max_tokens=60)
    while room(budget, 1, 1):
        budget.learn(0.1, {"target": 50})
    late = submit(engine, LONG, 4, build_strategy("vanilla_sd"))
    known = len(busy.output)
    engine.step()
    assert len(busy.output) == known + 1
    assert not any(leaf.read for leaf in late.task.leaves())
    engine.run([busy, late])
    assert len(late.output) == 4


def test_a_request_that_comes_while_a_long_prompt_is_read_is_answered_before_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nobody was being answered when the long one came; read in one step, it would hold up the
    short one for seconds."""
    monkeypatch.setattr(prompt_pieces, "LONGEST", 100)
    engine, steps, _ = clocked(monkeypatch, PromptBudget())
    long = submit(engine, LONG, 2)
    engine.step()
    assert steps == [100]
    short = submit(engine, LONG[:30], 2)
    engine.step()
    assert short.output
    assert not long.output


def test_a_request_that_comes_while_a_draft_reads_a_long_prompt_does_not_wait_for_all_of_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The only request that is answered waits for its own draft; whoever comes would wait for that
    too."""
    monkeypatch.setattr(prompt_pieces, "LONGEST", 100)
    engine, steps, _ = clocked(monkeypatch, PromptBudget())
    long = submit(engine, LONG, 9, build_strategy("vanilla_sd"))
    while not long.output:
        engine.step()
    engine.step()
    assert steps[-1] == 100
    short = submit(engine, LONG[:30], 2)
    while not short.output:
        engine.step()
    assert len(long.output) == 1, "its draft still reads"
