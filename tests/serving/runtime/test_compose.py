"""Compositions that no paper has: the example of docs/compose.md runs, and what is lossless among
them is proved."""

from __future__ import annotations

import math
import re

import pytest
import torch

from draftwell.serving.artifacts.acceptance_table import AcceptanceTable
from draftwell.serving.artifacts.correction_memory import CorrectionMemory
from draftwell.serving.artifacts.verifier import Verifier
from draftwell.serving.runtime.acceptance.exact import Exact
from draftwell.serving.runtime.acceptance.rescue import Rescue
from draftwell.serving.runtime.drafting.cascade import Cascade
from draftwell.serving.runtime.drafting.draft_model import DraftModel
from draftwell.serving.runtime.drafting.ngram import NGram
from draftwell.serving.runtime.drafting.stopping import (
    CumulativeAcceptance,
    FixedLength,
    Untrusted,
)
from draftwell.serving.runtime.engine.engine import Engine
from draftwell.serving.runtime.requests import Sampling
from draftwell.serving.runtime.schedules.intertwined import intertwined
from draftwell.serving.runtime.schedules.serial import serial
from draftwell.serving.runtime.strategies import Strategy, build_strategy
from draftwell.serving.runtime.strategies.compose import compose
from tests.support.errors import raises_code
from tests.support.models.counters import counters
from tests.support.models.enumeration import joint_law, true_law
from tests.support.models.joint_distributions import furthest
from tests.support.models.resources import ORIGIN, table_pair, table_resources
from tests.support.paths import REPO

EXAMPLE = (REPO / "examples" / "compose.py").read_text(encoding="utf-8")
WARPERS = [
    {"temperature": 0.0},
    {"temperature": 0.7},
    {"temperature": 1.0},
    {"temperature": 1.0, "top_k": 2},
    {"temperature": 0.7, "top_p": 0.8},
]


def test_the_example_runs(capsys):
    exec(compile(EXAMPLE, "compose.py", "exec"), {})
    first, second = capsys.readouterr().out.splitlines()
    assert re.match(r"100 tokens, [1-9]\d* of \d+ kept ones rescued, \d+ target calls$", first)
    assert int(second.split()[0]) < 100, "fewer target calls than tokens"


