"""DuoDecoding: ranked candidates by enumeration, how many sequences there are, what is judged, and
the slots of branches."""

from __future__ import annotations

import pytest
import torch

from draftwell.serving.artifacts.hardware_profile import HardwareProfile
from draftwell.serving.runtime.acceptance.tree import Ranked
from draftwell.serving.runtime.drafting.multi_sequence import sequences_in
from draftwell.serving.runtime.engine.engine import Engine
from draftwell.serving.runtime.requests import Sampling
from draftwell.serving.runtime.session.stats import Stats
from draftwell.serving.runtime.strategies import build_strategy
from draftwell.serving.runtime.strategies.lossless.duo_decoding import divisible
from tests.support.errors import raises_code
from tests.support.models.counters import judged_positions
from tests.support.models.enumeration import Oracle, law_error
from tests.support.models.resources import ORIGIN, counting_pair, table_pair, table_resources
from tests.support.models.spans import decided, span_of
from tests.support.models.table_model import TableModel


def duo(gamma: int | None = 6, **settings):
    return build_strategy(
        "duo_decoding",
        settings | ({} if gamma is None else {"num_speculative_tokens": gamma}),
        table_resources(9),
    )


def law_of_a_choice(
    rule: Ranked, probs: list[float], candidates: list[int], **warpers
) -> list[float]:
    """Probability of every token that the rule ends with, by enumeration."""
    rows = span_of(torch.tensor([probs]).log(), Sampling(**{"temperature": 1.0, **warpers}))
    law, pending = [0.0] * len(probs), [[]]
    while pending:
        oracle = Oracle(pending.pop())
        choice = decided(rule.choose(candidates, 0, rows, oracle))
        assert choice.rank is None or candidates[choice.rank] == choice.token
        law[choice.token] += oracle.probability
        pending += oracle.open
    return law


@pytest.mark.parametrize("candidates", [[0, 1, 2], [3, 0, 4], [2], [4, 3, 2, 1, 0]], ids=str)
@pytest.mark.parametrize(
    "warpers",
    [{}, {"temperature": 0.7}, {"top_k": 2}, {"top_p": 0.6}, {"banned_token_ids": frozenset({0})}],
    ids=str,
)
def test_ranked_candidates_leave_the_targets_law_as_it_is(candidates, warpers):
    probs = [0.4, 0.25, 0.2, 0.1, 0.05]
    truth = (
        span_of(torch.tensor([probs]).log(), Sampling(**{"temperature": 1.0, **warpers}))
        .probs(0)
        .tolist()
    )
    assert law_of_a_choice(Ranked(), probs, candidates, **warpers) == pytest.approx(truth, abs=1e-6)


class NeverRenormalised(Ranked):
    """Algorithm 2 read literally: p is not renormalised between candidates."""

    def without(self, left, chance):
        return left


def test_three_candidates_without_renormalisation_are_caught(monkeypatch):
    probs = [0.4, 0.25, 0.2, 0.1, 0.05]
    assert law_of_a_choice(Ranked(), probs, [0, 1, 2]) == pytest.approx(probs, abs=1e-6)
    assert (
        max(
            abs(a - b)
            for a, b in zip(
                law_of_a_choice(NeverRenormalised(), probs, [0, 1, 2]), probs, strict=True
            )
        )
        > 0.02
    )
    monkeypatch.setattr(
        "draftwell.serving.runtime.strategies.lossless.duo_decoding.Ranked", NeverRenormalised
    )
    models, sampling = unsure_pair(), Sampling(max_tokens=3, temperature=1.0)
    assert law_error(duo, models, [0], sampling) > 1e-3


def unsure_pair(vocab: int = 4) -> dict:
    """A draft so unsure of its tokens that it starts three sequences or more."""
    return table_pair(vocab, seed=4, noise=0.3, sharpness=0.4)


@pytest.mark.parametrize(
    "warpers",
    [{"temperature": 1.0}, {"temperature": 0.7, "top_p": 0.8}, {"temperature": 0.0}],
    ids=str,
)
@pytest.mark.parametrize("gamma", [2, 3, 4, 6])
def test_several_sequences_leave_the_targets_law_as_it_is(gamma, warpers):
    """Four tokens, so that branches are taken, read on, and taken again; token 3 is a stop token
    and a candidate."""
    models, sampling = (
        unsure_pair(),
        Sampling(max_tokens=4, stop_token_ids=frozenset({3}), **warpers),
    )

    assert law_error(lambda: duo(gamma), models, [0], sampling) < 1e-6


