"""Drafting with sublayers skipped: what such a pass computes, what it must not leave behind, and
the search for what to skip."""

from __future__ import annotations

import pytest
import torch

from draftwell.serving.runtime.commands import Forward
from draftwell.serving.runtime.drafting.skipping import SkipSearch
from draftwell.serving.runtime.engine.engine import Engine
from draftwell.serving.runtime.models.lean_llama import LeanLlama
from draftwell.serving.runtime.models.transformers_model import TransformersModel
from draftwell.serving.runtime.requests import Sampling
from draftwell.serving.runtime.session.lane import Lane
from draftwell.serving.runtime.session.stats import Stats
from draftwell.serving.runtime.strategies import StrategyResources, build_strategy
from tests.support.models.by_library import WAYS
from tests.support.models.enumeration import law_error
from tests.support.models.lean_families import lean_family
from tests.support.models.llama_shapes import llama, random_tokens
from tests.support.models.resources import decode, table_pair, table_resources
from tests.support.models.table_model import TableModel

SETTINGS = {"skip_ratio": 0.25, "threshold": 0.0, "max_draft": 3, "interval": 2, "window": 4}
SKIPS = [frozenset({2}), frozenset({3}), frozenset({2, 3}), frozenset({1, 2, 4, 5}), frozenset()]