def test_the_snippets_of_the_page_are_the_examples():
    page = (REPO / "docs" / "compose.md").read_text(encoding="utf-8")
    snippets = re.findall(r"^```python\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    assert len(snippets) == 2
    assert all(snippet in EXAMPLE for snippet in snippets)


# N-gram first, draft model second


def cascade() -> Strategy:
    return compose(
        lambda session: serial(session, Cascade(NGram(3, 2), DraftModel(FixedLength(2))), Exact())
    )


@pytest.mark.parametrize("warpers", WARPERS, ids=str)
def test_a_cascade_of_drafters_is_lossless(warpers):
    models, sampling = (
        table_pair(),
        Sampling(
            max_tokens=4 if "top_k" in warpers else 3, stop_token_ids=frozenset({2}), **warpers
        ),
    )
    law = joint_law(cascade, models, [0, 1, 0], sampling)
    assert furthest(law, true_law(models["target"], [0, 1, 0], sampling)) < 1e-6


def test_a_cascade_asks_the_draft_model_only_where_nothing_matches():
    """Rounds that the n-grams serve leave the draft's slot behind; it is fed what it missed when it
    is asked again."""
    for seed in range(10):
        models = table_pair(vocab=8, seed=seed, noise=1.0)
        sampling = Sampling(max_tokens=60, temperature=1.0, seed=seed)
        stats = Engine(models).generate([1, 2], sampling, cascade()).session.stats
        assert 0 < stats.draft_calls < stats.drafted
        greedy = Sampling(max_tokens=60)
        assert Engine(models).generate([1, 2], greedy, cascade()).output == (
            Engine(models).generate([1, 2], greedy, build_strategy("autoregressive")).output
        )


def test_an_empty_cascade_proposes_nothing():
    job = Engine(table_pair(8)).generate(
        [1], Sampling(max_tokens=9), compose(lambda session: serial(session, Cascade(), Exact()))
    )
    assert (len(job.output), job.session.stats.drafted) == (9, 0)


def test_models_take_turns_in_a_composition_unless_it_says_otherwise():
    engine = Engine(table_pair(8))
    job = engine.submit([1], Sampling(max_tokens=9), cascade())
    assert not job.overlapping
    engine.run([job])


# SPRINTER's verifier as a stop policy


def trusting(features: tuple[str, ...], vocab: int = 3) -> Verifier:
    """Trusts some tokens: by the state that produced them, and by q(x), above .35 where it sees
    nothing else."""
    states = torch.randn(
        vocab * sum(f != "scalars" for f in features), generator=torch.Generator().manual_seed(1)
    )
    seen = "scalars" in features
    return Verifier(
        torch.cat([states, torch.tensor([20.0, 0, 0, 0])]) if seen else states,
        -7.0 * seen,
        features,
        0.5,
        1.2,
        ORIGIN,
    )


def verified(features: tuple[str, ...], drafter=DraftModel, vocab: int = 3) -> Strategy:
    return compose(
        lambda session: serial(
            session, drafter(Untrusted(trusting(features, vocab), max_draft=3)), Exact()
        )
    )


@pytest.mark.parametrize("warpers", WARPERS, ids=str)
@pytest.mark.parametrize("features", [("before",), ("scalars",), ("before", "scalars")], ids=str)
def test_a_verifier_that_only_ends_drafts_is_lossless(features, warpers):
    models, sampling = (
        table_pair(),
        Sampling(max_tokens=3, stop_token_ids=frozenset({2}), **warpers),
    )
    law = joint_law(lambda: verified(features), models, [0, 1, 0], sampling)
    assert furthest(law, true_law(models["target"], [0, 1, 0], sampling)) < 1e-6


def test_a_mutant_that_drops_the_distrusted_token_is_caught():
    class Dropping(DraftModel):
        def propose(self, session, limit, pending=None):
            draft = yield from super().propose(session, limit, pending)
            last = len(draft) - 1
            if (
                len(draft)
                and self.stop.verifier.score_drafted(draft.rows[last], None, draft.tokens[last])
                < self.stop.tau
            ):
                session.draft.rollback(len(session.text.ids) + last)
                draft = draft[:last]
            return draft

    models, sampling = table_pair(), Sampling(max_tokens=3, temperature=1.0)
    law = joint_law(lambda: verified(("scalars",), Dropping), models, [0], sampling)
    assert furthest(law, true_law(models["target"], [0], sampling)) > 1e-3


def test_drafts_end_at_the_first_distrusted_token():
    verifier = trusting(("before", "scalars"), 8)
    drafts = []

    class Recording(DraftModel):
        def propose(self, session, limit, pending=None):
            draft = yield from super().propose(session, limit, pending)
            drafts.append(
                [
                    verifier.score_drafted(row, None, token) >= 0.5
                    for row, token in zip(draft.rows, draft.tokens, strict=True)
                ]
            )
            return draft

    Engine(table_pair(8)).generate(
        [1], Sampling(max_tokens=80, temperature=1.0), verified(verifier.features, Recording, 8)
    )
    assert all(all(draft[:-1]) for draft in drafts)
    inside = [draft for draft in drafts[:-1] if draft and len(draft) < 3]
    assert inside
    assert not any(draft[-1] for draft in inside[:-1])
    assert {len(draft) for draft in drafts} >= {1, 3}
    with raises_code("unsupported_features", "before", "scalars"):
        Untrusted(trusting(("after",)))


# SPIDE's schedule with CSD's rescue


def rescued_spide(min_count: float, tau: float = 0.2, use_memory: bool = True) -> Strategy:
    def steps(session):
        table = AcceptanceTable.empty(ORIGIN)

        def learn(judged, verdict):
            for i in range(verdict.judged):
                table.update(judged.confidence[i], kept=i < verdict.accepted)

        first, ahead = (
            DraftModel(stop, with_confidence=True)
            for stop in (CumulativeAcceptance(table, 0.4, 6), FixedLength(6))
        )
        rule = Rescue(CorrectionMemory.empty(ORIGIN), min_count, tau, use_memory=use_memory)
        yield from intertwined(session, first, ahead, rule, lambda unverified: 3, learn)

    return compose(steps, overlaps=True)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_spide_whose_rescue_never_rescues_is_spide(temperature):
    sampling = Sampling(max_tokens=80, temperature=temperature, seed=2)
    spide = build_strategy("spide", {"tau": 0.4, "max_draft": 6}, table_resources(8, ratio=3.0))
    mine, theirs = (
        Engine(table_pair(8, noise=1.5)).generate([1], sampling, s)
        for s in (rescued_spide(math.inf), spide)
    )
    assert mine.output == theirs.output
    assert counters(mine.session.stats) == counters(theirs.session.stats)


def test_rescue_in_spide_keeps_what_the_gate_lets_through_and_saves_target_calls():
    models, sampling = table_pair(8, noise=2.0), Sampling(max_tokens=200)
    job = Engine(models).generate([1], sampling, rescued_spide(0, use_memory=False))
    plain = Engine(models).generate([1], sampling, rescued_spide(math.inf))
    assert job.session.stats.rescued > 0
    assert job.session.stats.accepted + job.session.stats.sampled == 200
    assert job.session.stats.acceptance_rate > plain.session.stats.acceptance_rate
    ids = [1, *job.output]
    for i in range(1, len(ids)):
        logits = models["target"].next_logits(ids[:i])
        assert float(logits[ids[i]] - logits.max()) >= math.log(0.2) - 1e-6


def test_a_composition_names_the_model_it_lacks():
    models = table_pair(8)
    del models["draft"]
    with raises_code("model_missing", "composed", "draft"):
        Engine(models).generate([1], Sampling(max_tokens=3), cascade())
    lookup = compose(lambda session: serial(session, NGram(3, 4), Exact()), roles=("target",))
    assert len(Engine(models).generate([1], Sampling(max_tokens=3), lookup).output) == 3
