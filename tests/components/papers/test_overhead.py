"""The microbenchmark of CSD's and SPRINTER's own rules does what their strategies do."""

from __future__ import annotations

import pytest

from draftwell.components.papers import overhead
from draftwell.serving.artifacts.correction_memory import CorrectionMemory
from draftwell.serving.artifacts.verifier import Verifier


def test_a_rejection_is_looked_up_gated_and_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []
    for name in ("count", "update"):
        real = getattr(CorrectionMemory, name)

        def noted(self: object, *pair: int, real: object = real, name: str = name) -> object:
            seen.append(name)
            return real(self, *pair)  # type: ignore[operator]

        monkeypatch.setattr(CorrectionMemory, name, noted)
    work = overhead.csd_rejection(32)
    seen.clear()
    work()
    assert seen == ["count", "update"]


def test_a_score_computes_its_pass_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that was kept would leave the softmax out."""
    rows = []
    real = Verifier.score_drafted

    def noted(self: Verifier, row: object, *rest: object) -> float:
        rows.append(row)
        return real(self, row, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(Verifier, "score_drafted", noted)
    work = overhead.sprinter_score(vocabulary=32, hidden=4)
    assert work() == work()
    assert rows[0].whole is not rows[1].whole  # type: ignore[attr-defined]


def test_time_is_that_of_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    taken = [0.001 * (i + 1) for i in range(11)]
    monkeypatch.setattr(overhead, "repeat", lambda work, number, repeat: taken)
    found = overhead.spent(lambda: None, times=10)
    assert found == pytest.approx((600, 200, 1_000))