def test_a_candidate_whose_rest_is_lost_to_rounding_is_sampled_all_the_same():
    """p(x) = 1 and a test that rejects: nothing is left, so p counts as it stood before."""

    class Rejects:
        def accepts(self, target_prob, draft_prob):
            return False

        def draw(self, probs):
            return int(probs.argmax())

    class Rng:
        test = sample = Rejects()

    rows = span_of(torch.tensor([[0.0, -200.0, -200.0]]), Sampling(temperature=1.0))
    choice = decided(Ranked().choose([0, 1, 2], 0, rows, Rng()))
    assert (choice.rank, choice.token) == (None, 0)


@pytest.mark.parametrize(
    ("chances", "theta", "budget", "expected"),
    [
        # five are unsure enough; 24 cannot be shared by five
        ([0.3, 0.2, 0.15, 0.12, 0.1, 0.01], 0.06, 24, 4),
        ([0.3, 0.2, 0.15], 0.3, 24, 1),  # p̄_(2,1) = 1: theta is p̄_(1,1), which nobody exceeds
        ([0.3, 0.3, 0.3], 0.29, 6, 3),
        ([0.2] * 5, 0.1, 7, 1),
        ([0.2] * 5, 0.1, 2, 2),
        ([0.2] * 5, 0.1, 1, 1),
        ([0.125] * 8, 0.01, 24, 8),
    ],
)
def test_the_number_of_sequences_is_rounded_down_to_a_divisor_of_the_budget(
    chances, theta, budget, expected
):
    assert sequences_in(chances, theta, budget) == expected


def test_a_draft_that_is_sure_of_its_second_token_makes_one_sequence():
    models = counting_pair(64)
    job = Engine(models).generate([0], Sampling(max_tokens=30), duo(6))
    assert len(models["draft"].slots.lengths) == models["draft"].slots.count
    assert job.output == list(range(1, 31))


def test_every_position_is_judged_once_when_all_is_kept(monkeypatch):
    """Leftovers by the exact rule, first tokens as candidates: together each position once, and
    nothing is sampled."""
    leftovers = judged_positions(monkeypatch)
    firsts: list[int] = []
    real = Ranked.choose

    def spy(self, candidates, row, target, rng):
        choice = yield from real(self, candidates, row, target, rng)
        firsts.extend(candidates[: choice.tested])
        return choice

    monkeypatch.setattr(Ranked, "choose", spy)
    job = Engine(counting_pair(64)).generate([0], Sampling(max_tokens=30), duo(4))
    assert sorted(leftovers + firsts) == job.output == list(range(1, 31))
    stats = job.session.stats
    assert (stats.judged, stats.accepted, stats.sampled) == (30, 30, 0)
    assert firsts == [1, *range(2, 31, 4)]  # one token in the prompt's round, then four a round
    assert stats.target_calls == len(firsts) + (0 if firsts[-1] == 30 else 1)


def ranked_pair() -> dict:
    """The target says 1 2 3 4 …; the draft likes 5 a little better than 1 behind 0, and is right
    from there on."""
    models = counting_pair(10)
    row = models["draft"].table[0]
    row[:] = -20.0
    row[5], row[1], row[7] = 1.0, 0.9, 0.5
    return models


def test_the_second_candidate_wins_and_its_other_tokens_are_the_leftover():
    models = ranked_pair()
    models["target"].table[9, 0], models["target"].table[9, 1] = 20.0, -20.0
    models["draft"].table[9, 0], models["draft"].table[9, 1] = 20.0, -20.0
    models["draft"].table[5] = -20.0
    # unsure behind 5: theta is low
    models["draft"].table[5, 6], models["draft"].table[5, 7] = 0.2, 0.0
    job = Engine(models).generate([9], Sampling(max_tokens=7), duo(6))
    assert job.output == [0, 1, 2, 3, 4, 5, 6]
    stats = job.session.stats
    # The prompt's round: 0. Then 5 6 | 1 2 | 7 8: 5 is tested and rejected, 1 wins and leaves 2
    # over. Then 2 is judged, and 3 of 3 4 5 6 (the text ends there), and at last 4 5 6.
    assert (stats.drafted, stats.judged, stats.accepted, stats.sampled, stats.target_calls) == (
        1 + 6 + 4,
        8,
        7,
        0,
        4,
    )


