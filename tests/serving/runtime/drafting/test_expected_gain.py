"""What a draft is expected to gain, and that nothing is drafted which gains nothing."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field

import pytest
import torch

from draftwell.serving.artifacts.acceptance_table import AcceptanceTable
from draftwell.serving.artifacts.datastore import Datastore
from draftwell.serving.artifacts.hardware_profile import (
    HardwareProfile,
    RequestTimes,
    RoundOverheads,
)
from draftwell.serving.runtime.drafting.best_drafter import (
    PROBE,
    READ_ALONG,
    BestDrafter,
    Candidate,
    Experience,
)
from draftwell.serving.runtime.drafting.expected_gain import RoundCosts, WorthDrafting
from draftwell.serving.runtime.engine.engine import Engine
from draftwell.serving.runtime.requests import Sampling
from draftwell.serving.runtime.strategies import StrategyResources, build_strategy
from draftwell.serving.runtime.types import Draft, Verdict
from tests.support.models.resources import ORIGIN, counting_pair, decode, table_pair
from tests.support.models.spans import span_of
from tests.support.models.table_model import TableModel

STEPS = [1.0, 1.0, 1.4, 1.4, 1.4, 1.8, 1.9, 2.0, 2.0, 2.4]


def naive(verify, step, chances, free):
    """Every length tried by its definition."""
    gains = []
    for length in range(1, len(chances) + 1):
        expected = sum(torch.tensor(chances[:j]).prod().item() for j in range(1, length + 1))
        gains.append(expected - (verify[length + 1] - verify[1]) - step * max(0, length - free))
    return gains


@pytest.mark.parametrize(
    "chances", [[0.9] * 8, [0.5, 0.5, 0.1, 0.9], [0.1] * 4, [0.3, 0.99, 0.99, 0.99, 0.99]], ids=str
)
def test_lengths_by_definition(chances):
    costs = RoundCosts(STEPS, 0.1)
    free = naive(STEPS, 0.0, chances, 0)
    best = max(range(len(free)), key=lambda i: free[i])
    expected = (best + 1, pytest.approx(free[best], abs=1e-6)) if free[best] > 0 else (0, 0.0)
    assert costs.best_length(chances) == expected
    for computed in (0, 1):
        assert costs.outlook(0, 1.0, chances, computed) == pytest.approx(
            max(naive(STEPS, 0.1, chances, computed)), abs=1e-6
        )


def test_measured_times_that_fall_are_not_believed():
    profile = HardwareProfile(0.002, {1: 0.011, 2: 0.016, 4: 0.015, 8: 0.02}, 0.0, ORIGIN)
    costs = RoundCosts.of(profile, 0.0011, 9)
    assert costs.step == pytest.approx(0.1)
    assert all(a <= b for a, b in itertools.pairwise(costs.verify))
    assert costs.verify[1] == 1.0


def rows(confidence):
    return span_of(torch.tensor([[confidence, 1 - confidence]]).log(), Sampling())


def test_a_draft_ends_where_no_further_token_is_worth_it():
    table = AcceptanceTable([1000] * 20, [int(1000 * (0.02 + 0.05 * b)) for b in range(20)], ORIGIN)
    stop = WorthDrafting(RoundCosts(STEPS, 0.1), table, 0.5, 6)
    stop.start()
    assert stop.stop_before(rows(0.51)), (
        "a token of a low chance does not pay for a longer verification"
    )
    stop.start()
    drafted = 0
    while not stop.stop_before(rows(0.999)) and not stop.stop_after(rows(0.999), 0):
        drafted += 1
    assert drafted >= 2


@dataclass
class Lane:
    length: int
    model: TableModel = field(
        default_factory=lambda: TableModel(torch.zeros(2, 2), max_context=1000)
    )


class Spy:
    """A session's stand-in for what `BestDrafter` asks of one."""

    def __init__(self, ids):
        self.text = type("Text", (), {"ids": ids, "remaining": 100})()
        self.lanes = {"draft": Lane(len(ids))}
        self.sampling = Sampling()
        self.stats = type("Stats", (), {"drafted": 0, "draft_calls": 0})()


