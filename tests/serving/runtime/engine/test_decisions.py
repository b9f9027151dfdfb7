"""Draws and probabilities of many requests are decided together, and each as it would be alone."""

from __future__ import annotations

import ctypes
import math
import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest
import torch

from draftwell.serving.errors import NotFinite
from draftwell.serving.runtime import logits as logits_module
from draftwell.serving.runtime.engine import decisions
from draftwell.serving.runtime.engine.decisions import decide
from draftwell.serving.runtime.engine.engine import Engine
from draftwell.serving.runtime.logits import Divergence, Draw, Logits, Probs, Span
from draftwell.serving.runtime.random_streams import RandomStream
from draftwell.serving.runtime.requests import Sampling
from draftwell.serving.runtime.sampling import residual, warp
from draftwell.serving.runtime.strategies import build_strategy
from tests.support.models.resources import table_pair, table_resources

VOCAB = 16001
HEAD = torch.arange(0, VOCAB, 3)
ASKED = [
    {"temperature": 1.0},
    {"temperature": 0.7, "top_p": 0.9},
    {"temperature": 1.0, "top_k": 40},
    {"temperature": 1.3, "min_p": 0.05, "top_p": 0.8},
    {"temperature": 1.0},
    {"temperature": 1.0, "logit_bias": {5: 3.0}},
]


def passes(seed: int = 0) -> tuple[list[Span], list[Span]]:
    """A row of each request of the target's pass, and of a draft's whose head covers a third."""
    generator = torch.Generator().manual_seed(seed)
    target = Logits(3 * torch.randn(len(ASKED), VOCAB, generator=generator))
    draft = Logits(3 * torch.randn(len(ASKED), len(HEAD), generator=generator), None, HEAD, VOCAB)
    return tuple(
        [
            span.under(Sampling(**asked))
            for span, asked in zip(one.split([1] * 6), ASKED, strict=True)
        ]
        for one in (target, draft)
    )


def asked_for(seed: int, kind: str) -> list[Any]:
    """A command of each request, with a stream of its own."""
    target, draft = passes(seed)
    streams = [RandomStream(seed, 10 + i) for i in range(len(ASKED))]
    if kind == "draw":
        return [Draw(row, stream) for row, stream in zip(target, streams, strict=True)]
    if kind == "draft":
        return [Draw(row, stream) for row, stream in zip(draft, streams, strict=True)]
    if kind == "residual":
        return [Draw(*one) for one in zip(target, streams, draft, strict=True)]
    if kind == "without":
        return [
            Draw(row, stream, without=[row.top[0], 7])
            for row, stream in zip(target, streams, strict=True)
        ]
    if kind in ("tv", "js"):
        return [
            Divergence(kind, row, None if place == 4 else other, 7)
            for place, (row, other) in enumerate(zip(target, draft, strict=True))
        ]
    rows = target if kind == "probs" else draft
    return [Probs(row, [row.top[0]]) for row in rows]


KINDS = ["draw", "draft", "residual", "without", "probs", "draft probs", "tv", "js"]


@pytest.mark.parametrize("kind", KINDS)
def test_a_request_is_decided_among_others_as_alone_and_by_any_number_of_threads(kind: str) -> None:
    threads = torch.get_num_threads()
    try:
        for seed in range(3):
            found = []
            for count in (1, 3):
                torch.set_num_threads(count)
                found.append(decide(asked_for(seed, kind)))
                found.append([decide([one])[0] for one in asked_for(seed, kind)])
                backwards = decide(asked_for(seed, kind)[::-1])
                found.append(backwards[::-1])
            assert all(one == found[0] for one in found), seed
    finally:
        torch.set_num_threads(threads)


def test_what_is_drawn_follows_the_distributions_that_methods_define() -> None:
    """Against `warp` and `residual` of one row, and with uniforms over the whole of [0, 1)."""

    class At:
        def __init__(self, uniform: float):
            self.value = uniform

        def uniform(self) -> float:
            return self.value

    target, draft = passes(3)
    for place, asked in enumerate(ASKED):
        sampling = Sampling(**asked)
        p = target[place].probs(0)
        torch.testing.assert_close(
            p, warp(target[place].whole.adjusted[target[place].places[0]], sampling)
        )
        q = draft[place].probs(0)
        assert int((q > 0).sum()) <= len(HEAD) + 1
        for minus, law in ((None, p), (draft[place], residual(p, q))):
            cumulative = law.double().cumsum(0)
            for uniform in (0.0, 0.1, 0.5, 0.9, 1 - 2**-53):
                (drawn,) = decide([Draw(target[place], At(uniform), minus)])  # type: ignore[arg-type]
                assert law[drawn.token] > 0
                assert drawn.prob == float(p[drawn.token])
                below = float(cumulative[drawn.token] - law[drawn.token].double())
                assert below / float(cumulative[-1]) <= uniform + 1e-6
                assert uniform <= float(cumulative[drawn.token] / cumulative[-1]) + 1e-6


def test_where_nothing_is_left_the_distribution_itself_is_drawn_from() -> None:
    logits = torch.tensor([[0.0, -math.inf, -math.inf]])
    row = Span.of(Logits(logits), Sampling(temperature=1.0))
    same = Span.of(Logits(logits.clone()), Sampling(temperature=1.0))
    for draw in (Draw(row, RandomStream(1, 1), same), Draw(row, RandomStream(1, 1), None, [0, 1])):
        assert decide([draw])[0].token == 0


