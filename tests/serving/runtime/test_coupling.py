"""A sampled request with a seed has one answer, plain decoding's, with every lossless strategy; and
that answer follows the target's law."""

from __future__ import annotations

import functools
import math
from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from draftwell.serving.artifacts.hardware_profile import HardwareProfile
from draftwell.serving.runtime import logits as logits_module, random_streams
from draftwell.serving.runtime.drafting.best_drafter import Candidate
from draftwell.serving.runtime.engine.engine import Engine
from draftwell.serving.runtime.logits import Span
from draftwell.serving.runtime.pair import over_slots
from draftwell.serving.runtime.random_streams import Race, leaders
from draftwell.serving.runtime.requests import Sampling
from draftwell.serving.runtime.session.lane import Lane
from draftwell.serving.runtime.strategies import STRATEGIES, build_strategy
from tests.support.cases import in_turn, quick_only
from tests.support.models.chi_square import p_value
from tests.support.models.eight_requests import requests
from tests.support.models.enumeration import Oracle, distance, run_once, true_law
from tests.support.models.heads import random_eagle3
from tests.support.models.resources import (
    NEEDED,
    ORIGIN,
    random_datastore,
    table_pair,
    table_resources,
)
from tests.support.models.tiny import VOCAB, llama, near
from tests.support.models.variants import VARIANTS

LOSSLESS = [name for name, strategy in STRATEGIES.items() if strategy.lossless]
LOSSY = [name for name, strategy in STRATEGIES.items() if not strategy.lossless]


def winner(law: Any, race: Race, support: Any = None) -> int:
    return leaders(law, race, support=support)[0][0]


LAW = np.array([0.02, 0.38, 0.0, 0.25, 0.3, 0.05], np.float32)
OTHER = np.array([0.1, 0.2, 0.1, 0.35, 0.25, 0.0], np.float32)


@pytest.mark.parametrize("rare", [0.0, 0.1, 1.0])
@pytest.mark.parametrize("support", [None, np.array([3, 4, 10, 11, 20, 900])])
def test_winners_follow_the_law_however_many_tokens_race_as_one(monkeypatch, rare, support):
    monkeypatch.setattr(random_streams, "RARE", rare)
    drawn = [(winner(LAW, Race(seed, index), support),) for seed in (1, 2) for index in range(800)]
    law = {(column,): float(p) for column, p in enumerate(LAW) if p > 0}
    assert p_value(drawn, law) > 1e-3


def test_two_laws_agree_as_often_as_the_paper_says():
    """Daliri 2024: Σ_x 1/Σ_y max(p(y)/p(x), q(y)/q(x)), here .737, of 1 − TV = .77 at best."""
    both = [x for x in range(len(LAW)) if LAW[x] * OTHER[x] > 0]
    wanted = sum(1 / np.maximum(LAW / LAW[x], OTHER / OTHER[x]).sum() for x in both)
    apart = np.abs(LAW - OTHER).sum() / 2
    assert (1 - apart) / (1 + apart) <= wanted <= 1 - apart
    races = [Race(5, index) for index in range(3000)]
    found = np.mean([winner(LAW, race) == winner(OTHER, race) for race in races])
    assert found == pytest.approx(wanted, abs=4 * math.sqrt(wanted * (1 - wanted) / 3000))


def test_a_token_has_the_same_noise_whatever_races_beside_it():
    race, tokens = Race(7, 3), np.arange(-2, 1000)
    noise = race.uniforms(tokens)
    assert (race.uniforms(tokens[::7]) == noise[::7]).all()
    assert len(set(noise)) == len(noise)
    assert 0 < noise.min() < noise.max() < 1
    assert (Race(7, 4).uniforms(tokens) != noise).all()
    assert (Race(8, 3).uniforms(tokens) != noise).all()
    assert [Race(-1, 0).uniforms(tokens[:1]), Race(2**63, 0).uniforms(tokens[:1])], "any seed"


class SharedUniforms:
    """In the place of the races: each position's token by inversion of one uniform, which all
    models share. All uniforms are tried: one is known as far as the laws that asked have cut
    it."""

    def __init__(self, oracle: Oracle):
        self.oracle, self.known = oracle, dict[int, tuple[float, float]]()

    def leaders(
        self, law: Any, race: Race, count: int = 1, support: Any = None
    ) -> list[tuple[int, float]]:
        low, high = self.known.get(race.index, (0.0, 1.0))
        ends = np.cumsum(law.astype(float)) / law.astype(float).sum()
        starts = np.concatenate([[0.0], ends[:-1]])
        inside = np.minimum(ends, high) - np.maximum(starts, low)
        column = self.oracle.decide(np.where(inside > 1e-9, inside, 0.0).tolist())
        self.known[race.index] = max(starts[column], low), min(ends[column], high)
        others = [i for i, p in enumerate(law) if p > 0 and i != column]
        return [(i, float(law[i])) for i in [column, *others][:count]]


