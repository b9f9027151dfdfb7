"""Pictures of the page."""

from __future__ import annotations

from pathlib import Path
from unittest.mock import MagicMock

import pytest

from draftwell.components.papers import plots
from draftwell.components.papers.asides import Curve
from draftwell.components.papers.catalogue import PAPERS
from draftwell.components.papers.cells import FULL
from draftwell.components.papers.estimates import Estimate, Loss
from draftwell.components.papers.rounds import RoundCost

TABLE = PAPERS["csd"].tables(FULL)[0]


def test_every_role_has_its_curves(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The counted table of the pair that ships a table has four: SPIDE, without parallel
    verification, and two tables."""
    axes = MagicMock()
    drawn = MagicMock()
    drawn.return_value.__enter__.return_value = axes
    monkeypatch.setattr(plots, "drawing", drawn)
    table = next(
        table
        for table in PAPERS["spide"].tables(FULL)
        if table.cell.name == "spide-counts-code-smollm2-135m"
    )
    roles = [
        role
        for role, specs in table.cell.contenders.items()
        if len(specs) > 1 and "tau" in specs[0]
    ]
    assert len(roles) >= 4
    plots.draw_curves(
        table,
        {role: Curve([0.1, 0.9], [1.0, 1.1], [1.0, 0.9]) for role in roles},
        tmp_path / "a.png",
    )
    labels = [call.kwargs["label"] for call in axes.plot.call_args_list]
    assert [label for label in labels if label.endswith("decoding speed")] == [
        f"{role}: decoding speed" for role in roles
    ]


def test_a_round_is_drawn_part_by_part(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """In milliseconds; parts that nobody has take no colour."""
    axes, drawn = MagicMock(), MagicMock()
    drawn.return_value.__enter__.return_value = axes
    monkeypatch.setattr(plots, "drawing", drawn)
    found = {
        "SD": RoundCost({"draft": 0.01, "target": 0.05, "rest": 0.002}, 5.0, 3.0),
        "CSD": RoundCost({"draft": 0.02, "target": 0.04}, 5.0, 4.0),
    }
    plots.draw_rounds(TABLE, found, tmp_path / "a.png")
    bars = {call.kwargs["label"]: call for call in axes.barh.call_args_list}
    assert list(bars) == ["draft", "target", "rest"]
    assert [list(bars[part].args[1].round(6)) for part in bars] == [[10, 20], [50, 40], [2, 0]]
    assert plots.draw_rounds(TABLE, {}, tmp_path / "b.png") is None
    assert not (tmp_path / "b.png").exists()


def test_what_lossy_contenders_gain_and_lose_is_drawn(tmp_path: Path) -> None:
    found = {
        "CSD": Loss(Estimate(1.4, 1.2, 1.5), Estimate(-0.1, -0.2, 0.0)),
        "gate only": Loss(Estimate(1.5, 1.5, 1.5), Estimate(-0.2, -0.3, -0.1)),
    }
    assert plots.draw_losses(TABLE, found, tmp_path / "a.png") == tmp_path / "a.png"
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    assert plots.draw_losses(TABLE, {}, tmp_path / "b.png") is None
    assert plots.ends(Estimate(1.4, 1.2, 1.5)) == [[pytest.approx(0.2)], [pytest.approx(0.1)]]
