"""The draft length that real rounds choose, on simulated machines whose best length is known."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping

import pytest
from hypothesis import given, settings, strategies as st

from draftwell.serving.server.scheduling.draft_length import (
    BLOCK,
    ENOUGH,
    LONG_BLOCK,
    OFTEN,
    SELDOM,
    SETTLING,
    DraftLength,
)
from draftwell.serving.server.scheduling.ratio import Ratio

LENGTHS = (0, 1, 2, 3, 4, 6, 8)
KEPT = 0.7
Seconds = Callable[[int], float]


def machine(running: int, per_token: float) -> Seconds:
    """Seconds of a round by draft length: a pass of the draft for each token, and a target that
    computes all rows."""
    return lambda length: 0.004 * length + 0.04 + per_token * running * (length + 1)


def speeds(seconds: Seconds, running: int) -> dict[int, float]:
    return {
        length: running * sum(KEPT**i for i in range(length + 1)) / seconds(length)
        for length in LENGTHS
    }


class Load:
    """Requests that run round after round under a control, with random acceptance, times that
    scatter, and hiccups.

    Args:
        reading: seconds in which drafts read a token that plain decoding wrote.
        hiccups: share of rounds that take eight times as long.
    """

    def __init__(
        self,
        control: DraftLength,
        running: int,
        seconds: Seconds,
        seed: int = 0,
        reading: float = 0.0,
        hiccups: float = 0.002,
    ):
        self.control, self.running, self.seconds, self.random = (
            control,
            running,
            seconds,
            random.Random(seed),
        )
        self.reading, self.hiccups, self.missed = reading, hiccups, 0
        self.tokens = self.time = 0.0
        self.in_force: list[int] = []

    def run(self, rounds: int) -> float:
        """Tokens per second of these rounds."""
        tokens = time = 0.0
        for _ in range(rounds):
            length = self.control.length
            taken = (
                self.seconds(length)
                * self.random.lognormvariate(0, 0.1)
                * (8 if self.random.random() < self.hiccups else 1)
            )
            taken += self.reading * self.missed if length else 0.0
            self.missed = 0 if length else min(self.missed + self.running, 120 * self.running)
            kept = sum(1 + self._kept(length) for _ in range(self.running))
            self.control.observe(kept, taken)
            self.in_force.append(self.control.in_force)
            tokens, time = tokens + kept, time + taken
        return tokens / time

    def _kept(self, length: int) -> int:
        return next((place for place in range(length) if self.random.random() >= KEPT), length)


PRIORS: Mapping[str, Callable[[int], float]] = {
    "drafts are free": lambda length: 1.0 + length,
    "drafts are dear": lambda length: 1 / (1 + length),
    "nothing differs": lambda length: 1.0,
}


@pytest.mark.parametrize("prior", PRIORS)
@pytest.mark.parametrize(
    ("running", "per_token"), [(4, 0.001), (8, 0.001), (8, 0.006), (32, 0.001), (32, 0.004)]
)
def test_it_comes_to_the_best_length_of_every_batch_size_whatever_the_profile_said(
    running: int, per_token: float, prior: str
) -> None:
    seconds = machine(running, per_token)
    true = speeds(seconds, running)
    control = DraftLength({length: PRIORS[prior](length) for length in LENGTHS})
    load = Load(control, running, seconds)
    load.run(12000)
    assert true[control.in_force] > 0.93 * max(true.values()), control.in_force
    assert control.tokens_per_second()[control.in_force] == pytest.approx(
        true[control.in_force], rel=0.2
    )


@pytest.mark.slow
@settings(max_examples=15, deadline=None)
@given(
    running=st.sampled_from([2, 8, 32]),
    per_token=st.floats(0.0002, 0.01),
    believed=st.floats(0.0002, 0.01),
    seed=st.integers(0, 99),
)
def test_it_is_never_below_plain_decoding_by_more_than_the_blocks_share(
    running, per_token, believed, seed
):
    """Once its comparisons are made; the prior is of another machine."""
    seconds = machine(running, per_token)
    load = Load(DraftLength(speeds(machine(running, believed), running)), running, seconds, seed)
    load.run(4000)
    plain = Load(DraftLength({0: 1.0}), running, seconds, seed)
    assert load.run(4000) > plain.run(4000) * (1 - 1 / (1 + OFTEN)) * 0.97


@pytest.mark.parametrize(("before", "after"), [(0.0005, 0.006), (0.006, 0.0005)])
def test_it_recovers_when_what_a_token_costs_changes(before: float, after: float) -> None:
    control = DraftLength(speeds(machine(8, before), 8))
    load = Load(control, 8, machine(8, before))
    load.run(3000)
    first = control.in_force
    load.seconds = machine(8, after)
    load.run(8000)
    true = speeds(load.seconds, 8)
    assert true[first] < 0.9 * max(true.values()), "or the test proves nothing"
    assert true[control.in_force] > 0.93 * max(true.values())


@pytest.mark.parametrize("factor", [3.0, 1 / 3])
@pytest.mark.parametrize("per_token", [0.001, 0.006])
def test_a_machine_that_is_three_times_as_slow_for_all_lengths_changes_nothing(
    per_token: float, factor: float
) -> None:
    """Speeds that were averaged at other times, compared as they are, would prefer whatever was
    last tried before."""
    seconds = machine(8, per_token)
    control = DraftLength(speeds(seconds, 8))
    load = Load(control, 8, seconds)
    load.run(3000)
    first, true = control.in_force, speeds(seconds, 8)
    load.seconds = lambda length: factor * seconds(length)
    load.in_force.clear()
    load.run(5000)
    assert len(set(load.in_force)) <= 2
    assert true[control.in_force] > 0.96 * true[first]
    assert control.tokens_per_second()[control.in_force] == pytest.approx(
        true[control.in_force] / factor, rel=0.2
    )


@pytest.mark.parametrize("running", [2, 8, 32])
def test_lengths_that_are_equally_fast_do_not_take_turns(running: int) -> None:
    """A rule that takes the length with the best average changes hundreds of times."""
    load = Load(
        DraftLength(dict.fromkeys(LENGTHS, 1.0)),
        running,
        lambda length: sum(KEPT**i for i in range(length + 1)),
    )
    load.run(15000)
    compared = load.control.rounds_in_trials
    load.run(5000)
    assert load.control.switches <= 4
    assert compared > 120, "it has compared"
    assert load.control.rounds_in_trials - compared < 160, (
        "what is as fast would not be put in force: it is seldom tried again"
    )


def test_comparing_costs_little_where_drafts_have_much_to_read_first() -> None:
    """As eight requests on two cores: a draft of one token is as fast as plain decoding, longer
    ones are slower, and whoever has decoded plainly for long has to read its text with the head
    first, which takes as long as fifteen rounds."""
    true = {0: 1.0, 1: 0.99, 2: 0.94, 3: 0.82, 4: 0.75}
    seconds = {
        length: 0.016 * sum(KEPT**i for i in range(length + 1)) / speed
        for length, speed in true.items()
    }
    shares = []
    for seed in range(6):
        control = DraftLength({0: 1.0, 1: 1.03, 2: 0.97, 3: 0.88, 4: 0.8})
        load = Load(control, 8, seconds.__getitem__, seed, reading=0.0003, hiccups=0.0)
        shares.append([load.run(3000) * 0.016 / 8 for _ in range(2)])
    first, later = (sum(column) / len(shares) for column in zip(*shares, strict=True))
    assert first > 0.96
    assert later > 0.98


def test_plain_decoding_is_tried_though_the_profile_calls_it_hopeless() -> None:
    """Without control blocks drafts that have become useless would be kept for ever."""
    control = DraftLength({0: 1.0, 4: 100.0})
    rounds = 0
    while control.in_force == 4 and rounds < 1000:
        control.observe(8, 1.0 if control.length else 0.1)
        rounds += 1
    assert control.in_force == 0
    assert rounds < 200


def test_blocks_are_short_and_have_the_share_of_the_time_that_is_said() -> None:
    load = Load(DraftLength({0: 1.0, 1: 0.5, 2: 0.4}), 8, lambda length: 1.0 + 4.0 * length)
    load.run(8000)
    control = load.control
    assert control.in_force == 0
    before, longest, length, time = control.rounds_in_trials, 0, 0, {True: 0.0, False: 0.0}
    for _ in range(20000):
        trial = control.trial is not None
        length = length + 1 if trial else 0
        longest = max(longest, length)
        seconds = 1.0 + 4.0 * control.length
        time[trial] += seconds
        control.observe(8 * (1 + 0.3 * control.length), seconds)
    assert control.rounds_in_trials > before, "it goes on comparing"
    assert longest == BLOCK + SETTLING, (
        "what it settled for took no longer than the rounds that count"
    )
    assert time[True] / sum(time.values()) <= 1.1 / (1 + SELDOM)


def test_blocks_come_often_where_much_may_be_gained_and_continue_where_drafts_read_first() -> None:
    """Tokens that scatter widely leave much open; a block's first round takes as long as ten."""
    shares = []
    for seed in range(5):
        control, source = DraftLength({0: 1.0, 2: 1.4}, start=0), random.Random(seed)
        longest, length, seconds = 0, 0, {True: 0.0, False: 0.0}
        for _ in range(3000):
            trial = control.trial is not None
            taken = 10.0 if trial and length == 0 else 1.0
            length = length + 1 if trial else 0
            longest, seconds[trial] = max(longest, length), seconds[trial] + taken
            control.observe(source.choice((1, 15)), taken)
        assert BLOCK + SETTLING < longest <= LONG_BLOCK
        shares.append(seconds[True] / sum(seconds.values()))
    assert 2 / (1 + SELDOM) < sum(shares) / len(shares) < 1 / (1 + OFTEN)


