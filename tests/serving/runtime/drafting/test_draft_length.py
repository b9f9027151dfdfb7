"""Draft-length baselines: what stops a draft, that what triggers stays, and how thresholds move."""

from __future__ import annotations

import math

import pytest
import torch

from draftwell.serving.artifacts.acceptance_head import AcceptanceHead
from draftwell.serving.artifacts.acceptance_table import AcceptanceTable
from draftwell.serving.artifacts.verifier import Verifier
from draftwell.serving.runtime.drafting.adaptive import AdaptiveThreshold, HeuristicLength
from draftwell.serving.runtime.drafting.expected_gain import RoundCosts, WorthDrafting
from draftwell.serving.runtime.drafting.stopping import (
    CumulativeAcceptance,
    FixedLength,
    HighEntropy,
    LowAcceptanceBound,
    PredictedRejection,
    UnlikelyToken,
    Untrusted,
)
from draftwell.serving.runtime.engine.engine import Engine
from draftwell.serving.runtime.logits import Span
from draftwell.serving.runtime.requests import Sampling
from draftwell.serving.runtime.session.session import UNLIMITED
from draftwell.serving.runtime.strategies import (
    STRATEGIES,
    StrategyResources,
    build_strategy,
    describe,
)
from draftwell.serving.runtime.types import Draft, Verdict
from tests.support.errors import raises_code
from tests.support.models.enumeration import law_error
from tests.support.models.resources import (
    NEEDED,
    ORIGIN,
    counting_pair,
    decode,
    random_head,
    table_pair,
    table_resources,
)
from tests.support.models.spans import span_of
from tests.support.models.table_model import TableModel

LONG = [
    ("svip", {"max_draft": 3}, 5),
    ("draft_verify", {"threshold": 0.6, "max_draft": 3}, 1),
    ("adaedl", {"threshold": 0.64, "max_draft": 3}, 1),
    ("specdec_pp", {"threshold": 0.6}, 5),
    ("hf_dynamic", {"threshold": 0.6}, 1),
    ("hf_dynamic", {"threshold": 0.6, "heuristic": True}, 5),
]


@pytest.mark.parametrize(("name", "parameters", "seed"), LONG, ids=str)
def test_five_tokens_follow_the_target(name, parameters, seed):
    models, sampling = table_pair(vocab=2, seed=seed), Sampling(max_tokens=5, temperature=1.0)
    lengths: list[int] = []

    assert (
        law_error(
            lambda: watched(build_strategy(name, parameters, table_resources(2)), lengths),
            models,
            [1],
            sampling,
        )
        < 1e-6
    )
    assert len(set(lengths)) > 2, "drafts of several lengths, or the test proves little"


def watched(strategy, lengths):
    """The same strategy; every draft's length is noted."""
    run = strategy.run

    def noting(session):
        count = session.stats.count

        def counted(draft, verdict):
            lengths.append(len(draft))
            count(draft, verdict)

        session.stats.count = counted
        yield from run(session)

    strategy.run = noting
    return strategy


def flat_pair(vocab: int = 8) -> dict:
    """A draft that knows nothing: its distribution is uniform, but for a trace of preference for
    token 3."""
    draft = torch.zeros(vocab, vocab)
    draft[:, 3] = 1e-3
    return {"target": TableModel(counting_pair(vocab)["target"].table), "draft": TableModel(draft)}


BY_ROWS = [
    ("svip", {}, 40, 1),
    ("draft_verify", {}, 8, 1),
    ("adaedl", {"threshold": 0.5, "max_draft": 8}, 8, 0),
    ("hf_dynamic", {}, 20, 1),
]
"""Strategies whose drafts the draft's own rows end, with settings, the longest draft, and the
length behind a uniform distribution."""
by_rows = pytest.mark.parametrize(("name", "parameters", "longest", "drafted"), BY_ROWS)


@by_rows
def test_the_trigger_stays_and_stop_before_draws_nothing(name, parameters, longest, drafted):
    """Behind a uniform distribution every rule stops at once: behind the token, or before it is
    drawn."""
    lengths: list[int] = []
    strategy = watched(build_strategy(name, parameters, table_resources(8)), lengths)
    job = Engine(flat_pair()).generate([0], Sampling(max_tokens=8), strategy)
    assert job.output == [1, 2, 3, 4, 5, 6, 7, 0]
    budget = job.session.stats.rounds if drafted else job.session.stats.target_calls
    assert lengths[:budget] == [drafted] * budget
    assert job.session.stats.drafted == drafted * budget


