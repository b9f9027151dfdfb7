"""A head is fed the target's state at token i with token i + 1, and its own output where the target
has not read yet."""

from __future__ import annotations

import pytest
import torch

from draftwell.serving.artifacts.hardware_profile import HardwareProfile
from draftwell.serving.runtime.acceptance.tree import ExactTree
from draftwell.serving.runtime.drafting.best_drafter import BestDrafter
from draftwell.serving.runtime.drafting.head import HeadTree, likeliest_part
from draftwell.serving.runtime.engine.engine import Engine
from draftwell.serving.runtime.requests import Sampling
from draftwell.serving.runtime.schedules.serial import serial_trees
from draftwell.serving.runtime.strategies import build_strategy
from draftwell.serving.runtime.strategies.compose import compose
from draftwell.serving.runtime.trees import ROOT, DraftTree
from tests.support.models.counters import forwards_of
from tests.support.models.resources import ORIGIN, decode, table_pair, table_resources
from tests.support.models.spans import all_rows
from tests.support.models.table_model import TableModel

OWN = 1000.0


class Numbered(TableModel):
    """A target whose state at a position is its number, and that of its token."""

    def hidden_states(self, slot, start, end):
        return torch.tensor([[float(i), float(self.tokens[slot][i])] for i in range(start, end)])


class Checking(TableModel):
    """A head that looks at its pairs; its own states are the number of its pair above `OWN`, and
    the token it was fed."""

    def __init__(self, *arguments, **named):
        super().__init__(*arguments, **named)
        self.fed = []

    def forward(self, rows):
        outputs = []
        for row, output in zip(rows, super().forward(rows), strict=True):
            start = self.slots.lengths[row.slot] - len(row.tokens)
            levels = (
                range(len(row.tokens))
                if row.parents is None
                else [
                    len(DraftTree([], list(row.parents)).path(i)) - 1
                    for i in range(len(row.tokens))
                ]
            )
            for token, feature, level in zip(
                row.tokens, row.features.tolist(), levels, strict=True
            ):
                self.fed.append((start + level, token, tuple(feature)))
            own = torch.tensor(
                [
                    [OWN + start + level, float(token)]
                    for level, token in zip(levels, row.tokens, strict=True)
                ]
            )
            outputs.append(all_rows(output.values, own[len(own) - row.keep :]))
        return outputs


@pytest.mark.parametrize(
    "parameters",
    [{"num_speculative_tokens": 3}, {"num_speculative_tokens": 3, "top_k": 2, "tree_tokens": 5}],
    ids=["chain", "tree"],
)
def test_each_pair_has_the_state_of_the_token_before_it(parameters):
    pair = table_pair(vocab=5)
    target, head = Numbered(pair["target"].table), Checking(pair["head"].table)
    prompt = [0, 1, 2, 3]
    job = decode(
        {"target": target, "head": head},
        prompt,
        "eagle3",
        parameters,
        table_resources(5),
        max_tokens=20,
    )
    text = prompt + job.output
    from_target = [pair for pair in head.fed if pair[2][0] < OWN]
    assert {place for place, _, _ in from_target} >= set(range(len(prompt) + 10)), (
        "every pair of the text was fed with the target's state"
    )
    for place, token, (position, before) in from_target:
        assert position == place, "pair i has the state of token i"
        assert (before, token) == (text[place], text[place + 1])
    own = [pair for pair in head.fed if pair[2][0] >= OWN]
    assert own
    for place, _, (position, _) in own:
        assert position == OWN + place - 1, (
            "a drafted token has the head's own state at the pair before it"
        )


@pytest.mark.parametrize(
    ("stop", "ends_at_once"), [("entropy", True), ("probability", False), ("acceptance", False)]
)
def test_at_threshold_0_only_entropy_ends_a_chain_after_its_first_token(stop, ends_at_once):
    stats = decode(
        table_pair(vocab=5),
        [0, 1, 2, 3],
        "eagle3",
        {"num_speculative_tokens": 3, "stop": stop, "threshold": 0.0},
        table_resources(5),
        max_tokens=20,
    ).session.stats
    assert (stats.drafted <= stats.rounds) == ends_at_once


def test_a_tree_has_the_likeliest_paths():
    found = DraftTree([1, 2, 3, 4, 5], [ROOT, ROOT, 0, 0, 1])
    tree = likeliest_part(found, [0.6, 0.3, 0.4, 0.1, 0.2], 3)
    assert (tree.tokens, tree.parents) == ([1, 2, 3], [ROOT, ROOT, 0])