def candidate(seen, step=0.1, asked=None):
    """A model that always proposes one token, with a spy on how often."""

    class Model:
        def propose(self, session, limit, pending=None):
            (asked if asked is not None else []).append(len(session.text.ids))
            session.stats.draft_calls += 1
            return Draft([7], confidence=[0.4])
            yield

    return Candidate(lambda stop: Model(), RoundCosts(STEPS, step), seen, 4)


def play(models, rounds, accepted):
    """Rounds on a text in which nothing repeats; `accepted(model)`: tokens that the target keeps of
    its draft."""
    drafter, session = (
        BestDrafter(RoundCosts(STEPS, 0.0), AcceptanceTable.empty(), models, 4),
        Spy([1]),
    )
    for token in range(2, 2 + rounds):
        session.text.ids.append(100 + token)
        draft = next_value(drafter.propose(session, 4))
        drafter.learn(draft, Verdict(accepted(drafter.chosen) if len(draft) else 0, 5, len(draft)))


def next_value(steps):
    try:
        next(steps)
    except StopIteration as stop:
        return stop.value
    raise AssertionError("no forward pass was expected")


def test_a_model_that_gains_nothing_is_tried_ever_less_often():
    asked, seen = [], Experience(gain=-0.5)
    play([candidate(seen, 0.3, asked)], 7 * PROBE, lambda model: 0)
    assert asked == [2 + PROBE - 1, 2 + 3 * PROBE - 1, 2 + 7 * PROBE - 1], (
        "after 12, 24 and 48 rounds; also over many short requests"
    )
    assert seen.gain < 0
    play([candidate(seen, 0.3, asked)], 8 * PROBE, lambda model: 1)
    assert seen.patience == PROBE


def test_a_model_that_a_text_has_outgrown_is_left_out():
    asked = []
    session = Spy(list(range(998)))
    drafter = BestDrafter(
        RoundCosts(STEPS, 0.0), AcceptanceTable.empty(), [candidate(Experience(), 0.1, asked)], 4
    )
    next_value(drafter.propose(session, 2))
    assert len(asked) == 1
    session.text.ids.append(998)
    next_value(drafter.propose(session, 2))
    assert len(asked) == 1


def test_what_is_looked_up_and_not_proposed_is_not_counted_as_drafted():
    session = Spy([1, 2, 3, 4, 5, 6, 1, 2, 3])
    drafter = BestDrafter(
        RoundCosts(STEPS, 0.0),
        AcceptanceTable([1000] * 20, [600] * 20, ORIGIN),
        [candidate(Experience(gain=3.0))],
        4,
    )
    next_value(drafter.propose(session, 4))
    assert drafter.chosen is not None
    assert session.stats.drafted == 0


def test_of_two_models_the_one_that_gains_more_drafts_most():
    """Both look alike at first; one is kept always, the other never."""
    good, bad = [], []
    models = [candidate(Experience(), 0.1, bad), candidate(Experience(), 0.1, good)]
    play(models, 60, lambda model: int(model is models[1]))
    assert len(bad) <= 3 + 60 // PROBE
    assert len(good) >= 60 - len(bad) - 1