@by_rows
def test_a_certain_draft_runs_to_the_cap(name, parameters, longest, drafted):
    lengths: list[int] = []
    strategy = watched(build_strategy(name, parameters, table_resources(8)), lengths)
    Engine(counting_pair(64)).generate([0], Sampling(max_tokens=90), strategy)
    assert lengths[0] == max(lengths) == longest


@by_rows
def test_greedy_drafts_stay_below_the_cap(name, parameters, longest, drafted):
    """A warped row is one-hot at temperature 0: a rule that read it would draft to its cap every
    time."""
    job = decode(
        table_pair(vocab=8, noise=0.2), [1], name, parameters, table_resources(8), max_tokens=120
    )
    stats = job.session.stats
    assert 0 < stats.drafted / stats.rounds < 0.6 * longest


def one_row(*probs: float, hidden: torch.Tensor | None = None) -> Span:
    return span_of(torch.tensor([probs]).log(), Sampling(temperature=1.0), hidden)


def test_the_formulas_by_hand():
    row = one_row(0.5, 0.25, 0.25)
    entropy = 1.5 * math.log(2)  # 1.0397
    assert row.entropy(0) == pytest.approx(entropy)
    bound = math.sqrt(0.15 * entropy)  # .3949
    for threshold, stops in ((bound + 1e-3, False), (bound - 1e-3, True)):
        policy = HighEntropy(threshold, 40, 0.15)
        policy.start()
        assert (policy.stop_before(row), policy.stop_after(row, 2)) == (False, stops)
    bound = 1 - math.sqrt(0.2 * entropy)  # .5440
    for threshold, stops in ((bound - 1e-3, False), (bound + 1e-3, True)):
        policy = LowAcceptanceBound(threshold, 40, 0.2)
        policy.start()
        assert (policy.stop_before(row), policy.stop_after(row, 0)) == (stops, False)
    policy = UnlikelyToken(0.4, 40)
    policy.start()
    assert [policy.stop_after(row, token) for token in (0, 1, 2)] == [False, True, True]


def constant_head(acceptance: float, width: int = 64) -> AcceptanceHead:
    logit = math.log(acceptance / (1 - acceptance))
    return AcceptanceHead(
        torch.zeros(width), torch.ones(width), [], torch.zeros(width), logit, ORIGIN
    )


POLICIES = [
    FixedLength(6),
    CumulativeAcceptance(AcceptanceTable.empty(), 0.3, 6),
    HighEntropy(0.35, 6, 0.15),
    UnlikelyToken(0.65, 6),
    LowAcceptanceBound(0.5, 6, 0.2),
    PredictedRejection(constant_head(0.8), 0.5, 1, 6),
    Untrusted(Verifier(torch.zeros(64), 0.0, ("before",), 0.4, 1.0, ORIGIN), None, 6),
    WorthDrafting(
        RoundCosts([1.0 + 0.1 * k for k in range(8)], 0.1), AcceptanceTable.empty(), 0.5, 6
    ),
]


@pytest.mark.parametrize("policy", POLICIES, ids=lambda policy: type(policy).__name__)
def test_every_draft_of_a_policy_begins_anew(policy):
    """What it sums up over a draft is reset in `start`: the same rows give the same length."""
    sure = (0.9, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4)
    rows = [one_row(p, (1 - p) / 2, (1 - p) / 2, hidden=torch.zeros(1, 64)) for p in sure]

    def length():
        policy.start()
        for drafted, row in enumerate(rows):
            if policy.stop_before(row):
                return drafted
            if policy.stop_after(row, 0):
                return drafted + 1

    lengths = [length() for _ in range(3)]
    assert lengths == lengths[:1] * 3
    assert 1 < lengths[0] <= 6


def test_every_policy_is_among_those_that_begin_anew():
    def below(policy):
        return {policy}.union(*map(below, policy.__subclasses__()))

    assert {type(policy) for policy in POLICIES} == below(FixedLength)


