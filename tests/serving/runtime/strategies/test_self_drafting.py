"""Strategies whose target drafts for itself: greedy float32 tokens are those of transformers' own
`generate`, alone and side by side."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

from draftwell.serving.runtime.engine.engine import Engine
from draftwell.serving.runtime.models.lean_llama import LeanLlama
from draftwell.serving.runtime.requests import Sampling
from draftwell.serving.runtime.strategies import Strategy, StrategyResources, build_strategy
from tests.support.models.counters import forwards_of
from tests.support.models.llama_shapes import llama, random_tokens
from tests.support.models.resources import (
    decode,
    random_medusa_heads,
    table_pair,
    table_resources,
)
from tests.support.models.table_model import TableModel

TOKENS = 32
PROMPTS = [list(random_tokens(3 + number % 7, seed=number)) for number in range(20)]
CASES: list[tuple[str, dict[str, Any]]] = [
    ("lookahead", {}),
    ("lookahead", {"window": 3, "ngram": 4, "pool_from_text": False}),
    ("swift", {"skip_ratio": 0.25, "threshold": 0.0, "max_draft": 3, "interval": 2, "window": 4}),
    ("medusa", {}),
]


@functools.cache
def module() -> Any:
    return llama(num_hidden_layers=4)


@functools.cache
def generated() -> list[list[int]]:
    """What `transformers.generate` writes greedily."""
    written = []
    for prompt in PROMPTS:
        ids = torch.tensor([prompt])
        out = module().generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=TOKENS,
            do_sample=False,
            eos_token_id=None,
        )
        written.append(out[0, len(prompt) :].tolist())
    return written


def build(name: str, parameters: dict[str, Any]) -> Strategy:
    return build_strategy(
        name, parameters, StrategyResources({"medusa_heads": random_medusa_heads(32, tokens=61)})
    )


@pytest.mark.parametrize(("name", "parameters"), CASES, ids=str)
def test_greedy_tokens_are_those_of_generate(name: str, parameters: dict[str, Any]) -> None:
    engine, strategy = (
        Engine({"target": LeanLlama(llama(num_hidden_layers=4), slots=1)}),
        build(name, parameters),
    )
    jobs = [engine.generate(prompt, Sampling(max_tokens=TOKENS), strategy) for prompt in PROMPTS]
    assert [job.output for job in jobs] == generated()
    assert sum(job.session.stats.accepted for job in jobs) > 0
    assert sum(job.session.stats.judged - job.session.stats.accepted for job in jobs) > 0, (
        "drafts were kept and rejected"
    )


@pytest.mark.parametrize(("name", "parameters"), CASES, ids=str)
def test_eight_at_once_write_what_each_writes_alone(name: str, parameters: dict[str, Any]) -> None:
    engine, strategy = (
        Engine({"target": LeanLlama(llama(num_hidden_layers=4), slots=8)}),
        build(name, parameters),
    )
    jobs = [engine.submit(prompt, Sampling(max_tokens=TOKENS), strategy) for prompt in PROMPTS[:8]]
    engine.run(jobs)
    assert [job.output for job in jobs] == generated()[:8]


@pytest.mark.parametrize("name", ["lookahead", "medusa"])
@pytest.mark.parametrize("context", [26, 27, 31])
def test_a_tree_never_outgrows_the_targets_context(name: str, context: int) -> None:
    """The engine lets in what fits as text; alternatives and window need positions of their own."""
    models = {"target": TableModel(table_pair(vocab=4)["target"].table, max_context=context)}
    job = decode(models, [1, 2], name, {}, table_resources(4), max_tokens=24)
    assert job.output == decode(models, [1, 2], "autoregressive", max_tokens=24).output
    assert job.session.stats.accepted > 0


@pytest.mark.parametrize("name", ["lookahead", "medusa"])
def test_a_request_with_penalties_gets_chains(name: str) -> None:
    """N-grams of its text, or the heads' first ranks."""
    models = table_pair(vocab=8)
    given = forwards_of(models["target"])
    asked = {"max_tokens": 60, "frequency_penalty": 0.01}
    job = decode(models, [1, 2], name, {}, table_resources(8), **asked)
    assert {row.parents for row in given} == {None}
    assert job.session.stats.drafted > 20
    assert job.session.stats.accepted > 0
    assert job.output == decode(models, [1, 2], "autoregressive", **asked).output