def coupled_law(build: Any, models: Any, prompt: list[int], sampling: Sampling) -> dict[Any, float]:
    """As `joint_law`, of a coupled request: over every uniform of every position."""
    law: Counter[Any] = Counter()
    pending: list[list[int]] = [[]]
    with pytest.MonkeyPatch.context() as patched:
        while pending:
            oracle = Oracle(pending.pop())
            shared = SharedUniforms(oracle)
            patched.setattr(logits_module, "leaders", shared.leaders)
            law[tuple(run_once(build(), models, prompt, sampling, oracle).output)] += (
                oracle.probability
            )
            pending += oracle.open
    return dict(law)


WARPERS = [
    {"temperature": 1.0},
    {"temperature": 0.7, "top_k": 2},
    {"temperature": 1.0, "frequency_penalty": 0.9, "logit_bias": {0: 0.7}},
    {"temperature": 0.9, "top_p": 0.8, "min_tokens": 2},
]


def law_error(
    name: str, parameters: dict[str, Any], resources: Any = None, **settings: Any
) -> float:
    asked = {"max_tokens": 3, "stop_token_ids": frozenset({2}), "coupled": True, **settings}
    models, sampling = table_pair(), Sampling(**asked)

    def build() -> Any:
        return build_strategy(name, parameters, resources or table_resources())

    law = coupled_law(build, models, [0, 1, 0], sampling)
    return distance(law, true_law(models["target"], [0, 1, 0], sampling))


@pytest.mark.parametrize(("name", "parameters", "warpers"), in_turn(VARIANTS, WARPERS), ids=str)
def test_the_joint_law_is_the_targets(name, parameters, warpers):
    assert law_error(name, parameters, **warpers) < 1e-6


def test_alternatives_beside_a_heads_draft_leave_the_law_as_it_is(monkeypatch):
    cheap = HardwareProfile(0.02, {1: 1.0, 32: 1.0}, 0.0, ORIGIN, t_head=0.02)
    right, widened = Candidate.widened, list[bool]()
    monkeypatch.setattr(
        Candidate,
        "widened",
        lambda *args: widened.append((tree := right(*args)) is not None) or tree,
    )
    resources = table_resources(hardware_profile=cheap)
    asked = {"temperature": 1.0, "max_tokens": 4, "stop_token_ids": frozenset()}
    assert law_error("hybrid", {"drafter": "head", "max_draft": 4}, resources, **asked) < 1e-6
    assert any(widened)


def test_trees_of_a_head_are_coupled_without_a_seed_too():
    asked, engine = Sampling(max_tokens=24, temperature=1.0, seed=4), Engine(table_pair(vocab=5))
    trees = build_strategy("eagle3", {"top_k": 2, "tree_tokens": 4}, table_resources(5))
    found = engine.generate([0, 1, 0], asked, trees)
    seeded = replace(asked, repeatable=True)
    plain = engine.generate([0, 1, 0], seeded, build_strategy("autoregressive"))
    assert found.output == plain.output


@pytest.mark.parametrize(
    ("asked", "trees", "coupled"),
    [
        ({}, True, True),
        ({}, False, False),
        ({"frequency_penalty": 0.5}, True, False),
        ({"min_tokens": 3, "stop_token_ids": frozenset({2})}, True, False),
        ({"frequency_penalty": 0.5, "repeatable": True}, True, True),
    ],
    ids=str,
)
def test_only_requests_that_get_a_tree_are_coupled_without_a_seed(
    monkeypatch, asked, trees, coupled
):
    """A coupled chain is kept less often than one that is judged by p/q."""
    models = table_pair(vocab=5)
    monkeypatch.setattr(models["target"], "trees", trees)
    strategy = build_strategy("eagle3", {"top_k": 2, "tree_tokens": 4}, table_resources(5))
    sampling = Sampling(max_tokens=4, temperature=1.0, seed=4, **asked)
    job = Engine(models).generate([0, 1, 0], sampling, strategy)
    assert job.session.sampling.coupled is coupled