def test_a_datastore_that_errs_does_not_spoil_the_look_up_in_the_text():
    """Its continuations are counted apart: they are no longer proposed, those of the request's own
    text are."""
    stored = Datastore.from_texts([[7, 8, 9, 20 + i, 7, 8, 9, 20 + i] for i in range(3)], ORIGIN)
    drafter = BestDrafter(
        RoundCosts(STEPS, 0.0),
        AcceptanceTable([1000] * 20, [950] * 20, ORIGIN),
        [],
        4,
        stored,
        AcceptanceTable([10] * 20, [9] * 20, ORIGIN),
    )
    for _ in range(300):
        draft = next_value(drafter.propose(Spy([1, 2, 7, 8, 9]), 4))
        drafter.learn(draft, Verdict(0, 5, min(1, len(draft))))
    assert not next_value(drafter.propose(Spy([1, 2, 7, 8, 9]), 4)).tokens
    again = BestDrafter(drafter.costs, drafter.lookup, [], 4, stored, drafter.stored)
    assert next_value(again.propose(Spy([1, 2, 3, 4, 5, 6, 1, 2, 3]), 4)).tokens[:2] == [4, 5]


def test_an_n_gram_is_preferred_where_it_is_expected_to_gain_more():
    drafter = BestDrafter(
        RoundCosts(STEPS, 0.0),
        AcceptanceTable([1000] * 20, [950] * 20, ORIGIN),
        [candidate(Experience(gain=0.2))],
        4,
    )
    draft = next_value(drafter.propose(Spy([1, 2, 3, 4, 5, 6, 1, 2, 3]), 4))
    assert drafter.chosen is None
    assert draft.tokens == [4, 5, 6, 1][: len(draft)]
    assert len(draft) >= 3


def test_a_model_does_not_read_a_prompt_that_it_cannot_make_good():
    asked = []
    one = candidate(Experience(gain=0.2), 0.1, asked)
    one.costs.reading = 0.1
    drafter, session = (
        BestDrafter(RoundCosts(STEPS, 0.0), AcceptanceTable.empty(), [one], 4),
        Spy(list(range(400))),
    )
    session.lanes["draft"].length = 0
    next_value(drafter.propose(session, 4))
    assert not asked, "40 passes to read, and 100 tokens to gain a fifth of a pass at each"
    session.lanes["draft"].length = 390
    next_value(drafter.propose(session, 4))
    assert len(asked) == 1


def test_with_prohibitive_costs_it_is_plain_decoding():
    """Verification in proportion to its tokens, and a step as dear as a pass: nothing is worth it,
    and nothing is drafted."""
    profile = HardwareProfile(1.0, {1: 1.0, 32: 64.0}, 0.0, ORIGIN, t_head=1.0)
    resources = StrategyResources({"hardware_profile": profile}, deterministic=True)
    models = table_pair(vocab=5)
    strategy = build_strategy("hybrid", {}, resources)
    job = Engine(models).generate([0, 1, 0], Sampling(max_tokens=40), strategy)
    assert job.session.stats.drafted == 0
    assert job.session.stats.draft_calls == 0
    assert job.output == decode(models, [0, 1, 0], "autoregressive", max_tokens=40).output


@pytest.mark.parametrize("drafter", ["head", "draft"])
def test_a_model_that_is_always_right_is_used(drafter):
    models = counting_pair()
    models["head"] = models["draft"]
    resources = StrategyResources(
        {
            "hardware_profile": HardwareProfile(
                0.1, {1: 1.0, 4: 1.4, 9: 2.0}, 0.0, ORIGIN, t_head=0.1
            )
        }
    )
    job = decode(models, [0], "hybrid", {"drafter": drafter}, resources, max_tokens=60)
    assert job.session.stats.accepted > 40
    assert job.session.stats.target_calls < 25


@pytest.mark.parametrize(
    ("deterministic", "asked", "learns"),
    [
        (False, {}, True),
        (True, {}, False),
        (False, {"repeatable": True}, True),
        (False, {"temperature": 1.0}, True),
        (False, {"temperature": 1.0, "repeatable": True}, True),
    ],
    ids=str,
)
def test_requests_learn_from_each_other_unless_each_decides_for_itself(
    deterministic, asked, learns
):
    """What was learnt changes neither a greedy answer nor one of a seed."""
    resources = StrategyResources(
        {
            "hardware_profile": HardwareProfile(
                0.1, {1: 1.0, 4: 1.4, 9: 2.0}, 0.0, ORIGIN, t_head=0.1
            )
        },
        deterministic=deterministic,
    )
    strategy = build_strategy("hybrid", {"drafter": "none"}, resources)
    Engine(counting_pair()).generate([0], Sampling(max_tokens=60, **asked), strategy)
    assert (sum(sum(seen.lookup.total) for seen in strategy.seen.values()) > 0) is learns


