"""The example of docs/add_a_gate.md, run as it stands."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import yaml
from components.gate.gate import Check, GateVerdict

from registry.gates import Gates
from tests.support.markdown import fences

BLOCKS = [fence for fence in fences() if fence.page.name == "add_a_gate.md"]


@pytest.fixture(scope="module")
def judge() -> Any:
    known: dict[str, Any] = {"Mapping": Mapping, "Any": Any, "Check": Check, "GateVerdict": GateVerdict}
    source = next(block.body for block in BLOCKS if "def judge_first_token" in block.body)
    exec(compile(source, "add_a_gate.md", "exec", dont_inherit=True), known)
    return known["judge_first_token"]


@pytest.mark.parametrize(("candidate", "passed"), [(100.0, True), (150.0, True), (151.0, False)])
def test_the_judgement(judge: Any, candidate: float, passed: bool) -> None:
    thresholds = yaml.safe_load(next(block.body for block in BLOCKS if block.language == "yaml"))
    assert judge(candidate, 100.0, thresholds).passed is passed


def test_an_absent_threshold_is_not_checked(judge: Any) -> None:
    assert judge(1000.0, 1.0, {}).checks == ()


def test_the_threshold_is_not_taken_yet() -> None:
    """Otherwise the page would tell a reader to add what is there."""
    assert "max_ttft_ratio" not in Gates.model_fields
