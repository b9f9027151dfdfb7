"""An EAGLE-3 head over slots equals the module it was trained as, step by step; with batches, trees
and rollbacks between."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
import torch.nn.functional as F

from draftwell.serving.artifacts.eagle3_head import Eagle3Head
from draftwell.serving.runtime.commands import Forward
from draftwell.serving.runtime.engine.engine import Engine
from draftwell.serving.runtime.models.eagle3_model import Eagle3Model, head_of
from draftwell.serving.runtime.models.lean_llama import LeanLlama
from draftwell.serving.runtime.models.seen_tokens import SeenTokens
from draftwell.serving.runtime.models.unbatched_model import UnbatchedModel
from draftwell.serving.runtime.requests import Sampling
from draftwell.serving.runtime.strategies import StrategyResources, build_strategy
from tests.support.errors import raises_code
from tests.support.models.by_library import by_library, compiles
from tests.support.models.heads import random_eagle3
from tests.support.models.llama_shapes import llama, random_tokens
from tests.support.models.resources import ORIGIN


@torch.no_grad()
def trained_as(network, module, head, ids, hidden):
    """Outputs before the norm, and logits over the head's tokens and those in `ids`, of pairs in a
    row: the module's own attention over all before."""
    embedded = F.embedding(torch.tensor([ids]), module.get_input_embeddings().weight)
    projected = network.project(hidden[None], embedded, torch.arange(len(ids)))
    output = network.finish(
        F.scaled_dot_product_attention(*projected, is_causal=True), hidden[None]
    )[0]
    return output, network.norm(output) @ module.get_output_embeddings().weight[
        with_own(head, ids)
    ].T


def with_own(head, ids):
    return torch.tensor(sorted({*head.head_tokens.tolist(), *ids}))


def test_pairs_of_the_text_then_drafted_ones_equal_the_module():
    module = llama()
    network, head = random_eagle3(module, 40)
    target = LeanLlama(llama(), slots=2)
    model = head_of(target, head)
    states, text = torch.randn(9, 3 * module.config.hidden_size), list(random_tokens(9, 1))
    other, slot = model.open(), model.open()
    model.forward(
        [
            Forward("head", one, tuple(text[:count]), features=states[:count])
            for one, count in ((other, 3), (slot, 4))
        ]
    )
    model.forward(
        [Forward("head", slot, (7, 7), features=torch.randn(2, module.config.hidden_size))]
    )
    model.rollback(slot, 4)  # a draft that was rejected
    (first,) = model.forward([Forward("head", slot, tuple(text[4:]), 5, features=states[4:])])
    hidden = network.fc(states)
    output, logits = trained_as(network, module, head, text, hidden)
    known = torch.isin(first.whole.support, with_own(head, text))
    assert torch.allclose(first.values[:, known], logits[4:], atol=1e-4)
    assert torch.allclose(first.states, output[4:], atol=1e-4)
    assert first.whole.support.equal(
        with_own(head, [*text, 7])
    )  # a rejected token may stay a candidate
    (second,) = model.forward([Forward("head", slot, (11,), features=first.states[-1:])])
    output, logits = trained_as(
        network, module, head, [*text, 11], torch.cat([hidden, output[-1:]])
    )
    assert torch.allclose(
        second.values[:, torch.isin(second.whole.support, with_own(head, [*text, 11]))],
        logits[-1:],
        atol=1e-4,
    )


def test_a_texts_own_tokens_are_candidates_and_no_other_texts():
    module = llama()
    _, head = random_eagle3(module, 8)
    foreign = [
        token for token in range(module.config.vocab_size) if token not in head.head_tokens.tolist()
    ][:6]
    model = head_of(LeanLlama(llama(), slots=2), head)
    states = torch.randn(4, 3 * module.config.hidden_size)
    slots = [model.open(), model.open()]
    texts = foreign[:3], foreign[2:4]
    outputs = model.forward(
        [
            Forward("head", slot, tuple(text), features=states[: len(text)])
            for slot, text in zip(slots, texts, strict=True)
        ]
    )
    for output, text in zip(outputs, texts, strict=True):
        assert output.whole.support.equal(with_own(head, text))
        assert output.values.shape == (1, 8 + len(text))
        assert output.logits[0].isfinite().nonzero().flatten().equal(output.whole.support)
    branch = model.open_branch()
    model.fork(slots[0], branch, 3)
    (there,) = model.forward([Forward("head", branch, (foreign[4],), features=states[:1])])
    assert there.whole.support.equal(with_own(head, [*foreign[:3], foreign[4]]))
    (here,) = model.forward([Forward("head", slots[0], (foreign[5],), features=states[:1])])
    assert here.whole.support.equal(with_own(head, [*foreign[:3], foreign[5]]))
    model.close(slots[0])
    (fresh,) = model.forward(
        [Forward("head", model.open(), (int(head.head_tokens[0]),), features=states[:1])]
    )
    assert fresh.whole.support.equal(head.head_tokens), (
        "a later request knows nothing of the one before"
    )