def test_rows_that_are_not_finite_are_the_fault_of_their_own_request() -> None:
    commands = asked_for(0, "draw")
    alone = decide(asked_for(0, "draw"))
    commands[2].rows.whole.values[2, 9] = math.nan
    found = decide(commands)
    assert isinstance(found[2], NotFinite)
    assert [found[i] for i in (0, 1, 3, 4, 5)] == [alone[i] for i in (0, 1, 3, 4, 5)]


def test_eight_requests_at_once_are_drawn_by_one_operation_a_pass(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A naive engine warps and draws row by row."""
    sizes: dict[str, list[int]] = {"warped": [], "drawn": []}
    warped, drawn = logits_module.warp, decisions.by_inversion
    monkeypatch.setattr(
        logits_module,
        "warp",
        lambda rows, s: (sizes["warped"].append(len(rows)), warped(rows, s))[1],
    )
    monkeypatch.setattr(
        decisions,
        "by_inversion",
        lambda laws, s: (sizes["drawn"].append(len(laws)), drawn(laws, s))[1],
    )
    engine = Engine(table_pair(8))
    jobs = [
        engine.submit(
            [1 + i % 3],
            Sampling(max_tokens=10, temperature=1.0, seed=i),
            build_strategy("autoregressive"),
        )
        for i in range(8)
    ]
    engine.run(jobs)
    assert sizes == {"warped": [8] * 10, "drawn": [8] * 10}


@pytest.mark.parametrize("name", ["vanilla_sd", "spide", "pyramid_assisted", "duo_decoding"])
def test_a_seed_has_the_same_answer_alone_and_beside_others(name: str) -> None:
    resources = table_resources(8)

    def ask(engine: Engine, seed: int) -> Any:
        strategy = build_strategy(name, {}, resources)
        return engine.submit(
            [1, 2], Sampling(max_tokens=24, temperature=0.9, top_p=0.95, seed=seed), strategy
        )

    alone = []
    for seed in range(5):
        engine = Engine(table_pair(8))
        engine.run([job := ask(engine, seed)])
        alone.append(job.output)
    engine = Engine(table_pair(8))
    jobs = [ask(engine, seed) for seed in range(5)]
    engine.run(jobs)
    assert len({tuple(output) for output in alone}) > 1
    assert [job.output for job in jobs] == alone


@pytest.mark.parametrize("name", ["vanilla_sd", "rest", "pearl", "mentored", "duo_decoding"])
def test_a_device_is_waited_for_twice_a_judgement_and_says_the_same(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Once for all probabilities of a draft's or a tree's tokens, once for the token that is
    drawn, whatever the draft's length."""
    resources, asked = table_resources(8), list[Any]()

    def run() -> tuple[list[int], int]:
        strategy = build_strategy(name, {}, resources)
        engine = Engine(table_pair(8))
        job = engine.generate([1, 2], Sampling(max_tokens=40, temperature=0.9, seed=3), strategy)
        return job.output, job.session.stats.verdicts

    on_cpu, _ = run()
    init = Logits.__init__

    def elsewhere(self: Logits, *arguments: Any, **options: Any) -> None:
        init(self, *arguments, **options)
        self.waits = True

    decided = decisions.decide
    monkeypatch.setattr(Logits, "__init__", elsewhere)
    monkeypatch.setattr(
        "draftwell.serving.runtime.engine.engine.decide",
        lambda commands: (asked.extend(commands), decided(commands))[1],
    )
    output, verdicts = run()
    assert output == on_cpu
    judged = 2 if name == "duo_decoding" else 1  # leftover and candidates apart
    assert sum(isinstance(one, Probs) for one in asked) <= judged * verdicts


MEMORY = """
import resource
import torch
from draftwell.serving.device import keep_freed_memory

keep_freed_memory()

def work():
    logits = [torch.ones(2 << 20) for _ in range(6)]

work()
work()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(10):
    work()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif(
    not hasattr(ctypes.CDLL(None), "mallopt"), reason="this C library has no mallopt"
)
def test_freed_tensors_are_not_given_back_to_the_system_and_taken_anew() -> None:
    """Six tensors of 8 MB are 12,288 pages: without the parameters they are given back and taken
    anew, twice at least in ten rounds."""
    found = subprocess.run(
        [sys.executable, "-c", MEMORY], capture_output=True, text=True, check=True
    )
    assert int(found.stdout) < 12288


def test_a_request_that_fails_beside_an_overlap_sends_no_reply_twice(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Ending it waits for its other side, and what lands with that is decided meanwhile: the rest
    of the replies must go to nobody who has had one."""
    resources, real = table_resources(8), decisions.decide
    asked = Sampling(max_tokens=30, temperature=0.9, seed=5)

    def run(fails: bool) -> list[list[int]]:
        left = [6]

        def decide_badly(commands: Any) -> Any:
            replies = real(commands)
            for place, one in enumerate(commands):
                left[0] -= one.rows.sampling.seed == 9
                if fails and one.rows.sampling.seed == 9 and left[0] <= 0:
                    replies[place] = NotFinite("not usable")
            return replies

        monkeypatch.setattr("draftwell.serving.runtime.engine.engine.decide", decide_badly)
        engine = Engine(table_pair(8))
        jobs = [
            engine.submit([1, 2], replace(asked, seed=seed), build_strategy("pearl", {}, resources))
            for seed in (9, 5, 6, 7)
        ]
        while not all(job.finished for job in jobs):
            engine.step()
        assert [job.error is None for job in jobs] == [not fails, True, True, True]
        return [job.output for job in jobs[1:]]

    assert run(fails=True) == run(fails=False)
