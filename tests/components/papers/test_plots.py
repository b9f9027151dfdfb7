"""Pictures of the page."""

from __future__ import annotations

from pathlib import Path
from unittest.mock import MagicMock

import pytest

from components.papers import plots
from components.papers.asides import Curve
from components.papers.catalogue import PAPERS
from components.papers.cells import FULL


def test_every_role_has_its_curves(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The counted table of the pair that ships a table has four: SPIDE, without parallel verification, and two tables."""
    axes = MagicMock()
    drawn = MagicMock()
    drawn.return_value.__enter__.return_value = axes
    monkeypatch.setattr(plots, "drawing", drawn)
    table = next(table for table in PAPERS["spide"].tables(FULL) if table.cell.name == "spide-counts-code-smollm2-135m")
    roles = [role for role, specs in table.cell.contenders.items() if len(specs) > 1 and "tau" in specs[0]]
    assert len(roles) >= 4
    plots.draw_curves(table, {role: Curve([0.1, 0.9], [1.0, 1.1], [1.0, 0.9]) for role in roles}, tmp_path / "a.png")
    labels = [call.kwargs["label"] for call in axes.plot.call_args_list]
    assert [label for label in labels if label.endswith("decoding speed")] == [f"{role}: decoding speed" for role in roles]
