"""The gate of another engine's settings beside what the champion decodes with."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

import draftwell.flows.steps.engine.gate as gate
from draftwell.components.bench.engines.measure import measurements_of
from draftwell.components.engines.vllm_methods import Method, VllmFiles
from draftwell.components.tune.engines.lab import Lab
from draftwell.serving.errors import DraftwellError
from draftwell.serving.runtime.requests import Sampling
from tests.support.peers.fake_engine import maker

PROMPTS = [[5 + i, 6 + i] for i in range(8)]
SERVED = Method("ngram", 5, 3)


def released(number: int, method: Method, levels: tuple[Any, ...] = ()) -> Any:
    return SimpleNamespace(
        release=SimpleNamespace(device="cpu-vllm", version=number, name=f"release {number}"),
        choice=SimpleNamespace(chosen=method, levels=levels),
        config=SimpleNamespace(contents=SimpleNamespace(temperature=0.0)),
    )


def beside(
    monkeypatch: pytest.MonkeyPatch,
    method: Method,
    log: list[str],
    *,
    faults: list[str] | None = None,
    served: Any = None,
    levels: tuple[Any, ...] = (),
) -> Any:
    """The verdict on a way to speculate beside the champion's, which is 1.5 times as fast as plain
    decoding, at one and at two requests at once."""
    monkeypatch.setattr(gate, "champion_number", lambda *arguments: 1)
    monkeypatch.setattr(
        gate, "find_engine_release", lambda *arguments: served or released(1, SERVED)
    )
    speeds = {"ngram:5": 1.5, "suffix": 1.3, "suffix:9": 1.6}
    lab = Lab(
        maker(speeds, log, faults or []),
        VllmFiles(Path("target")),
        PROMPTS,
        Sampling(max_tokens=12),
        2,
        64,
        8,
        measurements_of({"of": 1}, None),
    )
    space: Any = SimpleNamespace(workspace=None)
    with lab.open():
        return gate.beside_champion(space, released(2, method, levels), lab, (1, 2))


@pytest.mark.parametrize(
    ("method", "result"),
    [(Method("suffix", 8), "failed"), (Method("suffix", 9), "passed"), (Method(), "failed")],
)
def test_a_choice_must_not_be_slower_than_what_serves(
    method: Method, result: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """1.3 times as fast as plain decoding, and plain decoding itself, are slower than 1.5 times."""
    monkeypatch.setattr(gate, "refuse_elsewhere", lambda *arguments: None)
    log: list[str] = []
    found = beside(monkeypatch, method, log)
    assert [(check.name, check.result) for check in found.checks] == [
        ("regression, 1 at once", result),
        ("regression, 2 at once", result),
    ]
    starts, stops = ([row for row in log if row.startswith(word)] for word in ("start", "stop"))
    assert len(starts) == len(stops) == 8, "no engine is left"


def test_a_champion_that_cannot_be_measured_here_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def elsewhere(*arguments: Any) -> None:
        raise DraftwellError("it was tuned with vLLM 0.31", code="tuned_elsewhere")

    log: list[str] = []
    monkeypatch.setattr(gate, "refuse_elsewhere", elsewhere)
    [skipped] = beside(monkeypatch, Method("suffix", 8), log).skipped
    assert (skipped.name, skipped.applies, log) == ("regression", True, [])
    assert "release 1, the champion, cannot be measured here: it was tuned with" in skipped.why
    missing = DraftwellError("eagle3 needs a head", code="no_head_to_export")
    monkeypatch.setattr(gate, "refuse_elsewhere", Mock(side_effect=missing))
    [skipped] = beside(monkeypatch, Method("suffix", 8), log).skipped
    assert "cannot be measured here: eagle3 needs a head" in skipped.why
    monkeypatch.setattr(gate, "refuse_elsewhere", lambda *arguments: None)
    assert not beside(monkeypatch, SERVED, log).skipped[0].applies, "it is the same way"
    assert log == []
    failing = beside(monkeypatch, Method("suffix", 8), log, faults=[f"start {SERVED.label}"])
    assert "has no kernel" in failing.skipped[0].why


def test_loads_at_which_neither_drafts_are_not_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    """There both are the engine without drafts: a wide interval would decide nothing."""
    monkeypatch.setattr(gate, "refuse_elsewhere", lambda *arguments: None)
    levels = (SimpleNamespace(at_once=1, k=5), SimpleNamespace(at_once=2, k=0))
    served = released(1, SERVED, levels)
    found = beside(monkeypatch, Method("suffix", 9), [], served=served, levels=levels)
    assert [check.name for check in found.checks] == ["regression, 1 at once"]


def test_a_gate_that_passed_already_gives_its_figures_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Not none: a card would say figures that the choice was chosen by."""
    kept = {"gates/7/figures.json": b'[{"label": "ngram(k=5)"}]'}
    record = SimpleNamespace(judged="these prompts")
    played: dict[str, Any] = {
        "deployment_of": SimpleNamespace(temperature=0.0),
        "find_engine_release": released(2, SERVED),
        "untouched": [],
        "standing_record": record,
        "champion_number": 1,
        "judged_digest": "these prompts",
        "objection": None,
        "outdated": None,
        "reports_folder": "gates/7",
        "gate_on_engine": (SimpleNamespace(passed=True, checks=[]), []),
    }
    for name, value in played.items():
        monkeypatch.setattr(gate, name, Mock(return_value=value))
    gate.find_engine_release.return_value.release.published = None
    store = SimpleNamespace(read_file=lambda published, file: kept.get(file))
    monkeypatch.setattr(gate, "Store", lambda: store)
    settings: Any = SimpleNamespace(fresh=False, max_tokens=8)
    space: Any = SimpleNamespace(workspace=SimpleNamespace(say=lambda line: None))
    assert gate.gate_as(settings, space, 2, [])["figures"] == [{"label": "ngram(k=5)"}]
    kept.clear()
    assert gate.gate_as(settings, space, 2, [])["figures"] == []
    gate.gate_on_engine.assert_called_once()  # it is judged again where they are gone
