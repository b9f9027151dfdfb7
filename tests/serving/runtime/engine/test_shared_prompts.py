"""Prompts that begin alike are read once, and nothing else changes: texts, drafts and seeds are
those of requests that share nothing."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

from draftwell.serving.artifacts.hardware_profile import (
    HardwareProfile,
    RequestTimes,
    RoundOverheads,
)
from draftwell.serving.recording.prompt_ratings import RatedPrompt
from draftwell.serving.runtime.commands import Forward
from draftwell.serving.runtime.engine.engine import Engine, Job
from draftwell.serving.runtime.engine.prompt_budget import PromptBudget
from draftwell.serving.runtime.engine.prompt_pieces import MOST_ROWS
from draftwell.serving.runtime.engine.shared_prompts import waits_for_another
from draftwell.serving.runtime.models.cuda.cuda_llama import CudaLlama
from draftwell.serving.runtime.models.eagle3_model import Eagle3Model, head_of
from draftwell.serving.runtime.models.lean_llama import LeanLlama
from draftwell.serving.runtime.models.transformers_model import TransformersModel
from draftwell.serving.runtime.requests import Sampling
from draftwell.serving.runtime.strategies import STRATEGIES, build_strategy
from tests.support.cases import in_turn, quick_only
from tests.support.models import asking
from tests.support.models.asking import begun
from tests.support.models.heads import random_eagle3
from tests.support.models.resources import NEEDED, ORIGIN, random_datastore, table_resources
from tests.support.models.tiny import VOCAB, llama, near
from tests.support.models.variants import VARIANTS
from tests.support.models.whole_text import check_held, tokens_read, whole_text_pair

LOSSLESS = [name for name, strategy in STRATEGIES.items() if strategy.lossless]
LOSSY = [
    (name, NEEDED.get(name, {})) for name, strategy in STRATEGIES.items() if not strategy.lossless
]
PROMPT = [1 + i * i % 7 for i in range(30)]
QUESTION = [5, 1, 4, 2, 6, 3]


def plain() -> Any:
    return build_strategy("autoregressive")


submit, answered = (partial(each, owner="one") for each in (asking.submit, asking.answered))


def by_itself(*arguments: Any, **options: Any) -> Job:
    """A request that shares nothing with anybody."""
    return asking.answered(Engine(whole_text_pair()), *arguments, **options)


def counted(job: Job) -> tuple[list[int], int, int]:
    """What a request wrote, and what became of its drafts."""
    return job.output, job.session.stats.drafted, job.session.stats.accepted


def conversation(
    engine: Engine,
    build: Any,
    owner: str | None,
    temperature: float = 0.0,
    *,
    repeatable: bool = True,
) -> list[Job]:
    """Two turns of a conversation, the second turn again, another question after the first turn's
    prompt, and another conversation."""
    jobs: list[Job] = []

    def ask(prompt: list[int]) -> list[int]:
        sampling = Sampling(
            max_tokens=12, temperature=temperature, seed=len(jobs), repeatable=repeatable
        )
        job = engine.submit(prompt, sampling, build(), owner=owner)
        engine.run([job])
        jobs.append(job)
        return job.output

    second = PROMPT + ask(PROMPT) + QUESTION
    for prompt in (second, second, [*PROMPT, *QUESTION], [2, *second[1:]]):
        ask(prompt)
    return jobs


@pytest.mark.parametrize(
    ("name", "parameters", "temperature"), in_turn([*VARIANTS, *LOSSY], [0.0, 1.0]), ids=str
)
def test_every_strategy_writes_and_drafts_what_it_does_without(
    name: str, parameters: dict[str, Any], temperature: float
) -> None:
    models = whole_text_pair()

    def build() -> Any:
        return build_strategy(name, parameters, table_resources(8))

    alone = conversation(Engine(whole_text_pair()), build, None, temperature)
    shared = conversation(Engine(models), build, "one", temperature)
    assert [counted(job) for job in shared] == [counted(job) for job in alone]
    cached = [job.session.stats.cached_tokens for job in shared]
    assert cached[0] == cached[4] == 0
    assert cached[1] >= len(PROMPT) + 4, (
        "the answer's tokens too, as far as the target has read them"
    )
    assert cached[2] == len(PROMPT) + len(shared[0].output) + len(QUESTION) - 1, (
        "all but the last token"
    )
    assert cached[3] == len(PROMPT)
    assert not any(job.session.stats.cached_tokens for job in alone)
    check_held(models)


@pytest.mark.parametrize(
    ("deterministic", "repeatable"), [(False, False), (False, True), (True, False)]
)
def test_hybrid_weighs_what_is_left_to_read_of_a_prompt_unless_each_decides_for_itself(
    deterministic: bool, repeatable: bool
) -> None:
    """Reading 30 tokens costs its draft model more than it gains; where another request has had
    them read, it drafts with that."""
    nothing = RoundOverheads(round=0.0, token=0.0, figure=0.0)
    # a token: a fifth of the target's
    times = RequestTimes.model_construct(prefill={"draft": {32: 32 * 0.8}}, rest=nothing)
    profile = HardwareProfile(0.1, {1: 4.0, 32: 4.0}, 0.1, ORIGIN, details=times)
    resources = replace(table_resources(8, hardware_profile=profile), deterministic=deterministic)

    def drafts(before: bool) -> int:
        engine = Engine(whole_text_pair())
        if before:
            engine.run(
                [
                    engine.submit(
                        PROMPT, Sampling(max_tokens=4), build_strategy("vanilla_sd"), owner="one"
                    )
                ]
            )
        sampling = Sampling(max_tokens=12, temperature=1.0, seed=3, repeatable=repeatable)
        engine.run(
            [
                job := engine.submit(
                    PROMPT,
                    sampling,
                    build_strategy("hybrid", {"drafter": "draft"}, resources),
                    owner="one",
                )
            ]
        )
        return job.session.stats.draft_calls

    assert drafts(before=False) == 0
    assert (drafts(before=True) == 0) == deterministic


@pytest.mark.parametrize("deterministic", [True, False])
def test_hybrid_repeats_a_seeded_answer_whatever_comes_between(deterministic: bool) -> None:
    """One strategy object, as on a server; other traffic, from which it learns, comes between."""
    profile = HardwareProfile(0.1, {1: 4.0, 32: 4.0}, 0.1, ORIGIN)
    resources = replace(table_resources(8, hardware_profile=profile), deterministic=deterministic)
    strategy, engine = (
        build_strategy("hybrid", {"drafter": "draft"}, resources),
        Engine(whole_text_pair()),
    )

    def ask(prompt: list[int], seed: int) -> tuple[list[int], int, int]:
        sampling = Sampling(max_tokens=12, temperature=1.0, seed=seed, repeatable=True)
        engine.run([job := engine.submit(prompt, sampling, strategy, owner="one")])
        return counted(job)

    first = ask(PROMPT, 3)
    for seed in range(4, 9):
        ask([*PROMPT, seed % 8, *QUESTION], seed)
    again = ask(PROMPT, 3)
    assert again[0] == first[0]
    assert not deterministic or again == first, "it drafts the same too"
    assert first[1] > 0, "it drafts at all"


@pytest.mark.parametrize(
    ("name", "parameters", "budget", "temperature"),
    in_turn([*VARIANTS, *LOSSY], [None, 16], [0.0, 1.0]),
    ids=str,
)
def test_answers_to_one_prompt_read_it_once(
    name: str, parameters: dict[str, Any], budget: int | None, temperature: float
) -> None:
    """Each with a seed of its own, also where the prompt is read in pieces."""
    sampling = [Sampling(max_tokens=10, temperature=temperature, seed=seed) for seed in range(4)]
    models = whole_text_pair()
    read = tokens_read(models, prompts_only=True)

    def build() -> Any:
        return build_strategy(name, parameters, table_resources(8))

    engine = Engine(models, budget=None if budget is None else PromptBudget(budget))
    jobs = [engine.submit(PROMPT, one, build(), owner="one") for one in sampling]
    engine.run(jobs)
    alone = [Engine(whole_text_pair()).generate(PROMPT, one, build()) for one in sampling]
    assert [counted(job) for job in jobs] == [counted(job) for job in alone]
    stats = [job.session.stats for job in jobs]
    assert [one.cached_tokens for one in stats] == [0, *[len(PROMPT) - 1] * 3]
    assert [one.prefill_calls for one in stats] == [
        one.session.stats.prefill_calls for one in alone
    ]
    for role, counts in read.items():
        if counts:  # and what each wrote before that model was first asked
            assert sum(counts) <= len(PROMPT) + 4 * 10, f"the {role} reads the prompt once"
    check_held(models)


def test_eight_answers_compute_their_prompt_once_and_a_second_turn_only_what_is_new() -> None:
    """Counted in tokens that the models run; the draft is part of it."""
    models = {
        role: model for role, model in whole_text_pair().items() if role in ("target", "draft")
    }
    read = tokens_read(models)
    engine = Engine(models)
    first = engine.generate(PROMPT, Sampling(max_tokens=8), plain())
    assert sum(read["target"]) == len(PROMPT) + 7
    read["target"].clear()
    job = answered(engine, PROMPT, 8)
    assert sum(read["target"]) == len(PROMPT) + 7, "what was nobody's is not taken over"
    read["target"].clear()
    answered(engine, PROMPT + job.output + QUESTION, 1)
    assert read["target"] == [1 + len(QUESTION)], "the answer's last token was never read"
    assert first.output == job.output


@pytest.mark.parametrize("other", ["two", None])
def test_nobody_goes_on_from_what_another_owner_left(other: str | None) -> None:
    """Neither from a slot that is free, nor from one in use, and nobody waits for another's
    prompt."""
    models = whole_text_pair()
    read = tokens_read(models)
    engine = Engine(models)
    answered(engine, PROMPT, 4)
    running = submit(engine, PROMPT, 40)
    late = submit(engine, PROMPT, 4, owner=other)
    read["target"].clear()
    engine.step()
    assert sorted(read["target"]) == [1, len(PROMPT)]
    engine.run([running, late])
    assert late.session.stats.cached_tokens == 0
    assert late.output == running.output[:4]


def test_a_system_prompt_is_copied_from_a_conversation_that_goes_on_otherwise() -> None:
    """That keeps its slot, and what it says is taken up again later."""
    engine = Engine(models := whole_text_pair())
    system = PROMPT[:12]

    def ask(prompt: list[int]) -> int:
        job = answered(engine, prompt, 4)
        assert job.output == by_itself(prompt, 4).output
        return job.session.stats.cached_tokens

    one, two = [*system, *[7] * 20], [*system, *[6] * 20]
    assert [ask(one), ask(two), ask([*one, 5]), ask([*two, 5])] == [
        0,
        len(system),
        len(one),
        len(two),
    ]
    check_held(models)


@pytest.mark.parametrize("place", [0, 10, 29])
def test_a_token_that_differs_in_the_middle_ends_what_is_taken_over(place: int) -> None:
    changed = [*PROMPT]
    changed[place] = 3 if changed[place] != 3 else 4
    engine = Engine(whole_text_pair())
    answered(engine, PROMPT, 4)
    job = answered(engine, [*changed, 1], 12)
    assert job.session.stats.cached_tokens == (place if place >= 8 else 0)
    assert job.output == by_itself([*changed, 1], 12).output


@pytest.mark.parametrize(("name", "parameters"), [*VARIANTS, *LOSSY], ids=str)
def test_a_request_that_is_cancelled_leaves_what_was_really_read(
    name: str, parameters: dict[str, Any]
) -> None:
    """After any number of steps: within the prompt, a draft, a tree, or its verification."""
    models = whole_text_pair()
    engine = Engine(models, budget=PromptBudget(8))

    def build() -> Any:
        return build_strategy(name, parameters, table_resources(8))

    other = asking.submit(engine, [1, 2], 400)
    for steps in (*range(1, 8), 11, 15):
        sampling = Sampling(max_tokens=30, temperature=1.0, seed=steps)
        job = engine.submit([*PROMPT[:20], steps % 8], sampling, build(), owner="one")
        for _ in range(steps):
            engine.step()
        engine.cancel(job)
        check_held(models)
    text = [*PROMPT[:20], *job.session.text.output]
    later = answered(engine, [*text, 1], 12, build(), seed=1)
    assert later.output == by_itself([*text, 1], 12, build(), seed=1).output
    engine.cancel(other)


def test_what_a_failed_request_left_is_not_taken_over() -> None:
    engine = Engine(models := whole_text_pair())
    job = submit(engine, PROMPT, 40)
    engine.step()
    run, models["target"].forward = models["target"].forward, lambda rows: 1 / 0
    engine.step()
    assert isinstance(job.error, ZeroDivisionError)
    models["target"].forward = run
    later = answered(engine, PROMPT, 4)
    assert later.session.stats.cached_tokens == 0


def test_those_who_wait_for_a_prompt_read_it_themselves_if_its_reader_ends() -> None:
    engine = Engine(whole_text_pair(), budget=PromptBudget(8))
    begun(engine)
    first, second, third = [submit(engine, PROMPT, 4, seed=i) for i in range(3)]
    engine.step()
    assert [next(job.task.leaves()).read > 0 for job in (first, second, third)] == [
        True,
        False,
        False,
    ]
    engine.cancel(first)
    engine.run([second, third])
    assert [second.session.stats.cached_tokens, third.session.stats.cached_tokens] == [
        0,
        len(PROMPT) - 1,
    ]
    assert second.output == third.output


def steps_until_all_answer(engine: Engine, jobs: list[Job]) -> int:
    for steps in range(1, 100):
        engine.step()
        if all(job.output for job in jobs):
            return steps
    raise AssertionError("some request gets no token")


@pytest.mark.parametrize("answers", [4, 8])
@pytest.mark.parametrize("busy", [False, True])
def test_all_who_wait_for_a_prompt_answer_one_step_after_its_reader(
    answers: int, busy: bool
) -> None:
    """Not one after the other, each behind the last token of the one before it; also where the
    prompt is read in pieces."""
    steps = []
    for count in (1, answers):
        engine = Engine(whole_text_pair(slots=10), budget=PromptBudget(8))
        if busy:
            begun(engine)
        jobs = [submit(engine, PROMPT, 40, seed=i) for i in range(count)]
        steps.append(steps_until_all_answer(engine, jobs))
    assert steps == [steps[0], steps[0] + 1]
    assert steps[0] == (3 if busy else 1), "30 tokens: two pieces of 8, and one forward pass of 14"


@pytest.mark.parametrize("answers", [4, 8])
@pytest.mark.parametrize("case", ["short", "held", "rated"])
def test_nobody_waits_for_what_cannot_be_copied_or_lies_there_already(
    answers: int, case: str
) -> None:
    """A prompt of 4 tokens, one that another slot holds, and one of which every token's row is
    wanted: a step has 128 of these."""
    engine = Engine(whole_text_pair(slots=9))
    prompt = PROMPT[:4] if case == "short" else PROMPT
    if case == "held":
        answered(engine, prompt, 4)
    build = RatedPrompt if case == "rated" else plain
    jobs = [submit(engine, prompt, 40, build(), seed=i) for i in range(answers)]
    assert [job.session.target.length for job in jobs] == [
        len(prompt) - 1 if case == "held" else 0,
        *[0] * (answers - 1),
    ]
    assert steps_until_all_answer(engine, jobs) == (
        2 if case == "rated" and answers * len(prompt) > MOST_ROWS else 1
    )


@pytest.mark.parametrize("alike", [True, False])
def test_prompts_of_those_who_wait_are_read_once_however_often_they_are_compared(
    alike: bool,
) -> None:
    class Watched(list[int]):
        read = 0

        def __getitem__(self, at: Any) -> Any:
            Watched.read += isinstance(at, slice)
            return super().__getitem__(at)

    engine = Engine(whole_text_pair(slots=16))
    for number in range(16):
        job = submit(
            engine, [*PROMPT, 3 if alike else number // 4, 1, 2, number % 4 if not alike else 1], 4
        )
        job.session.text.ids = Watched(job.session.text.ids)
    for _ in range(3):
        waiting = [waits_for_another(job, job.task, engine.jobs) for job in engine.jobs]
    assert waiting == [False, *[alike] * 15]
    assert Watched.read <= 16


@pytest.mark.parametrize("answers", [2, 3])
def test_those_who_wait_for_a_drafts_prompt_do_not_keep_it_from_being_read(answers: int) -> None:
    """All have a token and wait for the draft model to read the prompt: nobody goes on meanwhile,
    so no step may leave it out."""
    prompt = PROMPT * 8
    engine = Engine(whole_text_pair(), budget=PromptBudget())
    jobs = [
        engine.submit(prompt, Sampling(max_tokens=8), build_strategy("vanilla_sd"), owner="one")
        for _ in range(answers)
    ]
    for _ in range(500):
        if engine.jobs:
            engine.step()
    assert all(job.finished for job in jobs)
    assert jobs[0].output == jobs[-1].output


def test_those_who_wait_to_copy_are_no_burst_of_readers(monkeypatch: pytest.MonkeyPatch) -> None:
    """So they do not lengthen the pauses of those who are being answered: the budget hears of one
    reader, or of eight."""
    heard: list[int] = []
    monkeypatch.setattr(
        PromptBudget,
        "room",
        lambda budget, model, answering, waiting, **others: heard.append(waiting) or 8,
    )
    engine = Engine(whole_text_pair(slots=10), budget=PromptBudget(8))
    begun(engine)
    heard.clear()
    jobs = [submit(engine, PROMPT, 4) for _ in range(8)]
    engine.step()
    for job in jobs:
        engine.cancel(job)
    for _ in range(8):
        asking.submit(engine, PROMPT, 4)
    engine.step()
    assert heard == [1, 8]


@pytest.mark.parametrize("late", [False, True])
def test_a_copy_that_fails_only_costs_the_time(
    late: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Also if it fails after the slot was told that it holds the prompt."""
    engine = Engine(models := whole_text_pair())
    copy = models["target"].fork

    def fork(*arguments: Any) -> None:
        if late:
            copy(*arguments)
        raise ZeroDivisionError

    models["target"].fork = fork
    jobs = [submit(engine, PROMPT, 4) for _ in range(2)]
    engine.run(jobs)
    assert jobs[0].output == jobs[1].output
    assert jobs[1].session.stats.cached_tokens == 0
    assert "could not be copied" in caplog.text
    check_held(models)