@pytest.mark.parametrize(
    ("acceptance", "parameters", "length"),
    [
        # 1 − .8 = .2 behind the first token, 1 − .64 = .36 > .3 behind the second, and the third is
        # drawn by then
        (0.8, {}, 3),
        (0.69, {}, 2),
        (0.1, {}, 2),
        (0.1, {"min_draft": 5}, 5),
        (0.1, {"min_draft": 1}, 2),
        (0.99, {}, 20),
        (0.8, {"threshold": 0.5}, 5),
    ],
)
def test_lengths_that_a_constant_prediction_gives(acceptance, parameters, length):
    """The first prediction comes with the second token: the state that has read token 1 also gives
    token 2."""
    lengths: list[int] = []
    resources = table_resources(64, acceptance_head=constant_head(acceptance))
    Engine(counting_pair(64)).generate(
        [0],
        Sampling(max_tokens=50),
        watched(build_strategy("specdec_pp", parameters, resources), lengths),
    )
    assert lengths[0] == max(lengths) == length


def test_the_head_reads_the_state_behind_each_drafted_token_once():
    seen: list[int] = []

    class Spy(AcceptanceHead):
        def acceptance(self, state):
            # a table's state is its logits: the token that comes next
            seen.append(int(state.argmax()))
            return 0.99

    width = 64
    spy = Spy(torch.zeros(width), torch.ones(width), [], torch.zeros(width), 0.0, ORIGIN)
    decode(
        counting_pair(width),
        [0],
        "specdec_pp",
        {},
        table_resources(64, acceptance_head=spy),
        max_tokens=6,
    )
    # Text 1; draft 2, 3, 4, 5: the states that have read 2, 3 and 4 put 3, 4 and 5.
    assert seen == [3, 4, 5]


def test_a_head_for_other_states_is_refused_in_a_line():
    resources = table_resources(8, acceptance_head=random_head(5))
    with raises_code("state_size_differs", "5 numbers", "8") as error:
        decode(table_pair(vocab=8), [1], "specdec_pp", {}, resources, max_tokens=8)
    assert "\n" not in str(error.value)
    with raises_code("artifact_missing", "draftwell step train --kind acceptance_head"):
        decode(table_pair(vocab=8), [1], "specdec_pp", {}, StrategyResources(), max_tokens=8)


def round_of(drafted: int, accepted: int) -> tuple[Draft, Verdict]:
    return Draft([0] * drafted), Verdict(accepted, 1, min(drafted, accepted + 1))


def test_the_adaptive_threshold_by_hand():
    threshold = AdaptiveThreshold(0.8, max_draft=8)
    trace = []
    for drafted, accepted in ((4, 4), (8, 8), (2, 2), (8, 8), (3, 3), (0, 0), (4, 1)):
        threshold.learn(*round_of(drafted, accepted))
        trace.append((round(threshold.rate, 5), round(threshold.value, 6)))
    assert trace == [
        (0.5, 0.801),
        (0.75, 0.802),
        (0.875, 0.803),  # below .9: th + .01, a tenth of it at once
        (0.9375, 0.803),  # as long as it may be: stays
        (0.96875, 0.802),  # shorter: th − .01
        (0.96875, 0.802),  # nothing drafted, nothing learnt
        (0.60938, 0.803),
    ]
    high, low = AdaptiveThreshold(1.0, max_draft=8), AdaptiveThreshold(0.0, max_draft=8)
    high.learn(*round_of(4, 0))
    low.resume({"value": 0.0, "rate": 1.0})
    low.learn(*round_of(4, 4))
    assert (high.value, low.value) == (1.0, 0.0)


def test_the_heuristic_length_by_hand():
    length, trace = HeuristicLength(5, max_draft=10), []
    for drafted, accepted in ((5, 5), (7, 7), (9, 9), (10, 10), (4, 3), (0, 0), (9, 0)):
        length.learn(*round_of(drafted, accepted))
        trace.append(length.value)
    assert trace == [7, 9, 10, 10, 9, 9, 8]
    for _ in range(20):
        length.learn(*round_of(8, 0))
    assert length.value == 1


