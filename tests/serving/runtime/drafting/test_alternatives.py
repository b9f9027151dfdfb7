"""Alternatives beside a head's chain: verified where they pay, kept where they are the target's
choice, and counted."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from draftwell.serving.artifacts.acceptance_table import AcceptanceTable
from draftwell.serving.artifacts.hardware_profile import HardwareProfile
from draftwell.serving.runtime.drafting.alternatives import Alternatives
from draftwell.serving.runtime.drafting.best_drafter import BestDrafter
from draftwell.serving.runtime.drafting.expected_gain import RoundCosts
from draftwell.serving.runtime.engine.engine import Engine
from draftwell.serving.runtime.requests import Sampling
from draftwell.serving.runtime.strategies import build_strategy
from draftwell.serving.runtime.trees import ROOT, TreeVerdict
from draftwell.serving.runtime.types import Draft
from tests.support.models.resources import ORIGIN, table_pair, table_resources
from tests.support.models.spans import span_of
from tests.support.models.table_model import TableModel

FREE = HardwareProfile(0.02, {1: 1.0, 32: 1.0}, 0.0, ORIGIN, t_head=0.02)
"""Verifying several tokens costs what one does."""


def row(*chances):
    return span_of(torch.tensor([chances]).log(), Sampling())


def draft_of(*rows):
    return Draft([one.top[0] for one in rows], list(rows), [one.confidence(0) for one in rows])


def alternatives(verify):
    return Alternatives(RoundCosts(verify, 0.1), AcceptanceTable.empty(), AcceptanceTable.empty())


def test_the_best_that_pay_are_put_after_the_chain():
    draft = draft_of(row(0.6, 0.3, 0.08, 0.02), row(0.08, 0.5, 0.3, 0.12))
    some = alternatives([1.0, 1.0, 1.0, 1.0, 1.1, 1.2, 1.3, 1.4, 1.5])
    tree = some.around(draft, 8)
    assert (tree.tokens[:2], tree.parents[:2]) == ([0, 1], [ROOT, 0])
    assert list(zip(tree.tokens[2:], tree.parents[2:], strict=True)) == [(1, ROOT), (2, 0)], (
        "further ones bring less than .1 of a pass"
    )
    assert len(some.around(draft, 3)) == 3
    assert alternatives([1.0, 1.0, 1.5, 2.0, 2.5, 3.0]).around(draft, 8).is_chain, "none pays"


def test_every_judged_position_is_counted():
    draft, some = (
        draft_of(row(0.5, 0.32, 0.18), row(0.5, 0.32, 0.18), row(0.5, 0.32, 0.18)),
        alternatives([1.0] * 10),
    )
    tree = some.around(draft, 5)
    beside = [place for place in range(3, 5) if tree.parents[place] == 0]
    alone = some.learn(
        draft,
        tree,
        TreeVerdict([0, *beside[:1]], 2, False, 2) if beside else TreeVerdict([0], 1, True, 2),
    )
    assert (alone.accepted, alone.judged) == (1, 2)
    second, third = AcceptanceTable.bin_of(0.32), AcceptanceTable.bin_of(0.18)
    assert (some.table.total[second], some.table.accepted[second]) == (2, 1), (
        "at the first place the chain's token was right"
    )
    assert (some.table.total[third], some.table.accepted[third]) == (2, 0)


def test_alternatives_that_do_not_pay_are_counted_too():
    """Else they would never be verified again, whatever the text."""
    draft, some = draft_of(row(0.5, 0.32, 0.18)), alternatives([1.0, 1.0, 2.0, 3.0])
    assert some.around(draft, 8).is_chain
    some.count([1])
    assert some.table.accepted[AcceptanceTable.bin_of(0.32)] == 1
    some.count([1])
    assert sum(some.table.total) == 2, "each draft once"


def second_best_pair(vocab=8):
    """A target that counts, and a head whose second choice is always the target's token, never its
    first."""
    target, head = torch.full((vocab, vocab), -20.0), torch.full((vocab, vocab), -20.0)
    for i in range(vocab):
        target[i, (i + 1) % vocab] = 20.0
        head[i, (i + 2) % vocab], head[i, (i + 1) % vocab] = 0.0, -0.1
    return {"target": TableModel(target), "head": TableModel(head)}


def watched(monkeypatch):
    """The trees that were verified: tokens of the chain, and of the tree."""
    seen, learn = [], BestDrafter.learn_tree
    monkeypatch.setattr(
        BestDrafter,
        "learn_tree",
        lambda self, draft, tree, verdict: (
            seen.append((len(draft), len(tree), verdict)),
            learn(self, draft, tree, verdict),
        ),
    )
    return seen


def test_a_second_choice_becomes_text(monkeypatch):
    seen, pair = watched(monkeypatch), second_best_pair()
    strategy = build_strategy(
        "hybrid", {"drafter": "head", "max_draft": 4}, table_resources(8, hardware_profile=FREE)
    )
    job = Engine(pair).generate([0], Sampling(max_tokens=7), strategy)
    assert job.output == [1, 2, 3, 4, 5, 6, 7]
    assert seen, "the head drafted"
    for chain, _, verdict in seen:
        assert [place >= chain for place in verdict.path] == [True], (
            "the alternative was kept, and nothing of the chain"
        )
        assert not verdict.rejected
    assert job.session.stats.target_calls < 7


def both_texts(seed):
    """Hybrid's greedy text and that of plain decoding, of a table so large that it does not repeat
    soon."""
    pair, asked = table_pair(vocab=40, seed=seed, noise=2.0), Sampling(max_tokens=30)
    strategy = build_strategy(
        "hybrid", {"drafter": "head", "max_draft": 6}, table_resources(40, hardware_profile=FREE)
    )
    plain = Engine({"target": pair["target"]}).generate(
        [0, 1], asked, build_strategy("autoregressive")
    )
    return Engine(pair).generate([0, 1], asked, strategy).output, plain.output


@pytest.mark.parametrize("seed", range(6))
def test_greedy_texts_are_those_of_plain_decoding(monkeypatch, seed):
    seen = watched(monkeypatch)
    text, plain = both_texts(seed)
    assert text == plain
    assert any(place >= chain for chain, _, verdict in seen for place in verdict.path), (
        "an alternative was kept"
    )
    assert all(chain < tree <= 6 for chain, tree, _ in seen)


def test_mutant_whose_slot_keeps_the_chain_is_caught(monkeypatch):
    """After a kept alternative the target must read on behind it, and not behind the draft's first
    tokens."""
    keep = TableModel.keep
    monkeypatch.setattr(
        TableModel,
        "keep",
        lambda self, slot, length, path: keep(self, slot, length, range(len(path))),
    )
    assert any(text != plain for text, plain in map(both_texts, range(6)))


def test_altered_requests_have_none_nor_sampled_ones_without_a_seed(monkeypatch):
    seen, pair = watched(monkeypatch), table_pair(vocab=5)
    strategy = build_strategy(
        "hybrid", {"drafter": "head"}, table_resources(5, hardware_profile=FREE)
    )
    for asked in (
        Sampling(max_tokens=40, temperature=1.0, seed=1),
        Sampling(max_tokens=40, frequency_penalty=0.5),
    ):
        Engine(pair).generate([0, 1], asked, strategy)
    assert not seen
    coupled = Sampling(max_tokens=40, temperature=1.0, seed=1, repeatable=True)
    Engine(pair).generate([0, 1], coupled, strategy)
    assert seen


def test_what_was_counted_is_resumed():
    pair = second_best_pair()
    resources = dataclasses.replace(table_resources(8, hardware_profile=FREE), deterministic=False)
    strategy = build_strategy("hybrid", {"drafter": "head"}, resources)
    Engine(pair).generate([0], Sampling(max_tokens=7), strategy)
    learnt = strategy.learnt()
    assert any("alternatives.accepted" in name for name in learnt)
    again = build_strategy("hybrid", {"drafter": "head"}, resources)
    again.resume(learnt)
    assert again.learnt() == learnt
