"""The cost model of forward passes: both look-ups agree with each other and with the profile, and
noise is not believed."""

from __future__ import annotations

import pytest
from hypothesis import given, strategies as st

from draftwell.serving.artifacts.base import Provenance
from draftwell.serving.artifacts.forward_costs import ascending, seconds_at, seconds_table
from draftwell.serving.artifacts.hardware_profile import HardwareProfile

MEASURED = st.dictionaries(st.integers(1, 40), st.floats(1e-4, 1.0), min_size=1, max_size=6)


@given(MEASURED)
def test_the_table_equals_the_single_look_up_between_the_measured_sizes(
    seconds: dict[int, float],
) -> None:
    table = seconds_table(seconds, 50)
    assert len(table) == 51
    for size in range(min(seconds), max(seconds) + 1):
        assert table[size] == pytest.approx(seconds_at(seconds, size))
    assert table[: min(seconds)] == [table[min(seconds)]] * min(seconds)


@given(MEASURED)
def test_beyond_the_last_size_the_table_never_falls(seconds: dict[int, float]) -> None:
    last = max(seconds)
    beyond = seconds_table(seconds, 50)[last:]
    assert beyond == sorted(beyond)
    for further, taken in enumerate(beyond):
        assert taken == pytest.approx(max(seconds[last], seconds_at(seconds, last + further)))


def test_a_profile_reads_its_verifications_from_the_same_model() -> None:
    origin = Provenance(pair="tiny", fingerprint="f" * 64)
    times = {1: 10.0, 4: 13.0, 8: 21.0}
    profile = HardwareProfile(2.0, times, 0.0, origin)
    assert [profile.verify_seconds(tokens) for tokens in (1, 2, 6, 8, 10)] == [
        10.0,
        11.0,
        17.0,
        21.0,
        25.0,
    ]
    assert seconds_table({1: 10.0, 8: 12.0, 16: 11.5}, 40)[16:] == [11.5] * 25


@given(MEASURED)
def test_ascending_times_are_the_largest_below_the_measured_ones_that_do_not_fall(
    seconds: dict[int, float],
) -> None:
    rising = ascending(seconds)
    assert list(rising) == sorted(seconds)
    assert list(rising.values()) == sorted(rising.values())
    assert all(rising[size] <= seconds[size] for size in seconds)
    assert rising[max(seconds)] == seconds[max(seconds)]
