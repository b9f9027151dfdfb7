"""Passes that are timed between a cell's texts; on a clock that only forward passes move."""

from __future__ import annotations

import pytest

from components.calibrate import hardware_profile
from components.papers.cell_file import Costs
from components.papers.pass_times import PassTimes
from serving.artifacts.base import Provenance
from serving.artifacts.hardware_profile import HardwareProfile, RequestTimes, RoundOverheads
from serving.runtime.pair import LoadedPair
from tests.support.models.priced import Clock, Priced
from tests.support.models.tiny import pair_of, table_pair

MADE = Provenance(pair="tiny", fingerprint="f" * 64)


class Machine:
    """A pair whose target takes `slow` seconds a pass and `slow` milliseconds more for every token; its draft a tenth of that."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.slow, clock, tables = 1.0, Clock(), table_pair()
        monkeypatch.setattr(hardware_profile, "time", clock)
        self.pair: LoadedPair = pair_of(*(Priced(tables.models[role], clock, lambda row, _, part=part: part * self.slow
                                                 * (1 + len(row.tokens) / 1000)) for role, part in (("target", 1.0), ("draft", 0.1))))


def profile(split: bool = True) -> HardwareProfile:
    apart = (0.5, {1: 5.0, 8: 6.0}) if split else None
    times = RequestTimes(t_draft={1: 0.5}, prefill={}, per_context_token={}, context=16, split_alone=apart,
                         rest=RoundOverheads(round=0.0, token=0.0, figure=0.0))
    return HardwareProfile(0.5, {1: 5.0, 8: 6.0}, 0.25, MADE, apart, details=times)


def test_passes_are_timed_while_the_texts_are_written_and_not_before_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a machine that is slow at the second of three times, and three times as fast as when its profile was measured."""
    machine, told = Machine(monkeypatch), list[int]()
    passes = PassTimes(machine.pair, profile(), 3, lambda done, total, label: told.append(done))
    counts = []
    for done in range(13):
        machine.slow = {6: 3.0, 10: 2.0}.get(done, 1.0)
        passes(done, 12, "svip")
        counts.append(len(passes.timed))
    assert counts == [0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3]
    assert told == list(range(13))
    costs = passes.costs()
    assert costs.t_draft == pytest.approx(2 * 0.1001)
    assert costs.t_verify == pytest.approx({1: 2 * 1.001, 8: 2 * 1.008})
    assert costs.t_rest == 0.25
    assert costs.alone is not None
    assert costs.alone[1] == pytest.approx(costs.t_verify)
    assert costs.busy is not None
    assert costs.busy[1][8] >= costs.alone[1][8], "the draft computes meanwhile, and moves the clock too"


def test_a_cell_whose_passes_were_not_timed_has_its_profiles(monkeypatch: pytest.MonkeyPatch) -> None:
    passes = PassTimes(Machine(monkeypatch).pair, profile(), 0)
    for done in range(4):
        passes(done, 3, "svip")
    assert (passes.timed, passes.costs()) == ([], Costs.of(profile()))


def test_models_that_were_not_timed_on_cores_of_their_own_are_not_here_either(monkeypatch: pytest.MonkeyPatch) -> None:
    passes = PassTimes(Machine(monkeypatch).pair, profile(split=False), 1)
    passes(2, 3, "svip")
    assert (passes.costs().alone, passes.costs().busy) == (None, None)
    assert passes.costs().t_verify[1] == pytest.approx(1.001)


def test_slow_memory_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fifth of a cell's patience; without patience nothing reads memory."""
    waited = []
    monkeypatch.setattr("components.papers.pass_times.Patience.wait", lambda self: waited.append(round(self.left, 3)))
    for patience in (0.0, 50.0):
        PassTimes(Machine(monkeypatch).pair, profile(), 1, patience=patience)(2, 3, "svip")
        assert waited == ([10.0] * 5 if patience else [])
