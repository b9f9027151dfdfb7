"""Trees are judged exactly: the joint law of the output is the target's, whatever the tree;
plausible mistakes are caught."""

from __future__ import annotations

import pytest
import torch

from draftwell.serving.runtime.acceptance.ranked import Ranked
from draftwell.serving.runtime.acceptance.tree import ExactTree
from draftwell.serving.runtime.requests import Sampling
from draftwell.serving.runtime.sampling import residual
from draftwell.serving.runtime.schedules.tree import serial_trees
from draftwell.serving.runtime.session.row_view import RowView
from draftwell.serving.runtime.strategies.compose import compose
from draftwell.serving.runtime.trees import ROOT, DraftTree, depths
from draftwell.serving.runtime.types import CandidateChoice
from tests.support.models.enumeration import distance, joint_law, true_law
from tests.support.models.resources import table_pair

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

    def __init__(self, width: int, levels: int, *, drawn: bool = False):
        self.width, self.levels, self.drawn = width, levels, drawn

    def propose(self, session, limit):
        tree, leaves = DraftTree(), [ROOT]
        width = self.width if session.target.trees else 1
        for _ in range(min(limit, self.levels)):
            grown = []
            for leaf in leaves:
                context = session.text.ids + [tree.tokens[place] for place in tree.path(leaf)]
                session.draft.rollback(0)
                row = yield from session.draft.read(context)
                grown += (
                    self.drawn_children(tree, leaf, row, width, session)
                    if self.drawn
                    else [
                        tree.add(token, leaf) for token in row.probs(0).topk(width).indices.tolist()
                    ]
                )
            leaves = [
                leaf for leaf in grown if tree.tokens[leaf] not in session.sampling.stop_token_ids
            ]
        return tree

    def drawn_children(self, tree, leaf, row, width, session):
        left, places = row.probs(0), []
        for _ in range(width):
            if session.sampling.greedy and places:
                break
            token = row.sample(0, session.rng.draft) if not places else session.rng.draft.draw(left)
            places.append(tree.add(token, leaf))
            tree.rows.append(RowView(row, 0))
            if float(left.max()) >= 1.0:
                break
            left = Ranked().zeroed(left, token)
        return places


def law_of(drafter, sampling, rule=None, models=None):
    models = models or table_pair()
    strategy = compose(lambda session: serial_trees(session, drafter, rule or ExactTree()))
    return distance(
        joint_law(lambda: strategy, models, [0, 1, 0], sampling),
        true_law(models["target"], [0, 1, 0], sampling),
    )


@pytest.mark.parametrize("warpers", WARPERS, ids=str)
@pytest.mark.parametrize(
    "drafter", [Likeliest(1, 2), Likeliest(2, 2), Likeliest(3, 1)], ids=["chain", "two", "all"]
)
def test_trees_of_likeliest_tokens_are_lossless(drafter, warpers):
    assert law_of(drafter, Sampling(max_tokens=3, stop_token_ids=STOP, **warpers)) < 1e-6


@pytest.mark.parametrize("warpers", WARPERS, ids=str)
@pytest.mark.parametrize(
    "drafter",
    [Likeliest(1, 2, drawn=True), Likeliest(2, 1, drawn=True), Likeliest(2, 2, drawn=True)],
    ids=["chain", "two", "two levels"],
)
def test_trees_drawn_without_replacement_are_lossless(drafter, warpers):
    tokens = 2 if drafter.width == drafter.levels == 2 else 3
    assert law_of(drafter, Sampling(max_tokens=tokens, stop_token_ids=STOP, **warpers)) < 1e-6


@pytest.mark.parametrize(
    "asked",
    [
        {"frequency_penalty": 0.9, "presence_penalty": 0.4},
        {"repetition_penalty": 1.6},
        {"min_tokens": 2},
    ],
    ids=str,
)
@pytest.mark.parametrize("drawn", [False, True])
def test_a_request_whose_rows_depend_on_the_text_gets_a_chain_and_stays_exact(asked, drawn):
    assert (
        law_of(
            Likeliest(2, 2, drawn=drawn),
            Sampling(max_tokens=3, temperature=1.0, stop_token_ids=STOP, **asked),
        )
        < 1e-6
    )


class KeepsOldDistribution(ExactTree):
    """Tests a second sibling against the distribution that the first was drawn from."""

    def choose(self, tree, children, target, row, rng):
        left = target.probs(row)
        drawn = tree.rows[children[0]].probs(0)
        for rank, place in enumerate(children):
            token = tree.tokens[place]
            if rng.test.accepts(float(left[token]), float(drawn[token])):
                return CandidateChoice(rank, token, rank + 1)
            left = residual(left, drawn)
        return CandidateChoice(None, rng.sample.draw(left), len(children))


class ForgetsTheResidual(ExactTree):
    """Samples from the target itself after its alternatives were rejected."""

    def choose(self, tree, children, target, row, rng):
        found = super().choose(tree, children, target, row, rng)
        return (
            found
            if found.rank is not None
            else CandidateChoice(None, rng.sample.draw(target.probs(row)), found.tested)
        )


@pytest.mark.parametrize(
    ("rule", "drawn"),
    [(KeepsOldDistribution(), True), (ForgetsTheResidual(), True), (ForgetsTheResidual(), False)],
    ids=["old distribution", "no residual, drawn", "no residual"],
)
def test_mutants_are_caught(rule, drawn):
    assert (
        law_of(Likeliest(2, 1, drawn=drawn), Sampling(max_tokens=3, temperature=1.0), rule) > 1e-3
    )


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
    rows = table_rows(probs, Sampling(max_tokens=8, stop_token_ids=STOP))
    verdict = ExactTree().judge(tree, rows, None)
    assert (verdict.path, verdict.token, verdict.rejected) == ([1], None, False)


def table_rows(probs, sampling):
    from draftwell.serving.runtime.sampling import LogitRows

    return LogitRows(probs.log().clamp(min=-50.0), sampling)


def test_depths_and_paths():
    tree = DraftTree([5, 6, 7, 8], [ROOT, ROOT, 1, 2])
    assert depths(tree.parents) == [1, 1, 2, 3]
    assert tree.path(3) == [1, 2, 3]
    assert tree.draft([1]).tokens == [6, 7, 8]
    assert not tree.is_chain
    assert DraftTree([5, 6], [ROOT, 0]).is_chain
