"""The example of docs/add_a_gate.md, run as it stands: its field, its judgement, and its
line of gates.yaml."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from textwrap import indent
from types import ModuleType
from typing import Any

import pytest
import yaml
from pydantic import Field

import draftwell.registry.gates
from draftwell.components.bench.schema import BenchEntry
from draftwell.registry.gates import load_gates
from draftwell.registry.strict import read_yaml
from draftwell.serving.bundle.verdict import Check, GateVerdict, Thresholds
from tests.support.errors import raises_code
from tests.support.markdown import fences

BLOCKS = [fence for fence in fences() if fence.page.name == "add_a_gate.md"]
MODULE = "add_a_gate_example"


def block(part: str) -> str:
    """The only Python block with this text."""
    (found,) = [b.body for b in BLOCKS if b.language == "python" and part in b.body]
    return found


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A module with `NewThresholds` and `judge_first_token`, made of the page's blocks."""
    module: Any = ModuleType(MODULE)
    # pydantic looks annotations up there
    monkeypatch.setitem(sys.modules, MODULE, module)
    vars(module).update(
        Field=Field,
        Thresholds=Thresholds,
        BenchEntry=BenchEntry,
        Check=Check,
        GateVerdict=GateVerdict,
    )
    source = (
        f"class NewThresholds(Thresholds):\n{indent(block('max_ttft_ratio: float'), '    ')}\n"
        + block("def judge_first_token")
    )
    exec(compile(source, "add_a_gate.md", "exec", dont_inherit=True), vars(module))
    return module


@pytest.fixture
def gates_file(tmp_path: Path) -> Path:
    """The project's thresholds with the page's."""
    added = next(b.body for b in BLOCKS if b.language == "yaml")
    (tmp_path / "gates.yaml").write_text(
        (Path(draftwell.registry.gates.HERE) / "gates.yaml").read_text() + "\n" + added
    )
    return tmp_path / "gates.yaml"


def entry(first_token: float | None) -> BenchEntry:
    return BenchEntry(strategy="spide", ttft_ms=first_token)


@pytest.mark.parametrize(
    ("candidate", "passed"), [(100.0, True), (150.0, True), (151.0, False), (None, False)]
)
def test_the_judgement(
    example: Any, gates_file: Path, candidate: float | None, passed: bool
) -> None:
    thresholds = read_yaml(gates_file, example.NewThresholds)
    judge: Callable[..., GateVerdict] = example.judge_first_token
    assert thresholds.max_ttft_ratio == 1.5
    assert judge(entry(candidate), entry(100.0), thresholds).passed is passed


def test_an_absent_threshold_is_not_checked(example: Any) -> None:
    assert (
        example.judge_first_token(entry(1000.0), entry(1.0), example.NewThresholds()).checks == ()
    )


def test_a_forgotten_place_is_an_error(gates_file: Path) -> None:
    with raises_code("unknown_key", "max_ttft_ratio"):
        load_gates(gates_file)


def test_the_named_places_exist() -> None:
    """What the page tells a reader to edit; `BenchJudge.of` is where its last block is called."""
    from draftwell.flows.steps.gate_parts.bench import BenchJudge

    page = BLOCKS[0].page.read_text()
    assert all(
        name in page
        for name in (
            "`Thresholds`",
            "`BenchJudge.of`",
            "`gate_release`",
            "`ROUNDS` of `components/gate/settings.py`",
        )
    )
    assert callable(BenchJudge.of)
    assert "max_ttft_ratio" in yaml.safe_load(next(b.body for b in BLOCKS if b.language == "yaml"))


def test_the_threshold_is_not_taken_yet() -> None:
    """Otherwise the page would tell a reader to add what is there."""
    assert "max_ttft_ratio" not in Thresholds.model_fields
