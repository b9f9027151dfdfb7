"""Reports of a bench survive writing and reading."""

from __future__ import annotations

import json
from typing import Any

import pytest

from draftwell.components.bench.bench import run_bench
from draftwell.components.bench.schema import SCHEMA, BenchReport
from draftwell.components.bench.settings import BenchSettings
from draftwell.components.prompts.prompt import Prompt
from draftwell.serving.runtime.strategies import StrategyChoice, StrategyResources
from tests.support.models.tiny import llama_pair

PEER_HAS_NOT = {"target_calls", "draft_calls", "mat", "time_share", "artifacts"}


@pytest.fixture(scope="module")
def written() -> dict[str, Any]:
    report = run_bench(
        llama_pair(slots=1),
        [StrategyChoice("vanilla_sd")],
        [Prompt("p", None, ["hello hello"])],
        StrategyResources(),
        BenchSettings(max_tokens=8, peers=("transformers",), threads=1),
    )
    return json.loads(json.dumps(report.to_json(), allow_nan=False))


def test_a_report_survives_being_written_and_read(written: dict[str, Any]) -> None:
    assert BenchReport.model_validate(written).to_json() == written
    assert written["schema_version"] == SCHEMA


def test_a_peer_has_no_counts(written: dict[str, Any]) -> None:
    for name in ("autoregressive", "assisted", "prompt_lookup"):
        assert not PEER_HAS_NOT & set(written["peers"]["transformers"][name])
    assert set(written["strategies"]["vanilla_sd"]) >= PEER_HAS_NOT