def test_columns_that_come_one_by_one_are_those_that_come_at_once():
    generator = torch.Generator().manual_seed(5)
    rows, covered = torch.randn(60, 8, generator=generator), torch.arange(0, 60, 4)
    states = torch.randn(2, 8, generator=generator)
    text = torch.randperm(60, generator=generator).tolist()[:40]
    growing, at_once = SeenTokens(covered, rows), SeenTokens(covered, rows)
    for end, token in enumerate(text, start=1):
        growing.read(0, [token])
        logits, support = growing.widened(0, states @ rows[covered].T, states)
        ids = torch.tensor(sorted({*covered.tolist(), *text[:end]}))
        assert support.equal(ids)
        torch.testing.assert_close(logits, states @ rows[ids].T)
    at_once.read(0, text)
    for one, other in zip(
        at_once.widened(0, states @ rows[covered].T, states), (logits, support), strict=True
    ):
        torch.testing.assert_close(one, other)


def test_a_further_token_of_a_text_reads_one_row_of_the_embedding():
    """Not those of all tokens before it again."""

    class Counted:
        shape, device = (60, 8), torch.device("cpu")

        def __getitem__(self, ids):
            read.append(len(ids))
            return torch.ones(len(ids), 8)

    read = []
    seen = SeenTokens(torch.arange(10), Counted())
    for tokens in (range(20, 40), [41], [41, 3], [43]):
        seen.read(0, tokens)
        seen.widened(0, torch.zeros(1, 10), torch.ones(1, 8))
    assert read == [20, 1, 1]


def test_a_tree_of_drafted_pairs_gives_each_paths_logits():
    module = llama()
    network, head = random_eagle3(module, 40)
    model = head_of(LeanLlama(llama(), slots=1), head)
    states, text = torch.randn(5, 3 * module.config.hidden_size), list(random_tokens(5, 2))
    slot = model.open()
    (first,) = model.forward([Forward("head", slot, tuple(text), features=states)])
    features = first.states[-1:].expand(3, -1)
    (tree,) = model.forward(
        [Forward("head", slot, (11, 12, 13), 3, parents=(-1, -1, 1), features=features)]
    )
    hidden = torch.cat([network.fc(states), features[:1], features[:1]])
    for node, path in ((0, [11]), (1, [12]), (2, [12, 13])):
        _, logits = trained_as(network, module, head, text + path, hidden[: len(text) + len(path)])
        known = torch.isin(tree.whole.support, with_own(head, text + path))
        assert torch.allclose(tree.values[node, known], logits[-1], atol=1e-4)


@pytest.mark.parametrize(
    "parameters",
    [{"num_speculative_tokens": 4}, {"num_speculative_tokens": 3, "top_k": 3, "tree_tokens": 7}],
    ids=["chain", "tree"],
)
def test_greedy_outputs_equal_plain_decoding(parameters):
    """A random head, whose drafts are mostly rejected, on 12 prompts, some of them at once;
    transformers' own greedy text."""
    module = llama()
    _, head = random_eagle3(module, 40)
    target = LeanLlama(llama(), slots=4)
    engine = Engine({"target": target})
    strategy = build_strategy("eagle3", parameters, StrategyResources({"eagle3_head": head}))
    prompts = [list(random_tokens(3 + i % 7, i)) for i in range(12)]
    accepted = rejected = 0
    for at in range(0, 12, 4):
        jobs = [
            engine.submit(prompt, Sampling(max_tokens=24), strategy)
            for prompt in prompts[at : at + 4]
        ]
        engine.run(jobs)
        for prompt, job in zip(prompts[at : at + 4], jobs, strict=True):
            ids = torch.tensor([prompt])
            stats = job.session.stats
            expected = module.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=24,
                do_sample=False,
                eos_token_id=None,
                pad_token_id=0,
            )
            assert job.output == expected[0, len(prompt) :].tolist()
            accepted, rejected = accepted + stats.accepted, rejected + stats.judged - stats.accepted
    assert accepted > 0, "a head that is asked for its drafts at the wrong places is never right"
    assert rejected > 0


