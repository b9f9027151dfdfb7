"""Lookahead decoding: what its window holds, when it is read along, and mistakes that would bias
the text."""

from __future__ import annotations

import pytest
import torch

from draftwell.serving.runtime.acceptance.tree import ExactTree
from draftwell.serving.runtime.drafting.lookahead import Lookahead, NGramPool
from draftwell.serving.runtime.engine.engine import Engine
from draftwell.serving.runtime.models.lean_llama import LeanLlama
from draftwell.serving.runtime.requests import Sampling
from draftwell.serving.runtime.schedules.serial import serial_trees
from draftwell.serving.runtime.strategies import build_strategy
from draftwell.serving.runtime.strategies.compose import compose
from draftwell.serving.runtime.trees import ROOT, DraftTree
from tests.support.models.enumeration import law_error
from tests.support.models.llama_shapes import llama, random_tokens
from tests.support.models.mutants import LeavesTheDistribution
from tests.support.models.resources import counting_pair, decode, table_pair, table_resources
from tests.support.models.table_model import TableModel


class Checked(Lookahead):
    """Compares what the window learns with the module's own argmax after every trajectory, without
    slots."""

    def __init__(self, module, window, size):
        super().__init__(window, size, 3)
        self.module, self.compared = module, 0

    def propose(self, session, limit):
        self.text = list(session.text.ids)
        return (yield from super().propose(session, limit))

    def follow(self, tree, path, rows):
        # of a single level its first is text by now
        leaves = self._places[-1][self.size == 2 :] if self._places else []
        super().follow(tree, path, rows)
        for place, token in zip(leaves, self._levels[-1] if leaves else [], strict=True):
            context = self.text + [tree.tokens[i] for i in tree.path(place)]
            with torch.no_grad():
                assert int(self.module(torch.tensor([context])).logits[0, -1].argmax()) == token
            self.compared += 1


@pytest.mark.parametrize(("window", "size"), [(5, 3), (3, 4), (2, 2), (1, 3)])
def test_the_window_moves_by_what_the_target_says_after_each_trajectory(window, size):
    module, drafters = llama(), []

    def steps(session):
        drafters.append(Checked(module, window, size))
        return serial_trees(session, drafters[-1], ExactTree(), follow=drafters[-1].follow)

    model = LeanLlama(llama(), slots=1)
    job = Engine({"target": model}).generate(
        random_tokens(9), Sampling(max_tokens=24), compose(steps, roles=("target",))
    )
    plain = decode({"target": model}, random_tokens(9), "autoregressive", max_tokens=24)
    assert job.output == plain.output
    assert drafters[0].compared > 5 * window
    assert drafters[0].compared % window == 0


class Noting(Lookahead):
    """Notes after every pass with a window whether the pool holds an n-gram."""

    def __init__(self, size):
        super().__init__(3, size, 3, from_text=False)
        self.pooled = []
        self.pool.add = lambda first, rest: self.pooled.append(True)

    def follow(self, tree, path, rows):
        before = len(self.pooled)
        window = bool(self._places)
        super().follow(tree, path, rows)
        if window and len(self.pooled) == before:
            self.pooled.append(False)


@pytest.mark.parametrize("size", [2, 3, 4])
def test_n_grams_are_pooled_as_soon_as_no_guess_from_the_prompt_is_in_them(size):
    drafters = []

    def steps(session):
        drafters.append(Noting(size))
        return serial_trees(session, drafters[-1], ExactTree(), follow=drafters[-1].follow)

    Engine({"target": table_pair()["target"]}).generate(
        [0, 1], Sampling(max_tokens=8), compose(steps, roles=("target",))
    )
    assert drafters[0].pooled.index(True) == size - 2


def test_n_grams_that_no_text_held_are_guessed():
    """A text that counts never repeats itself, so what is accepted was guessed by the window: it
    begins at 25, which the prompt holds."""
    model = counting_pair(vocab=60)["target"]
    settings = {"window": 5, "ngram": 3, "pool_from_text": False}
    job = decode({"target": model}, [25, 0], "lookahead", settings, max_tokens=50)
    assert job.output == list(range(1, 51))
    stats = job.session.stats
    assert stats.accepted == stats.judged > 10
    assert stats.target_calls == 49 - stats.accepted


def test_what_is_read_along_is_nobodys_child():
    tree = DraftTree([5, 6, 7, 8], [ROOT, 0, ROOT, 2], read_along=2)
    assert (tree.children(ROOT), tree.children(2), tree.judged, tree.is_chain) == (
        [0],
        [],
        2,
        False,
    )
    assert not DraftTree([7], [ROOT], read_along=1).is_chain
    assert tree.draft([]).tokens == [5, 6]


def test_a_pool_keeps_the_latest_of_each_first_token():
    pool = NGramPool(2, 2)
    for following in (1, 2, 1, 3):
        pool.add(0, [following])
    assert pool.after(0) == [(3,), (1,)]
    assert pool.after(9) == []


class KeepsTheWindow(ExactTree):
    """Takes a token of the window for text: the first that is read along."""

    def judge(self, tree, target, rng):
        verdict = yield from super().judge(tree, target, rng)
        if tree.read_along and not verdict.path and verdict.token is not None:
            verdict.path, verdict.rejected = [tree.judged], False
        return verdict


@pytest.mark.parametrize(
    "rule", [LeavesTheDistribution(), KeepsTheWindow()], ids=["anew", "window"]
)
def test_mutants_are_caught(monkeypatch, rule):
    monkeypatch.setattr(
        "draftwell.serving.runtime.strategies.lossless.lookahead.ExactTree", lambda: rule
    )
    assert off({}) > 1e-3


def test_mutant_whose_slot_keeps_the_first_places_is_caught(monkeypatch):
    """A second n-gram was kept, and the slot holds the first."""
    assert off({}) < 1e-6
    right = TableModel.keep
    monkeypatch.setattr(
        TableModel,
        "keep",
        lambda model, slot, length, path: right(model, slot, length, range(len(path))),
    )
    assert off({}) > 1e-3


def off(settings):
    models, sampling = table_pair(), Sampling(max_tokens=4, temperature=1.0)

    return law_error(
        lambda: build_strategy("lookahead", settings, table_resources()),
        models,
        [0, 1, 0, 2, 0],
        sampling,
    )
