"""Trees are judged exactly: the joint law of the output is the target's, whatever the tree;
plausible mistakes are caught."""

from __future__ import annotations

import pytest
import torch

from draftwell.serving.runtime.acceptance.tree import ExactTree
from draftwell.serving.runtime.random_streams import Streams
from draftwell.serving.runtime.requests import Sampling
from draftwell.serving.runtime.schedules.serial import serial_trees
from draftwell.serving.runtime.strategies.compose import compose
from draftwell.serving.runtime.trees import ROOT, DraftTree, depths
from draftwell.serving.runtime.types import CandidateChoice
from tests.support.models.enumeration import law_error
from tests.support.models.resources import table_pair
from tests.support.models.spans import decided, span_of

WARPERS = [
    {"temperature": 0.0},
    {"temperature": 0.7},
    {"temperature": 1.0},
    {"temperature": 1.0, "top_k": 2},
    {"temperature": 0.7, "top_p": 0.8},
]
STOP = frozenset({2})


class Likeliest:
    """The draft's `width` likeliest tokens after every node, `levels` deep; deterministic."""

    def __init__(self, width: int, levels: int):
        self.width, self.levels = width, levels

    def propose(self, session, limit):
        tree, leaves = DraftTree(), [ROOT]
        width = self.width if session.target.trees else 1
        for _ in range(min(limit, self.levels)):
            grown = []
            for leaf in leaves:
                context = session.text.ids + [tree.tokens[place] for place in tree.path(leaf)]
                session.draft.rollback(0)
                row = yield from session.draft.read(context)
                likeliest = row.probs(0).topk(width).indices.tolist()
                grown += [tree.add(token, leaf) for token in likeliest]
            leaves = [
                leaf for leaf in grown if tree.tokens[leaf] not in session.sampling.stop_token_ids
            ]
        return tree


def law_of(drafter, sampling, rule=None, models=None):
    models = models or table_pair()
    strategy = compose(lambda session: serial_trees(session, drafter, rule or ExactTree()))
    return law_error(lambda: strategy, models, [0, 1, 0], sampling)


@pytest.mark.parametrize("warpers", WARPERS, ids=str)
@pytest.mark.parametrize(
    "drafter", [Likeliest(1, 2), Likeliest(2, 2), Likeliest(3, 1)], ids=["chain", "two", "all"]
)
def test_trees_of_likeliest_tokens_are_lossless(drafter, warpers):
    assert law_of(drafter, Sampling(max_tokens=3, stop_token_ids=STOP, **warpers)) < 1e-6


@pytest.mark.parametrize(
    "asked",
    [
        {"frequency_penalty": 0.9, "presence_penalty": 0.4},
        {"repetition_penalty": 1.6},
        {"min_tokens": 2},
    ],
    ids=str,
)
def test_a_request_whose_rows_depend_on_the_text_gets_a_chain_and_stays_exact(asked):
    sampling = Sampling(max_tokens=3, temperature=1.0, stop_token_ids=STOP, **asked)
    assert law_of(Likeliest(2, 2), sampling) < 1e-6


class ForgetsTheResidual(ExactTree):
    """Samples from the target itself after its alternatives were rejected."""

    def choose(self, candidates, row, target, rng):
        found = yield from super().choose(candidates, row, target, rng)
        if found.rank is not None:
            return found
        drawn = yield from target.draw(row, rng.sample)
        return CandidateChoice(None, drawn.token, found.tested)


def test_a_mutant_that_forgets_the_residual_is_caught():
    sampling = Sampling(max_tokens=3, temperature=1.0)
    assert law_of(Likeliest(2, 1), sampling, ForgetsTheResidual()) > 1e-3


def test_mutant_whose_slot_keeps_the_tree_in_the_order_it_was_read_is_caught(monkeypatch):
    models = table_pair()
    right = models["target"].keep
    monkeypatch.setattr(
        models["target"], "keep", lambda slot, length, path: right(slot, length, range(len(path)))
    )
    assert law_of(Likeliest(2, 2), Sampling(max_tokens=4, temperature=1.0), models=models) > 1e-3


def test_a_stop_token_inside_a_tree_ends_the_text():
    tree = DraftTree([1, 2, 0], [ROOT, ROOT, 1])
    probs = torch.eye(3)[[2, 0, 0, 1]]
    sampling = Sampling(max_tokens=8, stop_token_ids=STOP)
    rows = span_of(probs.log().clamp(min=-50.0), sampling)
    verdict = decided(ExactTree().judge(tree, rows, Streams(0)))
    assert (verdict.path, verdict.token, verdict.rejected) == ([1], None, False)


@pytest.mark.parametrize(("candidates", "tested"), [([2, 0], 1), ([0, 2], 2), ([0, 1], 2)])
def test_candidates_are_counted_up_to_the_one_that_is_kept(candidates, tested):
    rows = span_of(torch.tensor([[0.0, 1.0, 5.0]]), Sampling())
    assert decided(ExactTree().choose(candidates, 0, rows, Streams(0))).tested == tested


def test_depths_and_paths():
    tree = DraftTree([5, 6, 7, 8], [ROOT, ROOT, 1, 2])
    assert depths(tree.parents) == [1, 1, 2, 3]
    assert tree.path(3) == [1, 2, 3]
    assert tree.draft([1]).tokens == [6, 7, 8]
    assert not tree.is_chain
    assert DraftTree([5, 6], [ROOT, 0]).is_chain