def networks(
    adapter: Any, target: Any, names: tuple[str, ...] = ("target", "draft", "qualifier")
) -> dict[str, Any]:
    modules = {
        "target": target,
        "draft": near(target, 0.06),
        "qualifier": near(target, 0.03, seed=2),
    }
    return {role: adapter(modules[role], slots=4) for role in names}


FEW = ("vanilla_sd", "spide", "duo_decoding", "eagle3")
"""A serial, an overlapping and a branching strategy, and one with a head."""
ADAPTED = quick_only(
    [
        *[(name, LeanLlama) for name in LOSSLESS],
        *[(name, TransformersModel) for name in FEW],
        *[(name, CudaLlama) for name in FEW],
    ],
    *[(name, LeanLlama) for name in FEW],
    ("duo_decoding", TransformersModel),
    ("duo_decoding", CudaLlama),
    ("eagle3", CudaLlama),
)


@pytest.mark.parametrize(("name", "adapter"), ADAPTED)
def test_networks_in_float32(name: str, adapter: Any) -> None:
    """Keys and values, hidden states, a head's pairs and candidates: acceptance would tell if any
    of it were another request's."""
    target = near(llama(2), 0.0)
    _, head = random_eagle3(target, VOCAB - 4)
    resources = table_resources(32, datastore=random_datastore(VOCAB), eagle3_head=head)

    def build() -> Any:
        return build_strategy(name, NEEDED.get(name, {}), resources)

    fresh = Engine(networks(adapter, target))
    alone = conversation(fresh, build, None)
    engine = Engine(networks(adapter, target))
    shared = conversation(engine, build, "one")
    assert [counted(job) for job in shared] == [counted(job) for job in alone]
    assert (
        shared[2].session.stats.cached_tokens > shared[1].session.stats.cached_tokens >= len(PROMPT)
    )
    several = [
        submit(engine, [3, *PROMPT], 12, build(), temperature=1.0, seed=seed) for seed in range(4)
    ]
    engine.run(several)
    wanted = [fresh.generate([3, *PROMPT], one.session.sampling, build()) for one in several]
    assert [job.output for job in several] == [job.output for job in wanted]
    assert [job.session.stats.cached_tokens for job in several] == [0, *[len(PROMPT)] * 3]