@pytest.mark.parametrize("stop", [1, 2, 3, 4, 5, 6])
def test_a_stop_token_ends_the_text_as_candidate_or_in_a_leftover(stop):
    sampling = Sampling(max_tokens=20, stop_token_ids=frozenset({stop}))
    job = Engine(counting_pair()).generate([0], sampling, duo(4))
    assert job.output == list(range(1, stop + 1))
    assert job.session.text.finish_reason == "stop"


@pytest.mark.parametrize("budget", [1, 2, 3, 5, 6, 7])
@pytest.mark.parametrize(
    "pair",
    [counting_pair, lambda: counting_pair(wrong_behind=2), ranked_pair],
    ids=["right", "wrong", "ranked"],
)
def test_budgets_are_kept_exactly(budget, pair):
    job = Engine(pair()).generate([0], Sampling(max_tokens=budget), duo(6))
    stats = job.session.stats
    assert job.output == [1, 2, 3, 4, 5, 6, 7][:budget]
    assert stats.emitted == stats.accepted + stats.sampled == budget
    assert job.session.text.finish_reason == "length"


def test_the_prompts_round_drafts_one_token_and_counts_as_a_call():
    job = Engine(counting_pair(64)).generate([0], Sampling(max_tokens=1), duo(6))
    stats = job.session.stats
    assert (
        stats.drafted,
        stats.judged,
        stats.accepted,
        stats.target_calls,
        stats.prefill_calls,
    ) == (1, 1, 1, 1, 1)


@pytest.mark.parametrize("slots", [1, 3])
def test_branches_never_take_a_requests_slot_and_all_come_back(slots):
    """As many requests as there are slots, each with branches: nobody waits for anybody, and each
    writes what it writes alone."""
    models = unsure_pair(9)
    models = {role: TableModel(model.table, slots=slots) for role, model in models.items()}
    engine = Engine(models)
    settings = [Sampling(max_tokens=25, temperature=1.0, seed=i) for i in range(slots)]
    jobs = [engine.submit([i + 1], s, duo(8)) for i, s in enumerate(settings)]
    engine.run(jobs)
    draft = models["draft"].slots
    assert draft.count == slots < len(draft.lengths)
    assert len(draft._free) == slots
    assert len(draft._free_branches) == len(draft.lengths) - slots <= 7 * slots
    for i, s in enumerate(settings):
        assert Engine(unsure_pair(9)).generate([i + 1], s, duo(8)).output == jobs[i].output


def test_a_cancelled_request_gives_its_branches_back():
    engine = Engine(unsure_pair(9))
    job = engine.submit([1], Sampling(max_tokens=60), duo(8))
    draft = engine.models["draft"].slots
    while len(draft.lengths) == draft.count:
        engine.step()
    engine.cancel(job)
    assert len(draft._free_branches) == len(draft.lengths) - draft.count
    assert len(draft._free) == draft.count


def test_the_budget_is_measured_and_an_onnx_draft_has_a_measure_of_its_own(tmp_path):
    profile = HardwareProfile(1.0, {1: 4.0}, 0.1, ORIGIN, (2.0, {1: 9.0}), t_draft_onnx=1.5)
    profile.save(tmp_path / "p")
    read = HardwareProfile.load(tmp_path / "p")
    assert read.t_draft_onnx == 1.5
    strategy = build_strategy("duo_decoding", {}, table_resources(hardware_profile=read))
    assert (strategy.lengths(), strategy.lengths(onnx_draft=True)) == ((4, 4), (6, 6))
    older = HardwareProfile(1.0, {1: 4.4}, 0.1, ORIGIN)
    older.save(tmp_path / "older")
    assert "onnx" not in (tmp_path / "older" / "profile.json").read_text()
    strategy = build_strategy(
        "duo_decoding",
        {},
        table_resources(hardware_profile=HardwareProfile.load(tmp_path / "older")),
    )
    assert strategy.lengths() == strategy.lengths(onnx_draft=True) == (4, 4)
    assert build_strategy("duo_decoding", {}, table_resources(ratio=0.2)).lengths() == (1, 1)


