"""Kept runs on emulated devices, as the summary takes them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from draftwell.components.papers import emulated
from draftwell.components.papers.page import emulated_cells
from draftwell.components.papers.tables import Claim

CLAIM = Claim(claim="it is faster", regime="theirs", why="", emulated=["spide", "vanilla_sd"])


def write(folder: Path, name: str, prompts: int, **changes: Any) -> None:
    """A run in which two settings of SPIDE were measured."""
    rows = {
        "vanilla_sd(num_speculative_tokens=4)": {"strategy": "vanilla_sd", "acceptance": 0.9},
        "spide(tau=0.7)": {"strategy": "spide", "acceptance": 0.8},
        "spide(tau=0.9)": {"strategy": "spide", "acceptance": 0.7},
    }
    ratios = [
        {"contender": label, "over": "vanilla_sd(num_speculative_tokens=4)"}
        | {"ratio": ratio, "low": ratio, "high": ratio, "predicted": 1.0}
        for label, ratio in (("spide(tau=0.7)", 1.2), ("spide(tau=0.9)", 1.3))
    ]
    run = {
        "void": None,
        "curve": {"target": {"1": 1.0}, "draft": {"1": 0.2}},
        "rows": rows,
        "ratios": ratios,
        "prompt_ids": [f"p{i}" for i in range(prompts)],
        "max_tokens": 32,
    }
    (folder / "emulated").mkdir(exist_ok=True)
    (folder / "emulated" / f"{name}.json").write_text(json.dumps(run | changes))


def test_runs_are_found_by_strategy_and_the_fastest_setting_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(emulated, "FOLDER", tmp_path)
    write(tmp_path, "a", 29)
    write(tmp_path, "computing", 29, curve={"target": {"1": 1.0}, "draft": None})
    write(tmp_path, "void", 29, void="late")
    (run,) = emulated.kept_runs("spide", "vanilla_sd")
    assert (run.ours.value, run.acceptance, run.cost) == (1.3, 0.7, 0.2)
    assert emulated.kept_runs("spide", "pearl") == []


@pytest.mark.parametrize(("prompts", "trust"), [(29, "low"), (30, "medium"), (100, "high")])
def test_few_prompts_deserve_little_trust(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, prompts: int, trust: str
) -> None:
    monkeypatch.setattr(emulated, "FOLDER", tmp_path)
    write(tmp_path, "a", prompts)
    assert emulated_cells(CLAIM, emulated.kept_runs("spide", "vanilla_sd"))[-1] == trust