def test_a_block_that_another_load_interrupts_is_dropped() -> None:
    """Half of it was measured in the evening, the other half would be the next morning."""
    control = DraftLength({0: 1.0, 2: 1.5})
    while control.trial is None:
        control.observe(8, 1.0)
    control.come_back(after_long=False)
    assert control.trial is None
    rounds = 0
    while control.trial is None:
        control.observe(8, 1.0)
        rounds += 1
    assert rounds <= SETTLING + 2, "the speed in force is still known"
    control.come_back(after_long=True)
    for _ in range(ENOUGH):
        assert control.trial is None, "nothing is compared with the speed of long ago"
        control.observe(8, 1.0)


def test_an_hour_in_which_a_prompt_was_read_or_nobody_came_is_not_the_blocks() -> None:
    """It would have to be made good by 8 to 64 hours of the length in force."""
    control = DraftLength({0: 1.0, 2: 1.5})
    while control.trial is None:
        control.observe(8, 1.0)
    control.observe(8, 3600.0, clean=False)
    while control.trial is not None:
        control.observe(8, 1.0)
    rounds = 0
    while control.trial is None and rounds < 3000:
        control.observe(8, 1.0)
        rounds += 1
    assert rounds < 1000


def test_a_speed_is_a_ratio_of_sums() -> None:
    """The mean of the rounds' own speeds would prefer whatever has a few short rounds."""
    uneven = DraftLength({0: 1.0})
    for number in range(2000):
        uneven.observe(8, 0.1 if number % 2 else 1.9)
    assert uneven.tokens_per_second()[0] == pytest.approx(8.0, rel=0.02)
    control = DraftLength({0: 1.0, 1: 1.0})
    # on average half the tokens per second, though every second round is ten times as fast
    for number in range(4000):
        control.observe(8, 1.0 if control.length == 0 else 3.6 if number % 2 else 0.1)
    assert control.in_force == 0
    assert control.tokens_per_second()[1] < control.tokens_per_second()[0]


