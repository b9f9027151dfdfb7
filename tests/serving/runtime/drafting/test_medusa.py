"""Medusa: which tree its heads propose, that it costs no pass of its own, and mistakes that would
bias the text."""

from __future__ import annotations

import pytest
import torch

from draftwell.serving.artifacts.medusa_heads import MedusaHeads
from draftwell.serving.runtime.acceptance.tree import ExactTree
from draftwell.serving.runtime.drafting.medusa import SHAPE, Medusa
from draftwell.serving.runtime.engine.engine import Engine
from draftwell.serving.runtime.models.lean_llama import LeanLlama
from draftwell.serving.runtime.models.table_model import TableModel
from draftwell.serving.runtime.requests import Sampling
from draftwell.serving.runtime.sampling import residual
from draftwell.serving.runtime.strategies import StrategyResources, build_strategy
from draftwell.serving.runtime.types import CandidateChoice
from tests.support.errors import raises_code
from tests.support.models.enumeration import distance, joint_law, true_law
from tests.support.models.llama_shapes import llama, random_tokens
from tests.support.models.resources import (
    ORIGIN,
    counting_pair,
    random_medusa_heads,
    table_pair,
    table_resources,
)


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


def test_a_request_with_penalties_proposes_first_ranks_alone():
    models = table_pair(vocab=8)
    seen, forward = [], models["target"].forward
    models["target"].forward = lambda rows: (
        seen.extend(row.parents for row in rows),
        forward(rows),
    )[1]
    asked = Sampling(max_tokens=40, frequency_penalty=0.1)
    job = Engine(models).generate([1, 2], asked, build_strategy("medusa", {}, table_resources(8)))
    assert set(seen) == {None}
    assert job.session.stats.drafted > 20
    assert (
        job.output
        == Engine(models).generate([1, 2], asked, build_strategy("autoregressive")).output
    )


@pytest.mark.parametrize("context", [26, 27, 31])
def test_a_tree_never_outgrows_the_targets_context(context):
    model = TableModel(table_pair(vocab=4)["target"].table, max_context=context)
    job = Engine({"target": model}).generate(
        [1, 2], Sampling(max_tokens=24), build_strategy("medusa", {}, table_resources(4))
    )
    assert (
        job.output
        == Engine({"target": model})
        .generate([1, 2], Sampling(max_tokens=24), build_strategy("autoregressive"))
        .output
    )


def test_heads_of_another_target_are_refused():
    for heads, code in (
        (random_medusa_heads(5, tokens=4), "state_size_differs"),
        (random_medusa_heads(8, tokens=9), "vocabulary_differs"),
    ):
        with raises_code(code, "draftwell train --kind medusa_heads"):
            Engine(table_pair(vocab=8)).generate([1], Sampling(max_tokens=4), with_heads(heads))
    with raises_code("artifact_missing", "draftwell train --kind medusa_heads"):
        Engine(table_pair(vocab=8)).generate([1], Sampling(max_tokens=4), build_strategy("medusa"))


class LeavesTheDistribution(ExactTree):
    """Takes a head's second token for one drawn from what is left of p, but leaves p as it was."""

    def choose(self, tree, children, target, row, rng):
        probs = target.probs(row)
        for rank, place in enumerate(children):
            if rng.test.accepts(float(probs[tree.tokens[place]]), 1.0):
                return CandidateChoice(rank, tree.tokens[place], rank + 1)
        return CandidateChoice(None, rng.sample.draw(residual(probs, probs * 0)), len(children))


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
    law = joint_law(
        lambda: build_strategy("medusa", {}, table_resources()), models, [0, 1], sampling
    )
    return distance(law, true_law(models["target"], [0, 1], sampling))


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
