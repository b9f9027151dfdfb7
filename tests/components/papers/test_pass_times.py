"""Passes that are timed between a cell's texts; on a clock that only forward passes move."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from draftwell.components.calibrate import hardware_profile
from draftwell.components.papers import pass_times
from draftwell.components.papers.cell_file import Costs
from draftwell.components.papers.pass_times import PassTimes
from draftwell.serving.artifacts.base import Provenance
from draftwell.serving.artifacts.hardware_profile import (
    HardwareProfile,
    RequestTimes,
    RoundOverheads,
)
from draftwell.serving.runtime.pair import LoadedPair
from tests.support.models.priced import Clock, Priced
from tests.support.models.tiny import pair_of, table_pair

MADE = Provenance(pair="tiny", fingerprint="f" * 64)
CONTEXT = 16


class Machine:
    """A pair whose target takes `slow` seconds a pass, more for each token and each one of the
    context; its draft a tenth of that."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.slow, clock, tables = 1.0, Clock(), table_pair()
        monkeypatch.setattr(hardware_profile, "time", clock)

        def model(role: str, part: float) -> Priced:
            return Priced(
                tables.models[role],
                clock,
                lambda row, length: part * self.slow * self.price(len(row.tokens), length),
            )

        self.pair: LoadedPair = pair_of(model("target", 1.0), model("draft", 0.1))

    @staticmethod
    def price(tokens: int, context: int = CONTEXT) -> float:
        return 1 + tokens / 1000 + context / 100


def profile(split: bool = True, details: bool = True) -> HardwareProfile:
    apart = (0.5, {1: 5.0, 8: 6.0}) if split else None
    times = RequestTimes(
        t_draft={1: 0.5},
        prefill={},
        per_context_token={},
        context=CONTEXT,
        split_alone=apart,
        rest=RoundOverheads(round=0.0, token=0.0, figure=0.0),
    )
    return HardwareProfile(
        0.5, {1: 5.0, 8: 6.0}, 0.25, MADE, apart, details=times if details else None
    )


def overlapped(machine: Machine) -> Callable[..., Any]:
    """Takes the place of `time_overlapped`, whose threads share the clock: a busy target takes
    twice as long."""

    def time(
        pair: LoadedPair,
        sizes: list[int],
        repeats: int,
        context: int,
        *,
        busy: bool,
    ) -> Any:
        return 0.2 * machine.slow, {
            size: machine.slow * machine.price(size, context) * (2 if busy else 1) for size in sizes
        }

    return time


def test_passes_are_timed_while_the_texts_are_written_and_not_before_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A machine that gets slower: neither the first of three times counts, nor the last, nor the
    mean."""
    machine, told = Machine(monkeypatch), list[int]()
    monkeypatch.setattr(pass_times, "time_overlapped", overlapped(machine))
    passes = PassTimes(machine.pair, profile(), 3, lambda done, total, label: told.append(done))
    counts = []
    for done in range(13):
        machine.slow = {2: 1.0, 6: 2.0, 10: 9.0}.get(done, 50.0)
        passes(done, 12, "svip")
        counts.append(len(passes.timed))
    assert counts == [0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3]
    assert told == list(range(13))
    verify = {size: 2 * machine.price(size) for size in (1, 8)}
    costs = passes.costs()
    assert costs.alone is not None
    assert costs.busy is not None
    assert (costs.t_draft, costs.alone[0]) == (
        pytest.approx(0.2 * machine.price(1)),
        pytest.approx(0.4),
    )
    assert costs.t_verify == pytest.approx(verify)
    assert costs.alone[1] == pytest.approx(verify)
    assert costs.busy[1] == pytest.approx({size: 2 * seconds for size, seconds in verify.items()})
    assert costs.t_rest == 0.25


def test_the_overlapped_passes_are_the_profiles_own() -> None:
    """On real threads: every size is there, idle and busy."""
    passes = PassTimes(table_pair(), profile(), 1)
    passes(2, 3, "svip")
    alone, busy = passes.costs().alone, passes.costs().busy
    assert alone is not None
    assert busy is not None
    assert list(alone[1]) == list(busy[1]) == [1, 8]


@pytest.mark.parametrize(("times", "made"), [(0, profile()), (3, profile(details=False))])
def test_a_cell_whose_passes_were_not_timed_has_its_profiles(
    monkeypatch: pytest.MonkeyPatch, times: int, made: HardwareProfile
) -> None:
    """Also where a profile does not say after which context its passes were timed."""
    passes = PassTimes(Machine(monkeypatch).pair, made, times)
    for done in range(4):
        passes(done, 3, "svip")
    assert (passes.timed, passes.costs()) == ([], Costs.of(made))


def test_nothing_is_timed_behind_the_last_text(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(monkeypatch)
    monkeypatch.setattr(pass_times, "time_overlapped", overlapped(machine))
    passes = PassTimes(machine.pair, profile(), 4)
    for done in range(4):
        passes(done, 3, "svip")
    assert len(passes.timed) == 2


def test_models_that_were_not_timed_on_cores_of_their_own_are_not_here_either(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    machine = Machine(monkeypatch)
    passes = PassTimes(machine.pair, profile(split=False), 1)
    passes(2, 3, "svip")
    assert (passes.costs().alone, passes.costs().busy) == (None, None)
    assert passes.costs().t_verify[1] == pytest.approx(machine.price(1))
