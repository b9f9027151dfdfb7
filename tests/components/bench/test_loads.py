"""Strategies and peers at several numbers of requests at once: the table's rows."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from draftwell.components.bench.loads import level_table, measure_levels
from draftwell.components.bench.settings import BenchSettings
from draftwell.components.prompts.prompt import Prompt
from draftwell.serving.runtime.pair import LoadedPair
from draftwell.serving.runtime.strategies import StrategyChoice, StrategyResources
from tests.support.models.tiny import llama_pair
from tests.support.peers.environments import install

PROMPTS = [Prompt(f"p{i}", None, [text]) for i, text in enumerate(["abcab", "hello", "xyz"])]


@pytest.fixture
def pair(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> LoadedPair:
    """A tiny pair whose modules say that they were loaded from a folder."""
    loaded = llama_pair(slots=2)
    for role, module in loaded.modules.items():
        module.save_pretrained(tmp_path / role)
        monkeypatch.setattr(module, "name_or_path", str(tmp_path / role))
    return loaded


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_every_contender_has_a_row_at_every_level(
    pair: LoadedPair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, temperature: float
) -> None:
    install(tmp_path / "peers", monkeypatch)
    settings = BenchSettings(max_tokens=6, temperature=temperature, peers=("vllm",), threads=1)
    report = measure_levels(
        pair,
        pair,
        StrategyResources(),
        [StrategyChoice("prompt_lookup")],
        PROMPTS,
        [1, 2],
        settings,
        left_out={},
    )
    json.dumps(report)
    labels = ["autoregressive", "prompt_lookup"]
    labels += [f"vllm/{name}" for name in ("autoregressive", "ngram", "draft_model")]
    assert [(row["label"], row["at_once"]) for row in report["rows"]] == [
        (label, level) for level in (1, 2) for label in labels
    ]
    ours = [row for row in report["rows"] if "/" not in row["label"]]
    if temperature == 0:
        assert all(row["identical"] == row["prompts"] == len(PROMPTS) for row in ours)
    else:
        assert all(row["identical"] is None for row in report["rows"])
    assert [row["ratio"] for row in ours if row["label"] == "autoregressive"] == [1.0, 1.0]
    assert all(row["first_token_ms"] > 0 for row in report["rows"])
    assert level_table(report).row_count == len(report["rows"])


def test_a_peer_with_whole_weights_only_is_left_out_beside_rounded_ones(
    pair: LoadedPair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(tmp_path / "peers", monkeypatch)
    left_out: dict[str, str] = {}
    monkeypatch.setattr(pair, "dtype", "float32-int8")
    settings = BenchSettings(max_tokens=4, peers=("vllm",), threads=1)
    report = measure_levels(
        pair,
        llama_pair(slots=1),
        StrategyResources(),
        [],
        PROMPTS,
        [1],
        settings,
        left_out=left_out,
    )
    assert "int8" in report["left_out"]["vllm"]
    assert [row["label"] for row in report["rows"]] == ["autoregressive"]
