"""Outputs under a grammar: the law is the target's under the mask, for every strategy; masks follow
what is drafted and rejected."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

from draftwell.serving.errors import InvalidRequest
from draftwell.serving.runtime.engine.engine import Engine
from draftwell.serving.runtime.grammar import masks as module
from draftwell.serving.runtime.grammar.masks import GrammarMasks
from draftwell.serving.runtime.penalties import Penalties
from draftwell.serving.runtime.requests import Sampling
from draftwell.serving.runtime.strategies import STRATEGIES, build_strategy
from tests.support.cases import in_turn
from tests.support.models.enumeration import law_error
from tests.support.models.finite_grammar import FiniteGrammar, FiniteMatcher
from tests.support.models.resources import NEEDED, decode, table_pair, table_resources
from tests.support.models.spans import all_rows
from tests.support.models.variants import VARIANTS

STOP = 2
PARITY = FiniteGrammar([{0: 0, 1: 1}, {0: 1, 1: 0, STOP: -1}], vocab_size=3)
"""An odd number of 1s, then the end."""
SPELT = FiniteGrammar([{1: 1}, {0: 2, 1: 4}, {0: 3}, {1: 4}, {STOP: -1, 0: 1}], vocab_size=3)
"""1 1, or 1 0 0 1 in which nothing is left to choose after 1 0; then the end, or a 0 and the same
again."""
WARPERS = [
    {"temperature": 0.0},
    {"temperature": 1.0},
    {"temperature": 0.7, "top_k": 2},
    {"temperature": 1.0, "min_tokens": 2},
    {"temperature": 1.0, "frequency_penalty": 0.9, "logit_bias": {1: 1.5}},
]


def off(
    name: str, parameters: Any, grammar: FiniteGrammar, max_tokens: int = 4, **warpers: Any
) -> float:
    """Distance of a strategy's law from the target's under the mask."""
    models = table_pair()
    sampling = Sampling(
        max_tokens=max_tokens, stop_token_ids=frozenset({STOP}), grammar=grammar, **warpers
    )

    return law_error(
        lambda: build_strategy(name, parameters, table_resources()), models, [0, 1, 0], sampling
    )


@pytest.mark.parametrize("grammar", [PARITY, SPELT], ids=["parity", "spelt"])
@pytest.mark.parametrize(("name", "parameters", "warpers"), in_turn(VARIANTS, WARPERS), ids=str)
def test_the_joint_law_is_the_targets_under_the_mask(
    name: str, parameters: Any, grammar: FiniteGrammar, warpers: Any
) -> None:
    assert off(name, parameters, grammar, 3 if warpers["temperature"] else 6, **warpers) < 1e-6


@pytest.mark.parametrize(
    "warpers",
    [
        {"temperature": 1.0},
        {"temperature": 0.0, "min_tokens": 6},
        {"temperature": 1.0, "min_tokens": 6},
    ],
    ids=str,
)
@pytest.mark.parametrize("name", ["autoregressive", "vanilla_sd", "prompt_lookup"])
def test_forced_tokens_and_an_early_end_keep_the_law(name: str, warpers: Any) -> None:
    """Longer texts, in which forced tokens are drafted, and an end that `min_tokens` cannot put
    off."""
    once = FiniteGrammar([*SPELT.states[:4], {STOP: -1}], vocab_size=3)
    for grammar in (SPELT, once):
        assert off(name, {}, grammar, 6, **warpers) < 1e-6


class Deaf(GrammarMasks):
    """Masks every row by the text alone, as though nothing had been drafted after it."""

    def masks(self, written: Any, rows: int) -> Any:
        return super().masks(written[: max(0, len(written) - rows + 1)], 1) * rows


@pytest.mark.parametrize(
    ("name", "parameters"),
    [("vanilla_sd", {"num_speculative_tokens": 3}), ("prompt_lookup", {})],
    ids=str,
)
def test_mutant_that_does_not_follow_the_draft_is_caught(
    monkeypatch: pytest.MonkeyPatch, name: str, parameters: Any
) -> None:
    monkeypatch.setattr("draftwell.serving.runtime.session.session.GrammarMasks", Deaf)
    assert off(name, parameters, PARITY, temperature=1.0) > 1e-3


def test_mutant_that_forgets_to_roll_back_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FiniteMatcher, "rollback", lambda self, count: None)
    assert off("vanilla_sd", {"num_speculative_tokens": 3}, PARITY, temperature=1.0) > 1e-3


def odd(output: list[int]) -> bool:
    return output.count(1) % 2 == 1


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("name", sorted(STRATEGIES))
def test_no_strategy_breaks_the_grammar_lossy_ones_included(name: str, temperature: float) -> None:
    """SPRINTER keeps draft tokens without asking the target; others keep what the exact rule
    rejects."""
    states = [
        {token: int(token == 1) ^ state for token in range(8) if token != STOP} for state in (0, 1)
    ]
    states[1][STOP] = -1
    grammar = FiniteGrammar(states, vocab_size=8)
    for seed in range(6):
        sampling = Sampling(
            max_tokens=24,
            temperature=temperature,
            seed=seed,
            stop_token_ids=frozenset({STOP}),
            grammar=grammar,
            logit_bias={STOP: 3.0},
        )
        strategy = build_strategy(name, NEEDED.get(name, {}), table_resources(8))
        text = (
            Engine(table_pair(vocab=8, seed=seed))
            .generate([1, seed], sampling, strategy)
            .session.text
        )
        assert text.finish_reason == "length" or odd(text.output[:-1])
        if STRATEGIES[name].lossless and temperature == 0.0:
            plain = Engine(table_pair(vocab=8, seed=seed)).generate(
                [1, seed], sampling, build_strategy("autoregressive")
            )
            assert text.output == plain.output


def plainly(written: list[int], rows: int, grammar: FiniteGrammar) -> list[list[bool] | None]:
    """Each row by itself, by a matcher of its own."""
    found: list[list[bool] | None] = []
    for length in range(len(written) - rows + 1, len(written) + 1):
        matcher = grammar.matcher()
        followed = length >= 0 and all(
            token != STOP and matcher.accept(token) for token in written[:length]
        )
        found.append(matcher.allowed().tolist() if followed else None)
    return found


@settings(max_examples=80)
@given(
    st.lists(
        st.tuples(st.integers(0, 6), st.lists(st.integers(0, 2), max_size=6), st.integers(1, 5)),
        min_size=1,
        max_size=8,
    ),
    st.sampled_from([PARITY, SPELT]),
)
def test_masks_equal_those_of_a_fresh_matcher_at_every_pass(
    steps: Any, grammar: FiniteGrammar
) -> None:
    """A step takes tokens back (rejected), adds others, which may break the grammar, and asks for
    some rows."""
    kept, written = GrammarMasks(grammar, frozenset({STOP})), list[int]()
    for back, more, rows in steps:
        written = written[: max(0, len(written) - back)] + more
        assert [None if m is None else m.tolist() for m in kept.masks(written, rows)] == plainly(
            written, rows, grammar
        )
        kept.forced(written)  # changes nothing


def test_more_positions_than_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "REMEMBERED", 3)
    kept, written = GrammarMasks(PARITY, frozenset({STOP})), [0, 1, 1, 0, 1, 0]
    for rows in (1, 2, 7, 7, 3):
        assert [m.tolist() for m in kept.masks(written, rows) if m is not None] == plainly(
            written, rows, PARITY
        )


def test_forced_tokens_end_with_the_end() -> None:
    once = GrammarMasks(
        FiniteGrammar([{1: 1, 0: 1}, {0: 2}, {1: 3}, {STOP: -1}], vocab_size=3), frozenset({STOP})
    )
    assert [once.forced([]), once.forced([1]), once.forced([1, 0, 1]), once.forced([1, 1])] == [
        [],
        [0, 1, STOP],
        [STOP],
        [],
    ]


def test_asking_for_forced_tokens_costs_no_mask_that_the_pass_after_it_does_not_need(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    right, made = FiniteMatcher.allowed, list[int]()
    monkeypatch.setattr(FiniteMatcher, "allowed", lambda self: made.append(1) or right(self))
    for written, forced in (([0], []), ([1], [0, 1, STOP])):
        masks = GrammarMasks(
            FiniteGrammar([{1: 1, 0: 4}, {0: 2}, {1: 3}, {STOP: -1}, {0: 4, 1: 4}], vocab_size=3),
            frozenset({STOP}),
        )
        made.clear()
        assert masks.forced(written) == forced
        draft = forced[:-1]
        masks.masks([*written, *draft], len(draft) + 1)
        assert len(made) == len(draft) + 1


def test_forced_tokens_save_passes_of_the_target_and_are_not_counted_as_the_strategys() -> None:
    grammar = FiniteGrammar(
        [{token: token + 1} for token in range(20)] + [{2 + 20: -1}], vocab_size=24
    )
    asked = {"max_tokens": 40, "stop_token_ids": frozenset({22}), "grammar": grammar}
    models = table_pair(vocab=24)
    plain = decode(models, [1], "autoregressive", **asked, draft_forced=False)
    job = decode(models, [1], "autoregressive", **asked)
    assert job.output == plain.output == [*range(20), 22]
    assert (plain.session.stats.target_calls, plain.session.stats.forced) == (20, 0)
    stats = job.session.stats
    assert stats.target_calls == 1
    assert (
        stats.forced,
        stats.forced_accepted,
        stats.own.drafted,
        stats.own.accepted,
        stats.own.rounds,
    ) == (20, 20, 0, 0, 0)


def test_a_draft_that_knows_none_of_the_allowed_tokens_is_left_as_it_is() -> None:
    """A distilled draft's head covers a part of the vocabulary; its token is rejected then."""
    sampling = Sampling(grammar=FiniteGrammar([{1: 0}], vocab_size=3))
    assert sampling.grammar is not None
    output = all_rows(torch.tensor([[2.0, 1.0]]), support=torch.tensor([0, 2]), vocab_size=3)
    draft = Penalties(sampling, (), GrammarMasks(sampling.grammar), spare=True)
    assert output.under(sampling, draft).top == [0]
    known = all_rows(torch.tensor([[2.0, 1.0]]), support=torch.tensor([0, 1]), vocab_size=3)
    assert known.under(sampling, draft).top == [1]