@pytest.mark.parametrize("name", ["eagle3", "rest"])
def test_rows_of_requests_that_are_not_coupled_have_no_numbers(monkeypatch, name):
    monkeypatch.setattr(Span, "before", lambda *_: pytest.fail("an index for nothing"))
    parameters = {"eagle3": {"top_k": 2, "tree_tokens": 4}, "rest": {}}[name]
    strategy = build_strategy(name, parameters, table_resources(5))
    asked = Sampling(max_tokens=8, temperature=0.0 if name == "eagle3" else 1.0)
    Engine(table_pair(vocab=5)).generate([0, 1, 0], asked, strategy)


@pytest.mark.parametrize("name", LOSSY)
def test_a_seed_leaves_the_rule_of_a_lossy_strategy_as_it_is(name):
    """Theirs are made for the exact test: `mentored` spends a budget on what that test rejects."""
    seeded, other = (
        Engine(table_pair(vocab=5)).generate(
            [0, 1, 0],
            Sampling(max_tokens=60, temperature=1.0, seed=3, repeatable=repeatable),
            build_strategy(name, {}, table_resources(5)),
        )
        for repeatable in (True, False)
    )
    assert seeded.output == other.output
    assert seeded.session.stats.rescued == other.session.stats.rescued


def test_mutant_that_draws_every_token_with_the_same_noise_is_caught(monkeypatch):
    right = Lane._under
    monkeypatch.setattr(
        Lane, "_under", lambda *args: (rows := right(*args)).before([0] * len(rows))
    )
    assert law_error("autoregressive", {}, temperature=1.0) > 1e-3


ALTERED: list[dict[str, Any]] = [
    {"temperature": 1.0, "logprobs": 2},
    {"temperature": 0.7, "top_k": 3},
    {"temperature": 1.3, "top_p": 0.8, "frequency_penalty": 0.7},
    {"temperature": 1.0, "min_p": 0.2, "stop_token_ids": frozenset({2}), "min_tokens": 4},
    {"temperature": 1.0, "logit_bias": {1: -1.0}, "repetition_penalty": 1.4},
]


@pytest.mark.parametrize(("name", "parameters", "altered"), in_turn(VARIANTS, ALTERED), ids=str)
def test_the_answer_of_a_seed_is_plain_decodings(name, parameters, altered):
    for seed in range(2):
        sampling = Sampling(max_tokens=24, seed=seed, repeatable=True, **altered)
        plain, drafted = (
            Engine(table_pair(vocab=5)).generate(
                [0, 1, 0], sampling, build_strategy(*one, table_resources(5))
            )
            for one in (("autoregressive", {}), (name, parameters))
        )
        assert drafted.output == plain.output
        assert drafted.session.ratings == plain.session.ratings


@functools.cache
def networks(dtype: torch.dtype) -> dict[str, Any]:
    target = near(llama(2), 0.0)
    modules = {"target": target, "draft": near(target, 0.06), "qualifier": near(target, 0.03, 2)}
    return {role: over_slots(module.to(dtype), slots=8) for role, module in modules.items()}


@pytest.mark.parametrize(
    ("name", "dtype"),
    quick_only(
        [(name, dtype) for name in LOSSLESS for dtype in (torch.float32, torch.bfloat16)],
        *((name, torch.bfloat16) for name in ("spide", "hybrid", "double")),
        ("eagle3", torch.float32),
    ),
)
def test_networks_answer_so_beside_others_too(name, dtype):
    """Each alone by plain decoding, and all at once in another order, under limits of a busy
    server."""
    wanted = [
        (prompt, replace(sampling, repeatable=True))
        for prompt, sampling in requests(VOCAB, 1.0)[:6]
    ]
    engine = Engine(networks(dtype))
    _, head = random_eagle3(near(llama(2), 0.0), VOCAB - 4)
    resources = table_resources(32, datastore=random_datastore(VOCAB), eagle3_head=head)
    alone = [
        engine.generate(*one, build_strategy("autoregressive", {}, resources)).output
        for one in wanted
    ]
    strategy = build_strategy(name, NEEDED.get(name, {}), resources)
    jobs = {
        at: engine.submit(*wanted[at], strategy, draft_limit=number)
        for number, at in enumerate((5, 2, 4, 0, 3, 1))
    }
    engine.run(list(jobs.values()))
    assert [jobs[at].output for at in range(6)] == alone
