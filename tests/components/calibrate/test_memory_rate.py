"""Waiting for fast memory: until it is as fast as at its best, and no longer than patience
lasts."""

import pytest

from draftwell.components.calibrate import memory_rate as module
from draftwell.components.calibrate.memory_rate import MemoryRate, Patience, memory_rate

FAST, SLOW = 54.0, 36.0


@pytest.fixture
def readings(monkeypatch):
    """Rates of the readings to come, of which the last one stays; each takes a second of the
    clock."""
    coming, clock = [FAST], [0.0]

    def read_once(self):
        clock[0] += 1 / module.READS
        calls.append(1)
        return coming[0] if len(coming) == 1 or len(calls) % module.READS else coming.pop(0)

    calls = []
    module._of_threads.cache_clear()
    monkeypatch.setattr(MemoryRate, "_read_once", read_once)
    monkeypatch.setattr(module.time, "monotonic", lambda: clock[0])
    yield coming
    module._of_threads.cache_clear()


def test_a_rate_is_read_from_memory():
    memory = MemoryRate()
    assert 0.1 < memory.read() <= memory.best < 2000


def test_what_is_slow_from_the_first_moment_on_is_found_out(readings):
    """Before the first wait the best rate is explored."""
    readings[:] = [SLOW, SLOW, FAST, FAST, *[SLOW] * 12, FAST]
    patience = Patience(300)
    assert patience.wait() == FAST
    assert patience.left < 299


def test_nothing_is_waited_for_where_no_better_rate_was_seen(readings):
    readings[:] = [SLOW]
    patience = Patience(300)
    assert patience.wait() == SLOW
    assert patience.left == 299, "one reading; exploring comes on top"


def test_slow_memory_is_waited_for(readings):
    memory_rate().know(FAST)
    readings[:] = [SLOW, SLOW, SLOW, FAST]
    patience = Patience(300)
    assert patience.wait() == FAST
    assert patience.left == 296
    assert patience.wait() == FAST
    assert patience.left == 295


def test_a_wait_ends(readings):
    memory_rate().know(FAST)
    readings[:] = [SLOW]
    patience = Patience(40)
    lefts = []
    for _ in range(4):
        assert patience.wait() == SLOW
        lefts.append(patience.left)
    assert lefts[:2] == [40 - module.LONGEST, 40 - 2 * module.LONGEST]
    assert lefts[2] == 0, "the rest of it"
    assert lefts[3] == 0, "the rate is still read, once"


def test_waits_share_what_there_is(readings):
    """The first texts of a long run do not use it up: twice an even share at most."""
    memory_rate().know(FAST)
    readings[:] = [SLOW]
    patience = Patience(48, waits=12)
    lefts = [48.0]
    for _ in range(7):
        patience.wait()
        lefts.append(patience.left)
    assert lefts[1] == 40
    assert lefts[7] > 0


def test_exploring_finds_the_best(readings):
    readings[:] = [SLOW, FAST, SLOW]
    assert memory_rate().explore(5) == FAST
    assert memory_rate().slow(SLOW)