def test_a_seeded_sampled_answer_does_not_depend_on_earlier_requests():
    resources = StrategyResources(
        {"hardware_profile": HardwareProfile(0.1, {1: 1.0, 4: 1.4, 9: 2.0}, 0.0, ORIGIN)}
    )
    strategy = build_strategy("hybrid", {}, resources)
    models = table_pair(vocab=5)
    seeded = Sampling(max_tokens=40, temperature=1.0, seed=3, repeatable=True)
    alone = Engine(models).generate([0, 1, 0], seeded, strategy)
    for seed in range(4):
        Engine(models).generate(
            [0, 1, 0], Sampling(max_tokens=60, temperature=1.0, seed=seed), strategy
        )
    after = Engine(models).generate([0, 1, 0], seeded, strategy)
    assert after.output == alone.output
    assert after.session.stats.drafted != alone.session.stats.drafted, "it has learnt"


def test_time_outside_forward_passes_is_counted():
    rest = RoundOverheads(round=0.1, token=0.05, figure=0.02)
    details = RequestTimes(
        t_draft={1: 0.1}, prefill={"draft": {64: 6.4}}, per_context_token={}, context=1, rest=rest
    )
    costs = RoundCosts.of(
        HardwareProfile(0.1, {1: 0.9, 3: 1.1}, 0.1, ORIGIN, details=details), 0.08, 2, "draft"
    )
    assert costs.verify == pytest.approx([1.0, 1.0, 1.15, 1.3])
    assert costs.step == pytest.approx(0.1)
    assert costs.reading == pytest.approx(0.1)


def test_a_model_that_lost_is_tried_again_where_trying_costs_little():
    """Though it has to read a prompt: reading costs 3 passes, so it is due once rounds have taken
    150."""
    asked, seen = [], Experience(gain=-0.5)
    one = candidate(seen, 0.3, asked)
    one.costs.reading = 0.1
    drafter, session = (
        BestDrafter(RoundCosts(STEPS, 0.0), AcceptanceTable.empty(), [one], 4),
        Spy(list(range(30 + READ_ALONG))),
    )
    session.lanes["draft"].length = 0
    for count in range(1, 151):
        assert not asked, f"after {count} rounds"
        next_value(drafter.propose(session, 4))
    assert len(asked) == 1


def test_a_model_that_others_beat_is_tried_ever_less_often():
    """Its rounds gain something, and less than those of the best."""
    worse, better = [], []
    models = [
        candidate(Experience(gain=0.3), 0.1, worse),
        candidate(Experience(gain=2.0), 0.1, better),
    ]
    play(models, 7 * PROBE, lambda model: 1 if model is models[0] else 3)
    assert len(worse) == 3, "after 12, 24 and 48 rounds"


def test_of_two_models_the_text_is_read_by_the_one_that_makes_it_good():
    """The second gains a little more each round, and would have to read the prompt first."""
    read, unread = [], []
    models = [
        candidate(Experience(gain=1.0), 0.1, read),
        candidate(Experience(gain=1.1), 0.1, unread),
    ]
    models[1].costs.reading, models[1].role = 0.1, "head"
    session = Spy(list(range(200)))
    session.lanes["head"] = Lane(0)
    drafter = BestDrafter(RoundCosts(STEPS, 0.0), AcceptanceTable.empty(), models, 4)
    next_value(drafter.propose(session, 4))
    assert (len(read), len(unread)) == (1, 0)
    session.lanes["head"].length = 199
    next_value(drafter.propose(session, 4))
    assert (len(read), len(unread)) == (1, 1)
