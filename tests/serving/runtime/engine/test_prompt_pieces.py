"""Long prompts in pieces: nothing changes but who waits for whom."""

from __future__ import annotations

from typing import Any

import pytest

from draftwell.serving.recording.prompt_ratings import RatedPrompt
from draftwell.serving.runtime.commands import Forward
from draftwell.serving.runtime.engine.engine import Engine
from draftwell.serving.runtime.engine.prompt_budget import PromptBudget
from draftwell.serving.runtime.engine.prompt_pieces import LEAST, MOST_ROWS, SMALLEST
from draftwell.serving.runtime.requests import Sampling
from draftwell.serving.runtime.strategies import STRATEGIES, build_strategy
from tests.support.cases import in_turn
from tests.support.models.asking import begun, submit
from tests.support.models.resources import NEEDED, table_pair, table_resources
from tests.support.models.table_model import TableModel

LONG = [1 + i % 7 for i in range(200)]
ROOM = 32


def recorded(models: dict[str, Any]) -> list[tuple[str, list[Forward]]]:
    """(role, rows) of every batch that the models run from here on."""
    batches: list[tuple[str, list[Forward]]] = []

    def record(role: str, model: Any) -> None:
        run = model.forward
        model.forward = lambda rows: (batches.append((role, list(rows))), run(rows))[1]

    for role, model in models.items():
        record(role, model)
    return batches


@pytest.mark.parametrize(("name", "split"), in_turn(STRATEGIES, [None, True]))
def test_answers_are_those_of_whole_prompts_with_a_budget_in_time(
    name: str, split: bool | None
) -> None:
    """However long steps take here, in turn and with a thread for each model; nobody waits for
    ever."""

    def strategy() -> Any:
        return build_strategy(name, NEEDED.get(name, {}), table_resources(8))

    sampling = Sampling(max_tokens=12, temperature=1.0, seed=5)
    alone = Engine(table_pair(vocab=8)).generate(LONG, sampling, strategy()).output
    engine = Engine(table_pair(vocab=8), split=split, budget=PromptBudget())
    jobs = [begun(engine, max_tokens=100), engine.submit(LONG, sampling, strategy())]
    for steps in range(2000):
        if steps % 5 == 0 and len(jobs) < 5:
            jobs.append(engine.submit(LONG, sampling, strategy()))
        engine.step()
        if len(jobs) == 5 and all(job.finished for job in jobs):
            break
    assert [job.output for job in jobs[1:]] == [alone] * 4
    assert all(len(model.slots._free) == 8 for model in engine.models.values())


@pytest.mark.parametrize(("name", "temperature"), in_turn(STRATEGIES, [0.0, 1.0]))
def test_answers_are_those_of_whole_prompts(name: str, temperature: float) -> None:
    def strategy() -> Any:
        return build_strategy(name, NEEDED.get(name, {}), table_resources(8))

    sampling = Sampling(max_tokens=12, temperature=temperature, seed=5)
    alone = Engine(table_pair(vocab=8)).generate(LONG, sampling, strategy()).output
    models = table_pair(vocab=8)
    engine = Engine(models, budget=PromptBudget(ROOM))
    busy = begun(engine, max_tokens=100)
    batches = recorded(models)
    jobs = [engine.submit(LONG, sampling, strategy()) for _ in range(3)]
    engine.run([busy, *jobs])
    assert [job.output for job in jobs] == [alone] * 3
    assert all(
        sum(len(row.tokens) for row in rows if len(row.tokens) > LEAST) <= ROOM
        for _, rows in batches
        if len(rows) > 1
    )
    assert all(len(model.slots._free) == 8 for model in models.values())
    assert [job.session.stats.prefill_calls for job in jobs] == [1] * 3


@pytest.mark.parametrize("name", ["autoregressive", "vanilla_sd"])
def test_the_others_get_tokens_while_a_prompt_is_read(name: str) -> None:
    """The draft reads the prompt too, and a target that waited for all drafts would wait for
    that."""
    engine = Engine(table_pair(vocab=8), budget=PromptBudget(ROOM))
    busy = begun(engine, max_tokens=100)
    late = submit(engine, LONG, 4, build_strategy(name))
    while not late.output:
        before = len(busy.output)
        engine.step()
        assert len(busy.output) == before + 1
    before = len(busy.output)
    while len(late.output) < 2:
        engine.step()
    assert len(busy.output) - before >= (len(LONG) // ROOM if name == "vanilla_sd" else 1), (
        "the draft read its pieces meanwhile"
    )


def test_a_prompt_that_nobody_waits_behind_is_read_at_once() -> None:
    models = table_pair(vocab=8)
    batches = recorded(models)
    Engine(models, budget=PromptBudget(ROOM)).generate(
        LONG, Sampling(max_tokens=2), build_strategy("autoregressive")
    )
    assert [len(rows[0].tokens) for _, rows in batches] == [len(LONG), 1]


def test_a_short_prompt_does_not_wait_behind_a_long_one_that_goes_on() -> None:
    models = table_pair(vocab=8)
    engine = Engine(models, budget=PromptBudget(64))
    begun(engine, max_tokens=100)
    batches = recorded(models)
    for length in (200, 100, 60):
        submit(engine, LONG[:length], 90)
    for _ in range(7):
        engine.step()
    assert [[len(row.tokens) for row in rows] for _, rows in batches] == [
        [1, 32, 32],
        [1, 36, 28],
        [1, 32, 32, 1],
        [1, 32, 32, 1],
        [1, 32, 32, 1],
        [1, 36, 4, 1],
        [1, 1, 1, 1],
    ]