def check_contents(target: LeanLlama, head: Any, artifact: Any) -> None:
    """What slots hold of the target's and the head's tokens is what fresh ones compute: keys,
    values, and the states for the head."""
    heads = 0
    for slot in range(target.slots.count):
        tokens = tuple(target.slots.texts[slot].tokens) if slot in target.slots.texts else ()
        if tokens:
            fresh = LeanLlama(target.module, slots=1)
            fresh.keep_hidden_states(target.features)
            fresh.forward([Forward("target", fresh.open(), tokens)])
            for held, wanted in zip(
                [*target.slots.keys, *target.slots.values],
                [*fresh.slots.keys, *fresh.slots.values],
                strict=True,
            ):
                assert torch.allclose(
                    held[slot, :, : len(tokens)], wanted[0, :, : len(tokens)], atol=1e-4
                )
            assert torch.allclose(
                target.hidden_states(slot, 0, len(tokens)),
                fresh.hidden_states(0, 0, len(tokens)),
                atol=1e-4,
            )
    for slot in range(head.slots.count):
        if slot in head.slots.texts and (paired := tuple(head.slots.texts[slot].tokens)):
            _, first = head.slots.texts[slot].owner
            fresh = LeanLlama(target.module, slots=1)
            fresh.keep_hidden_states(target.features)
            fresh.forward([Forward("target", fresh.open(), (first, *paired))])
            again = Eagle3Model(artifact, fresh)
            again.forward(
                [
                    Forward(
                        "head",
                        again.open(),
                        paired,
                        features=fresh.hidden_states(0, 0, len(paired)),
                    )
                ]
            )
            for held, wanted in (
                (head.slots.keys[0], again.slots.keys[0]),
                (head.slots.values[0], again.slots.values[0]),
            ):
                assert torch.allclose(
                    held[slot, :, : len(paired)], wanted[0, :, : len(paired)], atol=1e-4
                )
            heads += 1
    assert heads, "some slot of the head holds something"


@pytest.mark.parametrize(
    "parameters",
    [{"num_speculative_tokens": 3}, {"num_speculative_tokens": 3, "top_k": 2}],
    ids=["chain", "tree"],
)
def test_a_head_keeps_pairs_of_the_targets_own_states_alone(parameters: dict[str, Any]) -> None:
    """Not those that it made from its own output, whether its draft was accepted or the request was
    cancelled behind it."""
    target = LeanLlama(near(llama(2), 0.0), slots=4)
    _, artifact = random_eagle3(target.module, VOCAB - 4)
    head = head_of(target, artifact)
    engine = Engine({"target": target})

    def build() -> Any:
        return build_strategy("eagle3", parameters, table_resources(32, eagle3_head=artifact))

    conversation(engine, build, "one")
    check_contents(target, head, artifact)
    for steps in (2, 3, 5, 8):
        jobs = [
            submit(engine, [4, *PROMPT], 20, build(), temperature=1.0, seed=seed)
            for seed in range(steps, steps + 2)
        ]
        for _ in range(steps):
            engine.step()
        for job in jobs:
            engine.cancel(job)
        check_contents(target, head, artifact)
