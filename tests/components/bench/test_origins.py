"""Rows of a bench say what they rest on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from draftwell.components.bench.bench import run_bench
from draftwell.components.bench.origins import origins
from draftwell.components.bench.settings import BenchSettings
from draftwell.components.prompts.prompt import Prompt
from draftwell.serving.artifacts.acceptance_table import AcceptanceTable
from draftwell.serving.artifacts.base import Artifact, Provenance
from draftwell.serving.artifacts.decoding_config import DecodingConfig
from draftwell.serving.artifacts.hardware_profile import HardwareProfile
from draftwell.serving.runtime.strategies import StrategyChoice, StrategyResources
from tests.support.models.tiny import table_pair


def origin(trace: str | None = "7" * 64) -> Provenance:
    return Provenance(pair="tiny", fingerprint="f" * 64, trace_digest=trace)


def saved(artifact: Artifact, folder: Path) -> Any:
    artifact.save(folder)
    return type(artifact).load(folder)


def test_a_row_names_what_its_strategy_used_and_the_config_it_is_of(tmp_path: Path) -> None:
    table = saved(AcceptanceTable([5] * 20, [3] * 20, origin()), tmp_path / "table")
    profile = HardwareProfile(1.0, {1: 2.0}, 0.1, origin(None))  # measured on the spot
    config = saved(DecodingConfig("spide", {"tau": 0.4}, {}, origin("6" * 64)), tmp_path / "config")
    resources = StrategyResources(
        {"acceptance_table": table, "hardware_profile": profile, "decoding_config": config}
    )
    used = {"acceptance_table": table.digest, "hardware_profile": None}
    assert origins("spide", {"tau": 0.4}, resources) == {
        "artifacts": used,
        "config_digest": config.digest,
        "trace_digest": "6" * 64,
    }
    assert origins("spide", {"tau": 0.5}, resources) == {
        "artifacts": used,
        "config_digest": None,
        "trace_digest": "7" * 64,
    }
    assert origins("vanilla_sd", {}, resources) == {
        "artifacts": {},
        "config_digest": None,
        "trace_digest": None,
    }
    assert origins("spide", {"tau": 0.4}, StrategyResources()) == {
        "artifacts": {},
        "config_digest": None,
        "trace_digest": None,
    }
    assert len({table.digest, config.digest, None}) == 3


def test_artifacts_of_several_traces_name_none(tmp_path: Path) -> None:
    profile = HardwareProfile(1.0, {1: 2.0}, 0.1, origin("6" * 64))
    resources = StrategyResources(
        {"acceptance_table": AcceptanceTable.empty(origin()), "hardware_profile": profile}
    )
    assert origins("spide", {}, resources)["trace_digest"] is None


def test_the_rows_of_a_bench_carry_them(tmp_path: Path) -> None:
    table = saved(AcceptanceTable([5] * 20, [3] * 20, origin()), tmp_path / "table")
    resources = StrategyResources(
        {
            "acceptance_table": table,
            "hardware_profile": HardwareProfile(1.0, {1: 2.0}, 0.1, origin(None)),
        }
    )
    report = run_bench(
        table_pair(),
        [StrategyChoice("spide")],
        [Prompt("p", None, ["hello"])],
        resources,
        BenchSettings(max_tokens=8),
        cost_ratios=False,
    ).to_json()
    assert report["strategies"]["spide"]["artifacts"] == {
        "acceptance_table": table.digest,
        "hardware_profile": None,
    }
    assert report["strategies"]["spide"]["trace_digest"] == "7" * 64
    assert report["strategies"]["autoregressive"]["artifacts"] == {}