def test_a_tree_keeps_to_its_limits():
    pair = table_pair(vocab=7)
    for levels, nodes, beam in ((1, 4, 3), (3, 6, 2), (4, 3, 2)):
        sizes = []

        class Watched(HeadTree):
            def propose(self, session, limit, sizes=sizes):
                tree = yield from super().propose(session, limit)
                sizes.append((len(tree), max(tree.depths, default=0), limit))
                return tree

        made = Watched(levels, nodes, beam)
        strategy = compose(
            lambda session, made=made: serial_trees(session, made, ExactTree()),
            roles=("target", "head"),
        )
        Engine(pair).generate([0, 1], Sampling(max_tokens=15), strategy)
        assert all(size <= nodes and deep <= min(levels, limit) for size, deep, limit in sizes)
        assert max(size for size, _, _ in sizes) == min(nodes, beam if levels == 1 else nodes)


def test_hybrids_pairs_have_the_targets_states_after_look_ups_too():
    pair = table_pair(vocab=5, sharpness=3.0)
    target, head = Numbered(pair["target"].table), Checking(pair["head"].table)
    profile = HardwareProfile(0.02, {1: 1.0, 32: 1.0}, 0.0, ORIGIN, t_head=0.02)
    strategy = build_strategy(
        "hybrid", {"drafter": "head", "max_draft": 3}, table_resources(5, hardware_profile=profile)
    )
    kinds, learn = [], BestDrafter.learn
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(
            BestDrafter,
            "learn",
            lambda self, draft, verdict: (
                kinds.append(self.chosen is None),
                learn(self, draft, verdict),
            ),
        )
        job = Engine({"target": target, "head": head}).generate(
            [0, 1, 2, 3], Sampling(max_tokens=60, temperature=1.0, seed=3), strategy
        )
    assert len(set(kinds)) == 2, "rounds by the head, and rounds by look-ups or plain ones"
    text = [0, 1, 2, 3, *job.output]
    for place, token, (position, before) in (fed for fed in head.fed if fed[2][0] < OWN):
        assert (position, before, token) == (place, text[place], text[place + 1])


@pytest.mark.parametrize(
    "parameters",
    [{"num_speculative_tokens": 3, "top_k": 3}, {"num_speculative_tokens": 8, "top_k": 2}],
    ids=str,
)
@pytest.mark.parametrize("context", [26, 28, 32])
def test_a_tree_never_outgrows_a_context(parameters, context):
    """Its tokens side by side take more places than the text that may come of them."""
    pair = table_pair(vocab=5)
    models = {
        role: TableModel(pair[role].table, max_context=context) for role in ("target", "head")
    }
    job = decode(models, [1, 2], "eagle3", parameters, table_resources(5), max_tokens=24)
    plain = decode({"target": models["target"]}, [1, 2], "autoregressive", max_tokens=24)
    assert job.output == plain.output


def test_what_a_busy_server_allows_is_not_exceeded():
    models = table_pair(vocab=7)
    given = forwards_of(models["target"])
    engine, sizes = Engine(models), []
    job = engine.submit(
        [0, 1],
        Sampling(max_tokens=20),
        build_strategy("eagle3", {"top_k": 3, "tree_tokens": 7}, table_resources(7)),
        2,
    )
    while not job.finished:
        before = job.session.stats.drafted
        engine.step()
        sizes.append(job.session.stats.drafted - before)
    assert 0 < max(sizes) <= 2
    widths = [len(row.tokens) for row in given if not row.prefill]
    assert max(widths[1:]) == 3, "two tokens of a tree, and the last one of the text"


def test_a_level_of_a_tree_is_read_for_its_own_rows_alone():
    pair = table_pair(vocab=7)
    given = forwards_of(pair["head"])
    strategy = build_strategy(
        "eagle3", {"top_k": 2, "num_speculative_tokens": 4}, table_resources(7)
    )
    Engine(pair).generate([0, 1], Sampling(max_tokens=20), strategy)
    trees = [row for row in given if row.parents is not None]
    assert max(row.keep for row in trees) == 2
    assert max(len(row.tokens) for row in trees) == 6, "three levels of two"


@pytest.mark.parametrize(
    "altered", [{"frequency_penalty": 0.9}, {"repetition_penalty": 2.0}], ids=str
)
def test_under_penalties_a_trees_head_drafts_what_the_target_will_say(altered):
    """A head that says what the target says, pair by pair: with the penalties of each place all of
    its drafts are kept."""
    target = TableModel.random(6, seed=2, sharpness=1.0)
    models, asked = (
        {"target": target, "head": TableModel(target.table)},
        Sampling(max_tokens=40, **altered),
    )
    job = Engine(models).generate(
        [1, 2, 3], asked, build_strategy("eagle3", {"top_k": 3}, table_resources(6))
    )
    assert (
        job.output
        == Engine({"target": target})
        .generate([1, 2, 3], asked, build_strategy("autoregressive"))
        .output
    )
    assert job.session.stats.judged > 20
    assert job.session.stats.accepted == job.session.stats.judged