def test_rounds_that_read_prompts_are_not_compared_and_a_block_ends_all_the_same() -> None:
    control = DraftLength({0: 1.0, 2: 1.5})
    for number in range(6000):
        reads = number % 4 == 0
        length = control.length
        control.observe(
            8 * (1 + 0.4 * length), (1.0 + 0.1 * length) * (50 if reads else 1), clean=not reads
        )
    assert control.in_force == 2
    assert control.tokens_per_second()[2] == pytest.approx(8 * 1.8 / 1.2, rel=0.01)
    for _ in range(100):
        control.observe(8, 1.0, clean=True)
    in_blocks = 0
    for _ in range(2000):
        control.observe(8, 1.0, clean=False)
        in_blocks += control.trial is not None
    assert in_blocks < 200


def test_a_length_that_nothing_has_tried_is_judged_by_the_profile_corrected_by_its_neighbours() -> (
    None
):
    control = DraftLength({0: 1.0, 1: 2.0, 2: 4.0}, start=0)
    while not control.tokens_per_second() or control.rounds_in_trials < BLOCK + SETTLING:
        control.observe(8, 1.0 if control.length == 0 else 4.0)
    speed = control.tokens_per_second()
    assert speed[0] == pytest.approx(8.0)
    assert speed[2] == pytest.approx(2.0), "tried first: it promised most"
    assert speed[1] == pytest.approx(8.0 * 2.0 * (1.0 * 1 / 16) ** 0.5), (
        "halfway between a profile that is right and one wrong by 16"
    )


def test_what_was_measured_follows_the_acceptance_that_the_prior_has_learnt() -> None:
    """A length that was tried while drafts were poor is worth another try when they are good."""
    control = DraftLength({0: 1.0, 4: 0.5}, start=0)
    while control.rounds_in_trials < 2 * (BLOCK + SETTLING):
        control.observe(8, 1.0 if control.length == 0 else 2.0)
    assert control.tokens_per_second()[4] == pytest.approx(4.0)
    control.expect({0: 1.0, 4: 2.0})
    assert control.tokens_per_second()[4] == pytest.approx(16.0)
    assert control.in_force == 0, "only rounds put a length in force"


def test_before_anything_is_compared_the_profile_decides() -> None:
    control = DraftLength({0: 1.0, 4: 2.0})
    control.expect({0: 1.0, 4: 0.5})
    assert control.in_force == 0
    assert DraftLength({0: 1.0, 4: 2.0}, start=0).in_force == 0


def test_the_error_of_a_ratio_is_that_of_repeated_samples() -> None:
    source, found, errors = random.Random(1), [], []
    for _ in range(300):
        ratio = Ratio()
        for _ in range(40):
            below = source.uniform(0.5, 2.0)
            ratio.add(3.0 * below + source.gauss(0, 1.0), below)
        found.append(ratio.value)
        errors.append(ratio.error)
    mean = sum(found) / len(found)
    scatter = (sum((value - mean) ** 2 for value in found) / len(found)) ** 0.5
    assert sum(errors) / len(errors) == pytest.approx(scatter, rel=0.15)
    assert ratio.inverse().value == pytest.approx(1 / ratio.value)