def values_learnt(monkeypatch, cls) -> list[float]:
    """What a rule's value is behind every round."""
    values: list[float] = []
    learn = cls.learn

    def spy(self, draft, verdict):
        learn(self, draft, verdict)
        values.append(round(self.value, 6))

    monkeypatch.setattr(cls, "learn", spy)
    return values


STATEFUL = [
    ("draft_verify", {}, AdaptiveThreshold),
    ("adaedl", {"threshold": 0.4, "max_draft": 8}, AdaptiveThreshold),
    ("hf_dynamic", {"heuristic": True}, HeuristicLength),
]


@pytest.mark.parametrize(("name", "parameters", "rule"), STATEFUL, ids=str)
@pytest.mark.parametrize("deterministic", [True, False])
def test_state_begins_anew_where_it_must(monkeypatch, name, parameters, rule, deterministic):
    """draft_verify with every request; the others are shared, but for deterministic mode
    (docs/methods.md, "State")."""
    values = values_learnt(monkeypatch, rule)
    strategy = build_strategy(
        name,
        parameters,
        StrategyResources(table_resources(8).artifacts, deterministic=deterministic),
    )
    runs = []
    for _ in range(2):
        values.clear()
        Engine(table_pair(vocab=8, noise=0.2)).generate([1], Sampling(max_tokens=40), strategy)
        runs.append(list(values))
    assert len(set(runs[0])) > 1, "nothing was learnt, so the test proves nothing"
    assert (runs[0] == runs[1]) == (deterministic or name == "draft_verify")


@pytest.mark.parametrize(
    ("name", "parameters", "rule"),
    [
        ("draft_verify", {"threshold": 0.0}, AdaptiveThreshold),
        ("adaedl", {"threshold": 0.0, "max_draft": 8}, AdaptiveThreshold),
        ("hf_dynamic", {"threshold": 0.0, "heuristic": True}, HeuristicLength),
    ],
    ids=str,
)
@pytest.mark.parametrize(
    ("limit", "learns"), [(0, False), (1, False), (3, False), (UNLIMITED, True)]
)
def test_drafts_that_a_limit_cut_teach_nothing(monkeypatch, name, parameters, rule, limit, learns):
    """The policy would have gone on: the length is the limit's, and so is the share that was
    kept."""
    values = values_learnt(monkeypatch, rule)
    engine = Engine(table_pair(vocab=8, noise=0.2))
    job = engine.submit(
        [1], Sampling(max_tokens=40), build_strategy(name, parameters, table_resources(8)), limit
    )
    engine.run([job])
    assert (len(set(values)) > 1) == learns


def test_a_draft_that_its_policy_ended_below_the_limit_is_learnt_from(monkeypatch):
    values = values_learnt(monkeypatch, AdaptiveThreshold)
    engine = Engine(table_pair(vocab=8, noise=0.2))
    engine.run(
        [
            engine.submit(
                [1],
                Sampling(max_tokens=40),
                build_strategy("draft_verify", {"max_draft": 2}, table_resources(8)),
                3,
            )
        ]
    )
    assert len(set(values)) > 1


@pytest.mark.parametrize("deterministic", [False, True])
def test_a_shared_threshold_ends_drafting_where_every_draft_is_wrong(deterministic):
    """adaedl's limit as PAPERS.md has it: it rises with every rejection, and where nothing is
    drafted nothing lowers it again."""
    target = TableModel.random(8, 0)
    # as sure everywhere
    wrong = torch.zeros_like(target.table).scatter(-1, target.table.argmin(-1, keepdim=True), 3.0)
    probs = torch.softmax(torch.tensor([3.0] + [0.0] * 7), 0)
    bound = 1 - math.sqrt(0.2 * -float((probs * probs.log()).sum()))
    strategy = build_strategy(
        "adaedl",
        {"threshold": bound - 0.0995, "max_draft": 4},
        StrategyResources(deterministic=deterministic),
    )
    drafted, values = [], []
    for i in range(4):
        stats = (
            Engine({"target": target, "draft": TableModel(wrong)})
            .generate([i], Sampling(max_tokens=60), strategy)
            .session.stats
        )
        assert stats.accepted == 0
        drafted.append(stats.drafted > 0)
        values.append(strategy.shared.value)
    assert drafted == ([True] * 4 if deterministic else [True, True, False, False])
    if not deterministic:
        assert bound < values[1] == values[2] == values[3] < bound + 0.002, (
            "it stands where it ended drafting"
        )


