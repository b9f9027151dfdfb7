"""The joint law of the output equals the target's, by enumeration over a tiny vocabulary; mutants
must fail."""

from __future__ import annotations

import pytest
import torch

from draftwell.serving.artifacts.hardware_profile import HardwareProfile
from draftwell.serving.runtime import logits as logits_module
from draftwell.serving.runtime.drafting.best_drafter import BestDrafter, Candidate
from draftwell.serving.runtime.drafting.draft_model import DraftModel
from draftwell.serving.runtime.penalties import Penalties
from draftwell.serving.runtime.requests import Sampling
from draftwell.serving.runtime.strategies import STRATEGIES, build_strategy
from tests.support.models.enumeration import distance, joint_law, law_error, true_law
from tests.support.models.mutants import Twice
from tests.support.models.resources import ORIGIN, table_pair, table_resources
from tests.support.models.spans import span_of
from tests.support.models.variants import VARIANTS

WARPERS = [
    {"temperature": 0.0},
    {"temperature": 0.7},
    {"temperature": 1.0},
    {"temperature": 1.0, "top_k": 2},
    {"temperature": 0.7, "top_p": 0.8},
    {"temperature": 0.9, "min_p": 0.3},
]
PENALTIES = [
    {"temperature": 0.0, "frequency_penalty": 1.5},
    {"temperature": 1.0, "frequency_penalty": 0.9, "presence_penalty": 0.6},
    {"temperature": 0.7, "presence_penalty": -0.8, "logit_bias": {0: 0.7, 2: -1.1}, "top_k": 2},
    {"temperature": 1.0, "frequency_penalty": 1.5, "banned_token_ids": frozenset({1})},
    {"temperature": 0.0, "repetition_penalty": 1.7, "min_tokens": 2},
    {"temperature": 1.0, "repetition_penalty": 0.6, "presence_penalty": 0.5},
    {"temperature": 1.0, "min_tokens": 2},
    {"temperature": 0.8, "min_tokens": 1, "repetition_penalty": 1.4, "min_p": 0.2},
]


def shared_out(variants: list[tuple[str, dict]]) -> list[tuple[str, dict, dict]]:
    """Every strategy meets all sampling parameters: its variants take turns with them, and each
    also meets plain sampling at temperature 1."""
    names = [name for name, _ in variants]
    return [
        (name, parameters, warpers)
        for place, (name, parameters) in enumerate(variants)
        for turn, warpers in enumerate(WARPERS + PENALTIES, names[:place].count(name))
        if turn % names.count(name) == 0 or warpers == {"temperature": 1.0}
    ]


@pytest.mark.parametrize(("name", "parameters", "warpers"), shared_out(VARIANTS), ids=str)
def test_joint_law_is_the_targets(name, parameters, warpers):
    models, sampling = (
        table_pair(),
        Sampling(max_tokens=3, stop_token_ids=frozenset({2}), **warpers),
    )

    assert (
        law_error(
            lambda: build_strategy(name, parameters, table_resources()), models, [0, 1, 0], sampling
        )
        < 1e-6
    )


@pytest.mark.parametrize("ratio", [1.0, 4.0])
def test_spide_is_lossless_over_four_tokens_whatever_the_overlap(ratio):
    models, sampling = table_pair(vocab=2, seed=5), Sampling(max_tokens=4, temperature=1.0)

    assert (
        law_error(
            lambda: build_strategy(
                "spide", {"tau": 0.3, "max_draft": 4}, table_resources(2, ratio)
            ),
            models,
            [1],
            sampling,
        )
        < 1e-6
    )


CHEAP = HardwareProfile(0.02, {1: 1.0, 32: 1.0}, 0.0, ORIGIN, t_head=0.02)


def hybrid_law(drafter: str, warpers: dict) -> tuple[float, set[str]]:
    """Distance of hybrid's law from the target's on a text in which nothing repeats at first, and
    who drafted."""
    models, sampling = table_pair(vocab=3), Sampling(max_tokens=4, **warpers)
    drafted = set()

    class Watched(BestDrafter):
        def learn(self, draft, verdict):
            if len(draft):
                drafted.add(self.chosen.role if self.chosen else "look-up")
            super().learn(draft, verdict)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("draftwell.serving.runtime.strategies.lossless.hybrid.BestDrafter", Watched)
        law = joint_law(
            lambda: build_strategy(
                "hybrid",
                {"drafter": drafter, "max_draft": 2},
                table_resources(hardware_profile=CHEAP),
            ),
            models,
            [0],
            sampling,
        )
    return distance(law, true_law(models["target"], [0], sampling)), drafted


