"""Thresholds of the gate that tests change."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from draftwell.registry import gates

ANY_SPEED = {"max_regression": 0.99, "min_speedup_lower_bound": 0.0, "max_tpot_ratio": 1000.0}
"""Two random models of a few thousand weights: their speed says nothing, and must not decide these
tests."""
ANY_PREDICTION = {"max_prediction_loss_ratio": 2.0}
"""Nor must how well a verifier predicts that has seen sixteen of their texts: it comes out a little
different on each sort of processor."""


@contextmanager
def thresholds_in(folder: Path, changes: dict[str, float]) -> Iterator[None]:
    """The gate's thresholds, but for some, in a folder that has no baselines."""
    (folder / "baselines").mkdir(parents=True)
    (folder / "gates.yaml").write_text(json.dumps(gates.load_gates().model_dump() | changes))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gates, "HERE", folder)
        yield