@pytest.mark.parametrize("tokens", [SMALLEST, LEAST, None])
@pytest.mark.parametrize("short", [10, 20])
@pytest.mark.parametrize("strategy", ["autoregressive", "vanilla_sd"])
def test_a_long_prompt_is_read_however_many_short_ones_come(
    tokens: int | None, short: int, strategy: str
) -> None:
    engine = Engine(table_pair(vocab=8), budget=PromptBudget(tokens))
    begun(engine, build_strategy(strategy))
    late = submit(engine, LONG, 4)
    steps = 0
    while not late.output:
        if len(engine.jobs) < 6:
            submit(engine, LONG[:short], 2)
        engine.step()
        steps += 1
        assert steps < 300


def test_two_long_prompts_take_turns_beside_drafts_of_any_length() -> None:
    """With three draft steps and one of the target, every step of the target would be an even
    one."""
    for drafted in (1, 2, 3):
        engine = Engine(table_pair(vocab=8), budget=PromptBudget(SMALLEST))
        begun(engine, build_strategy("vanilla_sd", {"num_speculative_tokens": drafted}))
        waiting = [submit(engine, LONG[:n], 2) for n in (200, 190)]
        for _ in range(8 * (drafted + 1)):
            engine.step()
        read = [next(job.task.leaves()).read for job in waiting]
        assert min(read) >= SMALLEST, read


def test_prompts_that_are_rated_are_read_in_pieces_too() -> None:
    """Beside a request that is being answered they share the room to the last token, and their
    ratings are those of whole parts."""
    sampling = Sampling(max_tokens=3, logprobs=2)
    alone = Engine(table_pair(vocab=8)).generate(LONG, sampling, RatedPrompt())
    models = table_pair(vocab=8)
    engine = Engine(models, budget=PromptBudget(ROOM))
    busy = begun(engine, max_tokens=100)
    batches = recorded(models)
    jobs = [engine.submit(LONG, sampling, RatedPrompt()) for _ in range(7)]
    engine.run([busy, *jobs])
    assert all(
        sum(len(row.tokens) for row in rows if len(row.tokens) > 1) <= ROOM for _, rows in batches
    )
    assert [job.session.prompt_ratings for job in jobs] == [alone.session.prompt_ratings] * 7
    assert [job.output for job in jobs] == [alone.output] * 7


@pytest.mark.parametrize("length", [LEAST, 20, 200])
def test_a_step_has_a_bounded_number_of_rows_of_prompts_that_are_rated(length: int) -> None:
    """Though nobody waits for a next token, so that there is room for thousands of tokens of
    prompts. None waits for ever."""
    models = {"target": TableModel.random(vocab_size=8, seed=0, slots=24)}
    engine = Engine(models, budget=PromptBudget())
    batches = recorded(models)
    jobs = [
        submit(engine, [1 + number % 7, *LONG[: length - 1]], 1, RatedPrompt(), logprobs=0)
        for number in range(24)
    ]
    engine.run(jobs)
    kept = [sum(row.keep for row in rows) for _, rows in batches]
    assert max(kept) <= MOST_ROWS
    assert sum(kept) == 24 * length
    assert len(batches) <= -(-24 * length // MOST_ROWS) + 4


def test_a_request_cancelled_while_its_prompt_is_read_frees_its_slots() -> None:
    engine = Engine(table_pair(vocab=8), budget=PromptBudget(ROOM))
    busy = begun(engine, max_tokens=100)
    late = submit(engine, LONG, 4, build_strategy("vanilla_sd"))
    engine.step()
    engine.cancel(late)
    engine.run([busy])
    assert all(len(model.slots._free) == 8 for model in engine.models.values())


def test_a_failing_piece_ends_its_request_alone() -> None:
    models = table_pair(vocab=8)
    engine = Engine(models, budget=PromptBudget(ROOM))
    busy = begun(engine, max_tokens=100)
    run = models["target"].forward

    def forward(rows: list[Forward]) -> Any:
        if any(7 in row.tokens and len(row.tokens) > 1 for row in rows):
            raise RuntimeError("a kernel failed")
        return run(rows)

    models["target"].forward = forward
    late = submit(engine, [1] * 40 + [7] * 40, 4)
    while not busy.finished:
        engine.step()
    assert isinstance(late.error, RuntimeError)
    assert busy.error is None
    assert len(busy.output) == 100


def test_a_long_draft_is_verified_while_an_older_prompt_is_read() -> None:
    """A verification of more tokens than `LEAST` is no prompt: it would wait until the prompts of
    older requests are read."""
    models = table_pair(vocab=8, noise=0.0)
    engine = Engine(models, budget=PromptBudget(ROOM))
    begun(engine, max_tokens=100)
    older = submit(engine, LONG * 2, 2)
    younger = submit(
        engine, [1, 2], 90, build_strategy("vanilla_sd", {"num_speculative_tokens": 20})
    )
    while not older.output:
        engine.step()
    assert len(younger.output) > 20