@pytest.mark.parametrize(
    "warpers",
    [{"temperature": 0.0}, {"temperature": 1.0}, {"temperature": 0.7, "top_k": 2}],
    ids=str,
)
@pytest.mark.parametrize("drafter", ["head", "draft", "auto"])
def test_hybrid_is_lossless_where_models_and_look_ups_take_turns(drafter, warpers):
    off, drafted = hybrid_law(drafter, warpers)
    assert off < 1e-6
    assert drafted
    if warpers["temperature"] == 1.0:  # at others all likely texts repeat themselves
        assert drafted == {"look-up", "head" if drafter == "auto" else drafter}


@pytest.mark.parametrize("drafter", ["head", "draft"])
def test_mutant_of_hybrid_that_judges_by_other_rows_than_a_draft_was_drawn_from_is_caught(
    monkeypatch, drafter
):
    """Without any rows it would still be exact, as any guess is that is judged as one."""
    right = Candidate.propose

    def confused(self, session, limit):
        draft = yield from right(self, session, limit)
        draft.rows = [span_of(torch.zeros(1, 3), session.sampling) for _ in draft.rows]
        draft.probs = []
        return draft

    monkeypatch.setattr(Candidate, "propose", confused)
    assert hybrid_law(drafter, {"temperature": 1.0})[0] > 1e-3


def test_every_lossless_strategy_is_enumerated():
    assert {n for n, s in STRATEGIES.items() if s.lossless} == {n for n, _ in VARIANTS}


def test_mutant_that_tests_the_first_continuation_token_twice_is_caught(monkeypatch):
    """SPIDE's line 33 read literally keeps x_{k+1} among the unverified tokens and tests it
    again."""

    monkeypatch.setattr("draftwell.serving.runtime.strategies.lossless.spide.Exact", Twice)
    models, sampling = table_pair(vocab=2, seed=5), Sampling(max_tokens=4, temperature=1.0)

    assert (
        law_error(
            lambda: build_strategy("spide", {"tau": 0.3, "max_draft": 4}, table_resources(2)),
            models,
            [1],
            sampling,
        )
        > 1e-3
    )


@pytest.mark.parametrize(
    ("name", "parameters"),
    [("vanilla_sd", {"num_speculative_tokens": 3}), ("prompt_lookup", {})],
    ids=str,
)
def test_mutant_whose_penalties_ignore_drafted_tokens_is_caught(monkeypatch, name, parameters):
    """Every target row counts the text alone, as though the draft before it were not there."""
    right = logits_module.adjusted
    monkeypatch.setattr(
        logits_module,
        "adjusted",
        lambda logits, sampling, changes: torch.cat(
            [
                right(
                    row[None],
                    sampling,
                    Penalties(sampling).follow(
                        changes.written[: max(0, len(changes.written) - len(logits) + 1)]
                    ),
                )
                for row in logits
            ]
        ),
    )
    models, sampling = table_pair(), Sampling(max_tokens=4, **PENALTIES[1])

    assert (
        law_error(
            lambda: build_strategy(name, parameters, table_resources()), models, [0, 1, 0], sampling
        )
        > 1e-3
    )


def test_mutant_that_drops_the_unlikely_last_token_is_caught(monkeypatch):
    """A draft that ends before a token because its own probability is low biases the output."""

    class Dropping(DraftModel):
        def propose(self, session, limit, pending=None):
            draft = yield from super().propose(session, limit, pending)
            if draft.tokens and float(draft.rows[-1].raw(0)[draft.tokens[-1]]) < 0.5:
                session.draft.rollback(len(session.text.ids) + len(draft) - 1)
                draft = draft[:-1]
            return draft

    monkeypatch.setattr(
        "draftwell.serving.runtime.strategies.lossless.draft_lengths.DraftModel", Dropping
    )
    models, sampling = table_pair(), Sampling(max_tokens=3, temperature=1.0)

    assert (
        law_error(
            lambda: build_strategy("vanilla_sd", {"num_speculative_tokens": 2}, table_resources()),
            models,
            [0],
            sampling,
        )
        > 1e-3
    )