def test_the_threshold_that_was_learnt_is_the_one_used(monkeypatch):
    """A certain pair: every round of 8 is kept whole, so the rate climbs to .9 and the threshold
    stays from there on."""
    values = values_learnt(monkeypatch, AdaptiveThreshold)
    used: list[float] = []
    stop_after = UnlikelyToken.stop_after

    def spy(self, row, token):
        used.append(round(self.threshold, 6))
        return stop_after(self, row, token)

    monkeypatch.setattr(UnlikelyToken, "stop_after", spy)
    decode(counting_pair(64), [0], "draft_verify", {}, table_resources(64), max_tokens=1 + 5 * 9)
    assert values == [0.801, 0.802, 0.803, 0.803, 0.803]
    assert used == [t for t in (0.8, 0.801, 0.802, 0.803, 0.803) for _ in range(8)]


@pytest.mark.parametrize(("temperature", "first"), [(0.0, 0.8), (1.0, 0.5)])
def test_the_first_threshold_depends_on_the_sampling(temperature, first):
    for parameters, threshold in (({}, first), ({"threshold": 0.1}, 0.1)):
        strategy = build_strategy("draft_verify", parameters)
        assert strategy.stop_rule(Sampling(temperature=temperature))[0].threshold == threshold


@pytest.mark.parametrize(("name", "parameters", "rule"), STATEFUL, ids=str)
def test_learning_happens_between_verifications_only(monkeypatch, name, parameters, rule):
    """Two requests at once on shared state: each learns behind its own verification and before its
    own next draft."""
    events: dict[int, list[str]] = {}
    current: list[int] = []
    strategy = build_strategy(name, parameters, StrategyResources(table_resources(8).artifacts))
    run, learn = strategy.run, rule.learn

    def noting(session):
        steps, mine, reply = run(session), events.setdefault(id(session), []), None
        while True:
            current[:] = [id(session)]
            try:
                command = steps.send(reply)
            except StopIteration:
                return
            mine.append(command.model)
            reply = yield command

    def spy(self, draft, verdict):
        events[current[0]].append("learn")
        learn(self, draft, verdict)

    monkeypatch.setattr(strategy, "run", noting)
    monkeypatch.setattr(rule, "learn", spy)
    engine = Engine(table_pair(vocab=8, noise=0.2))
    engine.run([engine.submit([1 + i, 2], Sampling(max_tokens=30 + i), strategy) for i in range(2)])
    assert len(events) == 2
    for mine in events.values():
        assert mine.count("learn") > 3
        assert mine.count("learn") == mine.count("target") - 1  # all but the prompt's
        assert all(mine[i - 1] == "target" for i, event in enumerate(mine) if event == "learn")


def test_settings_without_a_default_are_asked_for_in_a_line():
    for given, missing in (
        ({}, "threshold and max_draft"),
        ({"max_draft": 4}, "threshold"),
        ({"threshold": 0.4}, "max_draft"),
    ):
        with raises_code(
            "parameter_missing", f"adaedl has no default for {missing}:", "--set"
        ) as error:
            build_strategy("adaedl", given)
        assert "\n" not in str(error.value)
    with raises_code("unknown_parameter", "'treshold'"):  # a misspelt name explains the missing one
        build_strategy("adaedl", {"treshold": 0.4, "max_draft": 4})
    described = describe(STRATEGIES["adaedl"])["parameters"]
    assert {name: p["required"] for name, p in described.items()} == {
        "threshold": True,
        "max_draft": True,
        "entropy_scale": False,
    }


def test_every_setting_without_a_default_is_known_to_the_tests():
    needed = {
        name: {p for p, info in describe(cls)["parameters"].items() if info["required"]}
        for name, cls in STRATEGIES.items()
    }
    assert {name: set(settings) for name, settings in NEEDED.items()} == {
        name: found for name, found in needed.items() if found
    }


def test_lengths_in_the_wrong_order_are_refused():
    with raises_code("bad_parameter", "min_draft", "max_draft"):
        build_strategy("specdec_pp", {"min_draft": 9, "max_draft": 8})