def test_one_head_serves_all_strategies_that_use_it():
    _, head = random_eagle3(llama(), 40)
    target = LeanLlama(llama(), slots=1)
    assert head_of(target, head) is head_of(target, head)
    other = Eagle3Head(head.state, head.config, head.head_tokens, (0, 0, 1), head.donor, ORIGIN)
    with raises_code("other_layers"):
        head_of(target, other)


@pytest.mark.slow
def test_a_head_is_dropped_when_nothing_uses_it_any_more():
    """A server whose heads are exchanged while it runs keeps the model of the last one."""
    _, first = random_eagle3(llama(), 40)
    target = LeanLlama(llama(), slots=1)
    strategy = build_strategy("eagle3", {}, StrategyResources({"eagle3_head": first}))
    dropped = weakref.ref(strategy.choose_models({"target": target})["head"])
    gc.collect()
    assert dropped() is not None, "made once, when the strategy is checked, not for each request"
    assert strategy.choose_models({"target": target})["head"] is dropped()
    _, second = random_eagle3(llama(), 40, seed=4)
    assert head_of(target, second) is not dropped()
    del strategy, first
    gc.collect()
    assert dropped() is None


def test_the_same_head_read_twice_is_one_model(tmp_path):
    _, head = random_eagle3(llama(), 40)
    head.save(tmp_path / "head")
    target = LeanLlama(llama(), slots=1)
    one, two = (Eagle3Head.load(tmp_path / "head") for _ in range(2))
    assert head_of(target, one) is head_of(target, two)


def test_targets_that_keep_no_states_say_so():
    _, head = random_eagle3(llama(), 40)
    with raises_code("no_hidden_states"):
        head_of(UnbatchedModel.__new__(UnbatchedModel), head)


def test_rotary_positions_that_depend_on_a_texts_length_are_refused():
    _, head = random_eagle3(llama(), 40)
    head.config["rope_scaling"] = {"rope_type": "dynamic", "factor": 2.0}
    with raises_code("unsupported_architecture", "dynamic"):
        Eagle3Model(head, LeanLlama(llama(), slots=1))


def outputs_of(model, parts):
    """States and logits of parts of a row, some of them trees: tokens and their parents."""
    slot, found = model.open(), []
    states = torch.randn(
        40, model.hidden_size, generator=torch.Generator().manual_seed(2)
    ).bfloat16()
    for tokens, parents, keep in parts:
        features = states[: len(tokens)]
        (one,) = model.forward(
            [Forward("head", slot, tokens, keep, parents=parents, features=features)]
        )
        found += [one.values, one.states.float()]
    model.close(slot)
    return found


PARTS = [((3, 4, 5), None, 1), ((6,), None, 1), ((7, 8), None, 2), ((9, 3, 5, 6), (-1, 0, 0, 1), 3)]


@compiles
def test_a_head_by_the_library_is_that_by_torch() -> None:
    module = llama(torch.bfloat16, hidden_size=64, intermediate_size=64, head_dim=16)
    _, head = random_eagle3(module, 32)
    found = [
        outputs_of(head_of(make(module, slots=2), head), PARTS) for make in (by_library, LeanLlama)
    ]
    for mine, theirs in zip(*found, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0.1, atol=0.1)


@compiles
def test_a_pair_is_read_alike_beside_others() -> None:
    """In one row or cut, alone or beside another request, and on a path of a tree."""
    module = llama(torch.bfloat16)
    _, head = random_eagle3(module, 32)
    model = head_of(by_library(module, slots=3), head)
    text = random_tokens(12, 1)
    states = torch.randn(12, model.hidden_size, generator=torch.Generator().manual_seed(2))

    def row(slot, start, end, **more):
        features = states[start:end].bfloat16()
        return Forward("head", slot, text[start:end], end - start, features=features, **more)

    slots = [model.open() for _ in range(3)]
    (whole,) = model.forward([row(slots[0], 0, 12)])
    cut, _ = model.forward([row(slots[1], 0, 5), row(slots[2], 0, 9)])
    rest, _ = model.forward([row(slots[1], 5, 12), row(slots[2], 9, 10)])
    assert torch.equal(whole.states, torch.cat([cut.states, rest.states]))
    assert torch.equal(whole.values[:, :20], torch.cat([cut.values[:, :20], rest.values[:, :20]]))
    model.rollback(slots[0], 9)
    (tree,) = model.forward([row(slots[0], 9, 12, parents=(-1, -1, 0))])
    assert torch.equal(tree.states[0], whole.states[9])