def test_it_takes_the_draft_in_onnx_runtime_where_there_is_one_and_no_other_strategy_does():
    models = {**table_pair(), "draft_onnx": object()}
    assert duo().choose_models(models)["draft"] is models["draft_onnx"]
    assert (
        build_strategy("pearl", {}, table_resources()).choose_models(models)["draft"]
        is models["draft"]
    )
    assert duo().choose_models(table_pair()).keys() == {"target", "draft"}


@pytest.mark.parametrize("gamma", [6, 7])
@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_a_static_number_of_sequences_does_not_depend_on_the_draft(gamma, count):
    """A draft that is sure of its tokens starts one sequence, but not where the number is set; no
    number need divide the budget."""
    models = counting_pair(64)
    job = Engine(models).generate(
        [0], Sampling(max_tokens=30), duo(gamma, max_sequences=count, static_sequences=True)
    )
    assert job.output == list(range(1, 31))
    assert set(job.session.stats.sequences) == {(count, True)}
    rounds = job.session.stats.sequences.total()
    assert rounds * count * (gamma // count) >= job.session.stats.drafted - 1, (
        "the prompt's round drafts one token"
    )


def test_rounds_are_counted_by_their_number_of_sequences():
    """As Table 4 counts them: several where the draft is unsure, and whether its first choice was
    kept."""
    jobs = [
        Engine(unsure_pair(8)).generate(
            [seed], Sampling(max_tokens=60, temperature=1.0, seed=seed), duo(6)
        )
        for seed in range(4)
    ]
    counted = Stats.total(job.session.stats for job in jobs).sequences
    assert {count > 1 for count, _ in counted} == {True, False}
    assert {kept for _, kept in counted} == {True, False}


@pytest.mark.parametrize(("offset", "gamma"), [(-16, 1), (-1, 2), (0, 3), (3, 6)])
def test_an_offset_is_added_to_the_measured_budget(offset, gamma):
    assert duo(None, budget_offset=offset).lengths() == (gamma, gamma)


def measured(t_verify: dict[int, float], t_draft: float = 1.0, **settings):
    """DuoDecoding on a machine whose passes take so long."""
    profile = HardwareProfile(t_draft, t_verify, 0.1, ORIGIN, (t_draft, t_verify))
    return build_strategy("duo_decoding", settings, table_resources(hardware_profile=profile))


def test_a_measured_budget_can_be_shared_by_several_sequences():
    """31 draft passes in a target pass: a budget of 31, a prime, would have one sequence for
    ever."""
    assert measured({1: 31.0}).lengths() == (30, 30)
    assert measured({1: 100.0}).lengths() == (64, 64)
    assert measured({1: 17.0}).lengths() == (16, 16)
    assert all(sequences_in([0.1] * 8, 0.0, divisible(gamma)) > 1 for gamma in range(2, 65))
    assert duo(31).lengths() == (31, 31), "one that is set stays"


@pytest.mark.parametrize(
    ("t_verify", "longest"),
    [
        # a processor: a pass over more than eight rows computes longer than it reads weights
        ({1: 40.0, 8: 44.0, 16: 80.0, 32: 140.0}, 8),
        # a GPU: all sizes that were measured take one pass
        ({1: 40.0, 8: 40.1, 16: 41.0, 32: 43.0}, 40),
        ({1: 40.0, 2: 60.0, 4: 110.0}, 1),
        # one size that was timed while something else ran
        ({1: 40.0, 2: 60.0, 4: 41.0, 8: 90.0}, 4),
    ],
)
def test_no_sequence_is_longer_than_a_pass_verifies_at_once(t_verify, longest):
    assert measured(t_verify).lengths() == (40, longest)
    assert measured(t_verify, budget_offset=2).lengths() == (42, longest + 2)


def test_a_long_budget_is_drafted_in_short_sequences():
    models = counting_pair(64)
    strategy = measured({1: 24.0, 4: 26.0, 8: 48.0}, max_sequences=2, static_sequences=True)
    job = Engine(models).generate([0], Sampling(max_tokens=30), strategy)
    assert job.output == list(range(1, 31))
    stats = job.session.stats
    # One token of the prompt's round, then two sequences of four tokens, not of twelve, a round: a
    # call makes four tokens final.
    assert stats.target_calls == 1 + 8
    assert stats.drafted <= 1 + 8 * 2 * 4


def test_an_offset_to_a_budget_that_is_set_is_refused():
    with raises_code("bad_parameter", "leave num_speculative_tokens out"):
        duo(5, budget_offset=1)
