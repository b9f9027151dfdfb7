"""The regret study on a tiny pair: what counts as the grid's best, which way the ratio goes, and
what is reported."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from draftwell.components.prompts.prompt import Prompt
from draftwell.components.report.intervals import FEWEST_PROMPTS
from draftwell.components.tune import regret as module
from draftwell.components.tune.candidates import EXPLORE_PROMPTS, EXPLORE_TOKENS
from draftwell.components.tune.constraints import ConstraintChecker
from draftwell.components.tune.evaluator import Quality
from draftwell.components.tune.evidence import Metrics
from draftwell.components.tune.regret import GRID, SETTINGS, RegretStudy, fastest, summary
from draftwell.components.tune.settings import Constraints
from draftwell.components.tune.successive_halving import successive_halving
from draftwell.components.tune.tune import TuneInputs
from draftwell.serving.artifacts.acceptance_table import AcceptanceTable
from draftwell.serving.artifacts.base import Provenance
from draftwell.serving.artifacts.correction_memory import CorrectionMemory
from draftwell.serving.artifacts.hardware_profile import HardwareProfile
from draftwell.serving.errors import DraftwellError
from draftwell.serving.runtime.pair import LoadSettings
from draftwell.serving.runtime.strategies import (
    PLAIN,
    StrategyChoice,
    StrategyResources,
    build_strategy,
)
from tests.support.collecting import collect_traces
from tests.support.loop.scripted_clock import Clock, gamma
from tests.support.models.tiny import table_pair

PROMPTS = [
    Prompt(f"p{i}", None, [text]) for i, text in enumerate(["hello world", "abc", "so it goes"])
]
ORIGIN = Provenance(pair="tiny", fingerprint="f" * 64, device_class="cpu-test")


def test_the_grid_is_valid_and_about_thirty() -> None:
    assert 28 <= len(GRID) <= 32
    assert {choice.name for choice in GRID} == set(module.STRATEGIES)
    for choice in GRID:
        build_strategy(choice.name, dict(choice.parameters))


def test_the_report_on_a_tiny_pair(tmp_path: Path) -> None:
    pair = table_pair()
    profile = HardwareProfile(1.0, {1: 10.0, 4: 11.0, 8: 12.0}, 0.1, ORIGIN)
    resources = StrategyResources(
        {
            "acceptance_table": AcceptanceTable.empty(ORIGIN),
            "correction_memory": CorrectionMemory.empty(ORIGIN),
            "hardware_profile": profile,
        },
        pair.special_tokens,
    )
    trace = collect_traces(pair, PROMPTS, tmp_path, max_tokens=12, rollout=8, batch=3)
    grid = [
        StrategyChoice("vanilla_sd", {"num_speculative_tokens": 2}),
        StrategyChoice("svip", {"threshold": 0.3, "max_draft": 8}),
    ]
    settings = SETTINGS.model_copy(update={"max_tokens": 8, "trials": 8})
    width = {"explored": module.EXPLORED, "measured": module.MEASURED}
    inputs = TuneInputs(
        pair, trace, PROMPTS, resources, profile, strategies=module.STRATEGIES, **width
    )
    report = RegretStudy(inputs, settings, grid).run()
    assert json.loads(json.dumps(report, allow_nan=False)) == report
    assert [figure["strategy"] for figure in report["grid"]] == [
        "autoregressive",
        "vanilla_sd",
        "svip",
    ]
    assert report["best"] in [
        str(StrategyChoice(f["strategy"], f["parameters"])) for f in report["grid"]
    ]
    assert report["low"] <= report["regret"] <= report["high"]
    assert min(report["tune_seconds"], report["grid_seconds"]) > 0
    assert {t["strategy"] for t in report["evidence"]["trials"]} <= set(module.STRATEGIES)
    assert (
        len([t for t in report["evidence"]["trials"] if t["source"] == "measured"])
        == module.EXPLORED
    )
    assert report["evidence"]["constraints"]["max_quality_loss"] == 0.1


def test_a_pair_of_three_is_loaded_as_such(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its traces and artifacts are bound to the qualifier too: without it all of them would be
    refused."""
    loaded: list[Any] = []

    def load_pair(files: Any, settings: LoadSettings, *, qualifier: bool) -> None:
        loaded.append((files.roles(), settings, qualifier))
        raise DraftwellError("far enough")

    monkeypatch.setattr(module, "load_pair", load_pair)
    folders = {role: tmp_path / role for role in ("target", "draft", "qualifier")}
    with pytest.raises(DraftwellError, match="far enough"):
        module.main(**folders, artifacts=tmp_path, traces=tmp_path, pad_target=1e9)
    assert loaded == [
        (folders, LoadSettings(dtype="bfloat16", pad_target=1e9), False),
    ]


