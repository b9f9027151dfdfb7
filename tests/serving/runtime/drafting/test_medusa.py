"""Medusa: which tree its heads propose, that it costs no pass of its own, and mistakes that would
bias the text."""

from __future__ import annotations

import torch

from draftwell.serving.artifacts.medusa_heads import MedusaHeads
from draftwell.serving.runtime.drafting.medusa import SHAPE, Medusa
from draftwell.serving.runtime.engine.engine import Engine
from draftwell.serving.runtime.models.lean_llama import LeanLlama
from draftwell.serving.runtime.requests import Sampling
from draftwell.serving.runtime.strategies import StrategyResources, build_strategy
from tests.support.errors import raises_code
from tests.support.models.enumeration import law_error
from tests.support.models.llama_shapes import llama, random_tokens
from tests.support.models.mutants import LeavesTheDistribution
from tests.support.models.resources import (
    ORIGIN,
    counting_pair,
    decode,
    random_medusa_heads,
    table_pair,
    table_resources,
)
from tests.support.models.table_model import TableModel


def with_heads(heads, **settings):
    return build_strategy("medusa", settings, StrategyResources({"medusa_heads": heads}))


def counting_heads(vocab=40, heads=3):
    """A state that says n points, shifted by head k and made larger, at n + k + 1."""
    shift = torch.eye(vocab).roll(1, 0)
    weight = torch.stack([3 * torch.linalg.matrix_power(shift, k + 1) for k in range(heads)])
    return MedusaHeads(weight, torch.zeros(heads, vocab), torch.arange(vocab), ORIGIN)


def test_heads_that_know_are_always_kept():
    job = Engine(counting_pair(vocab=40)).generate(
        [0], Sampling(max_tokens=33), with_heads(counting_heads())
    )
    stats = job.session.stats
    assert job.output == list(range(1, 34))
    assert stats.accepted == stats.judged == 24
    assert (stats.target_calls, stats.draft_calls) == (8, 0), (
        "four tokens a pass, and no pass of a draft"
    )


def test_the_tree_is_the_heads_likeliest_tokens_after_the_last_accepted_state(monkeypatch):
    """Compared, round by round, with the module's own states over the whole text."""
    module, heads, compared = llama(), random_medusa_heads(32, tokens=61), []
    propose = Medusa.propose

    def checked(drafter, session, limit):
        tree = yield from propose(drafter, session, limit)
        text = session.text.ids
        with torch.no_grad():
            state = module.model(torch.tensor([text[:-1]])).last_hidden_state[0, -1]
            ranked = (heads.states(state) @ module.lm_head.weight.T).argsort(-1, descending=True)
        places = {(): -1}
        for path in SHAPE:
            if len(path) <= min(limit, 3) and path[:-1] in places and len(places) <= 8:
                places[path] = len(places) - 1
                place = places[path]
                assert tree.tokens[place] == int(ranked[len(path) - 1, path[-1]])
                assert tree.parents[place] == places[path[:-1]]
        assert len(tree) == len(places) - 1
        compared.append(len(tree))
        return tree

    monkeypatch.setattr(Medusa, "propose", checked)
    Engine({"target": LeanLlama(llama(), slots=1)}).generate(
        random_tokens(6), Sampling(max_tokens=16), with_heads(heads)
    )
    assert max(compared) == 8


def test_a_shape_has_every_parent_before_its_children():
    assert all(path[:-1] in ((), *SHAPE[:i]) for i, path in enumerate(SHAPE))
    assert len(set(SHAPE)) == len(SHAPE)


def test_heads_of_another_target_are_refused():
    for heads, code in (
        (random_medusa_heads(5, tokens=4), "state_size_differs"),
        (random_medusa_heads(8, tokens=9), "vocabulary_differs"),
    ):
        with raises_code(code, "draftwell step train --kind medusa_heads"):
            Engine(table_pair(vocab=8)).generate([1], Sampling(max_tokens=4), with_heads(heads))
    with raises_code("artifact_missing", "draftwell step train --kind medusa_heads"):
        decode(table_pair(vocab=8), [1], "medusa", max_tokens=4)


def test_mutants_are_caught(monkeypatch):
    assert off() < 1e-6
    with monkeypatch.context() as patched:
        patched.setattr(
            "draftwell.serving.runtime.strategies.lossless.medusa.ExactTree", LeavesTheDistribution
        )
        assert off() > 1e-3
    right = TableModel.keep
    monkeypatch.setattr(
        TableModel,
        "keep",
        lambda model, slot, length, path: right(model, slot, length, range(len(path))),
    )
    assert off() > 1e-3


def off():
    models, sampling = table_pair(), Sampling(max_tokens=4, temperature=1.0)

    return law_error(
        lambda: build_strategy("medusa", {}, table_resources()), models, [0, 1], sampling
    )


def test_rows_of_the_embedding_are_copied_once_for_all_strategies():
    model, heads, copies = TableModel.random(9, 1), random_medusa_heads(9), []
    rows = model.head_rows
    model.head_rows = lambda tokens: copies.append(len(tokens)) or rows(tokens)
    first, second = with_heads(heads), with_heads(heads, nodes=2)
    assert first.embedding(model, heads) is second.embedding(model, heads)
    assert copies == [len(heads.tokens)]
    other = TableModel.random(9, 2)
    assert first.embedding(other, heads) is not first.embedding(model, heads)
    assert len(copies) == 1, "another target's rows do not take the place of these"