def test_raw_distributions_know_of_the_grammar_as_they_do_of_bans() -> None:
    sampling = Sampling(grammar=FiniteGrammar([{1: 0, 2: 0}], vocab_size=3), logit_bias={0: 9.0})
    assert sampling.grammar is not None
    rows = all_rows(torch.zeros(1, 3)).under(
        sampling, Penalties(sampling, (), GrammarMasks(sampling.grammar))
    )
    assert rows.raw(0).tolist() == [0.0, 0.5, 0.5]
    assert rows.probs(0).tolist() in ([0.0, 1.0, 0.0], [0.0, 0.0, 1.0])


def test_a_matcher_that_refuses_what_it_allowed_frees_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(FiniteMatcher, "accept", lambda self, token: False)
    with pytest.raises(InvalidRequest, match="how to go on"):
        decode(
            table_pair(), [1], "autoregressive", max_tokens=5, grammar=PARITY, draft_forced=False
        )


class Refusing(FiniteMatcher):
    def allowed(self) -> Any:
        if len(self._path) > 4:
            raise InvalidRequest("too complex")
        return super().allowed()


def test_an_error_of_the_matcher_ends_its_own_request_only(monkeypatch: pytest.MonkeyPatch) -> None:
    class Complex(FiniteGrammar):
        def matcher(self) -> Any:
            return Refusing(self)

    engine = Engine(table_pair())
    jobs = [
        engine.submit([1], Sampling(max_tokens=12, grammar=grammar), build_strategy("vanilla_sd"))
        for grammar in (
            Complex([{0: 0, 1: 0}], vocab_size=3),
            FiniteGrammar([{0: 0, 1: 0}], vocab_size=3),
        )
    ]
    with pytest.raises(InvalidRequest):
        engine.run(jobs)
    engine.run(jobs[1:])
    assert len(jobs[1].output) == 12
    assert np.all(np.array(jobs[1].output) < 2)


class Slow(FiniteMatcher):
    """Takes a hundredth of a second for each mask."""

    def allowed(self) -> Any:
        until = time.thread_time() + 0.01
        while time.thread_time() < until:
            pass
        return super().allowed()


def test_a_grammar_whose_masks_take_too_long_ends_its_own_request_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By what it takes of the processor: a machine that others keep busy ends nothing."""

    class Costly(FiniteGrammar):
        def matcher(self) -> Any:
            return Slow(self)

    monkeypatch.setattr(module, "FREE_SECONDS", 0.05)
    monkeypatch.setattr(module, "TOKEN_SECONDS", 0.002)
    engine = Engine(table_pair())
    costly, cheap = (
        engine.submit([1], Sampling(max_tokens=40, grammar=grammar), build_strategy("vanilla_sd"))
        for grammar in (
            Costly([{0: 0, 1: 0}], vocab_size=3),
            FiniteGrammar([{0: 0, 1: 0}], vocab_size=3),
        )
    )
    while engine.jobs:
        engine.step()
    assert isinstance(costly.error, InvalidRequest)
    assert costly.error.code == "invalid_grammar"
    assert len(costly.output) < 20
    assert (cheap.error, len(cheap.output)) == (None, 40)