def test_the_summary_is_in_percent() -> None:
    report = {
        "choice": {"strategy": "svip", "parameters": {"max_draft": 8}},
        "best": "csd",
        "regret": 0.0125,
        "low": -0.01,
        "high": 0.031,
        "tune_seconds": 284.4,
        "grid_seconds": 1001.0,
    }
    assert summary(report).splitlines() == [
        "chosen: svip {'max_draft': 8}",
        "the grid's best: csd",
        "regret 1.25 % [-1.00, 3.10]",
        "time 28.4 % of the grid's (284 of 1001 s)",
    ]


def test_what_the_tuner_measures_is_less_than_a_third_of_the_grid() -> None:
    """In requested tokens, were all configs equally fast: 8 prompts × 32 tokens, and csd's trials
    of 2 × 24."""
    prompts, tokens = module.PROMPTS, 32
    clock = Clock(lambda config: 1.0 if config == PLAIN else 1.5)
    survivors = [
        StrategyChoice("vanilla_sd", {"num_speculative_tokens": g})
        for g in range(1, module.MEASURED + 1)
    ]
    survivors += [StrategyChoice("csd", {"tau": i}) for i in range((module.MEASURED + 1) // 2)]
    successive_halving(
        clock,
        survivors,
        [Prompt(f"p{i}", None, ["text"]) for i in range(prompts)],
        ConstraintChecker(Constraints(lossless_only=False), lambda *given: Quality(1.0)),
    )
    asked = tokens * sum(len(configs) * len(ids) for configs, ids, _ in clock.calls)
    explored = EXPLORE_PROMPTS * EXPLORE_TOKENS * (module.EXPLORED + 1)
    assert prompts >= FEWEST_PROMPTS
    assert (asked + explored) / (tokens * prompts * (len(GRID) + 1)) < 0.22, (
        "so that replay and warming up have room below a quarter"
    )


def test_the_best_keeps_to_the_constraints() -> None:
    def figure(choice: StrategyChoice, seconds: float, objection: str | None = None) -> Metrics:
        return Metrics.of(
            choice,
            seconds_per_token=seconds,
            prompts=8,
            target_calls_per_token=1.0,
            speedup=1.0,
            speedup_low=1.0,
            speedup_high=1.0,
            objection=objection,
        )

    figures = [
        figure(PLAIN, 0.2),
        figure(StrategyChoice("csd", {"tau": 0.01}), 0.05, "it loses too much"),
        figure(StrategyChoice("svip"), 0.1),
    ]
    assert fastest(figures) == StrategyChoice("svip")


def test_a_slower_choice_has_a_positive_regret(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(lambda config: {2: 1.0, 5: 1.25}[gamma(config)])
    monkeypatch.setattr(module, "Evaluator", lambda *args, **more: clock)
    slow, quick = (StrategyChoice("vanilla_sd", {"num_speculative_tokens": g}) for g in (2, 5))
    nothing: Any = SimpleNamespace()
    study = RegretStudy(TuneInputs(nothing, nothing, PROMPTS, nothing, nothing))
    found = study.compare(slow, quick)
    assert (found.regret, found.low, found.high) == pytest.approx((0.25, 0.25, 0.25))
    assert found.best == str(quick)
    assert len(clock.calls) == 1
    assert all(fresh for _, _, fresh in clock.calls)
    assert study.compare(quick, slow).regret == pytest.approx(-0.2)
    assert study.compare(quick, quick).regret == 0
    assert len(clock.calls) == 2, "a config is not compared with itself"