def without(module, skip):
    """A module whose sublayers add nothing: their last product is 0."""
    with torch.no_grad():
        for one in skip:
            layer = module.model.layers[one // 2]
            (layer.mlp.down_proj if one % 2 else layer.self_attn.o_proj).weight.zero_()
    return module


@pytest.mark.parametrize("make", WAYS)
@pytest.mark.parametrize("skip", SKIPS, ids=lambda skip: str(sorted(skip)))
def test_a_skipped_pass_is_that_of_a_model_whose_sublayers_add_nothing(skip, make):
    """Token after token, as drafts are: what was read with the same set skipped is seen again."""
    model, text = make(llama(num_hidden_layers=4), slots=1), list(random_tokens(7))
    slot = model.open()
    steps = [
        model.forward([Forward("target", slot, tuple(part), skip=skip)])[0]
        for part in (text[:4], text[4:5], text[5:])
    ]
    with torch.no_grad():
        expected = without(llama(num_hidden_layers=4), skip)(torch.tensor([text])).logits[0]
    for output, place in zip(steps, (3, 4, 6), strict=True):
        assert torch.allclose(output.logits[0], expected[place], atol=5e-5)


@pytest.mark.parametrize("family", ["llama", "gemma2", "qwen3"])
def test_rows_that_skip_different_sublayers_share_a_batch(family):
    model, text = LeanLlama(lean_family(family), slots=4), list(random_tokens(6))
    skips = [frozenset({1}), frozenset(), frozenset({0, 1}), frozenset({1})]
    slots = [model.open() for _ in skips]
    found = model.forward(
        [
            Forward("target", slot, tuple(text[: 6 - i]), 2, skip=skip)
            for i, (slot, skip) in enumerate(zip(slots, skips, strict=True))
        ]
    )
    for i, (skip, output) in enumerate(zip(skips, found, strict=True)):
        with torch.no_grad():
            expected = without(lean_family(family), skip)(torch.tensor([text[: 6 - i]])).logits[
                0, -2:
            ]
        assert torch.allclose(output.logits, expected, atol=5e-5)


class Counts(Lane):
    """Takes what was read with sublayers skipped for read."""

    def skim(self, sequence, skip, keep=1):
        rows = yield from super().skim(sequence, skip, keep)
        self.length, self._skimmed = len(sequence), 0
        return rows


class InPlace(Counts):
    """And tries candidates where the text is stored, not on a branch."""

    def branch(self, number, length):
        self.rollback(length)
        return self


def answered(model, steps):
    """Runs a generator's forward passes; what it returns."""
    command = next(steps)
    while True:
        try:
            command = steps.send(model.forward([command])[0])
        except StopIteration as done:
            return done.value


def read_after_skimming(kind):
    """Largest difference of the logits after a text of which a part was skimmed before it was
    read."""
    model, text = LeanLlama(llama(num_hidden_layers=4), slots=1), list(random_tokens(9))
    lane = kind("target", model, model.open(), Sampling(), Stats())
    answered(model, lane.read(text[:4]))
    answered(model, lane.skim(text[:6], frozenset({2, 5})))
    answered(model, lane.skim(text[:7], frozenset({2, 5})))
    rows = answered(model, lane.read(text))
    with torch.no_grad():
        expected = llama(num_hidden_layers=4)(torch.tensor([text])).logits[0, -1]
    return float((rows.logits[0] - expected).abs().max())


def test_mutant_whose_skipped_passes_count_as_read_is_caught(monkeypatch):
    """By the row after it in a network; and by enumeration, where a search passes over text that is
    not read again."""
    assert read_after_skimming(Lane) < 5e-5
    assert read_after_skimming(Counts) > 1e-3
    assert off() < 1e-6
    monkeypatch.setattr("draftwell.serving.runtime.session.session.Lane", InPlace)
    assert off() > 1e-3


def off():
    models, sampling = table_pair(), Sampling(max_tokens=4, temperature=1.0)
    settings = {"threshold": 0.0, "max_draft": 2, "interval": 1, "window": 2}

    return law_error(
        lambda: build_strategy("swift", settings, table_resources()), models, [0, 1, 2], sampling
    )


def test_keys_and_values_of_the_text_are_those_of_plain_decoding():
    """Also where a search tries candidates on the text that is read already."""
    prompt, asked = random_tokens(9), Sampling(max_tokens=40)
    models = [LeanLlama(llama(num_hidden_layers=4), slots=1) for _ in range(2)]
    jobs = [
        Engine({"target": model}).generate(prompt, asked, strategy)
        for model, strategy in zip(
            models,
            (build_strategy("autoregressive"), build_strategy("swift", SETTINGS)),
            strict=True,
        )
    ]
    assert jobs[0].output == jobs[1].output
    read = len(prompt) + 39 - 3  # the last round may have ended before its tokens were read
    for layer in range(4):
        for one, other in zip(
            models[0].slots.memory(layer, 0), models[1].slots.memory(layer, 0), strict=True
        ):
            assert torch.allclose(one[:, :read], other[:, :read], atol=5e-5)


def test_skipped_passes_are_the_drafts_in_the_statistics():
    stats = decode(
        table_pair(vocab=8), [1, 2], "swift", {"threshold": 0.0}, max_tokens=40
    ).session.stats
    assert stats.draft_calls == stats.drafted > 0
    assert stats.target_calls == stats.sampled - 1, "the prompt's pass is none"
    assert stats.draft_seconds > 0
    assert {role for role, _, _ in stats.timeline} == {"draft", "target"}


def test_a_model_that_cannot_skip_decodes_plainly():
    model = TransformersModel(llama(), slots=1)
    stats = decode({"target": model}, [1, 2], "swift", max_tokens=9).session.stats
    assert (stats.drafted, stats.draft_calls, stats.target_calls) == (0, 0, 8)


class Fussy(TableModel):
    """Without one of its first sublayers it says something else; the others do nothing."""

    def _noise(self, skip):
        return (
            super()._noise(frozenset({2})) * 4
            if skip & {2, 3, 4, 5}
            else torch.zeros(self.vocab_size)
        )


@pytest.mark.parametrize("deterministic", [False, True])
def test_the_search_finds_what_does_not_matter(deterministic):
    """A search of their own begins anew with every request, a shared one is over with the first."""
    model = Fussy(TableModel.random(8, 0, order=1).table)
    settings = {"skip_ratio": 0.17, "threshold": 0.0, "max_draft": 2, "interval": 1, "window": 8}
    strategy = build_strategy("swift", settings, StrategyResources(deterministic=deterministic))
    stats = [
        Engine({"target": model}).generate([1], Sampling(max_tokens=200), strategy).session.stats
        for _ in range(2)
    ]
    assert stats[0].judged - stats[0].accepted > 0
    assert (stats[1].judged == stats[1].accepted) == (not deterministic)
    assert deterministic or strategy.shared.best <= {6, 7, 8, 9}


def test_a_search_moves_only_what_it_compared_with():
    search = SkipSearch(12, 0.25)
    first, second, third = search.best, frozenset({2, 5, 7}), frozenset({3, 4, 8})
    search.learn(first, 3, second, 3)
    assert (search.best, search.failures) == (first, 1)
    search.learn(first, 3, second, 4)
    assert (search.best, search.failures) == (second, 0)
    search.learn(first, 3, third, 9)  # of another request, which began before
    assert search.best == second
    assert all(
        len(search.candidate()) == len(first) == 4 and search.candidate() <= set(range(2, 10))
        for _ in range(50)
    )
    assert not search.over
    assert SkipSearch(4, 0.9).over
