"""What a recalibration makes again of what drafts by itself, and what it leaves to a person."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from draftwell.components.prompts.prompt import Prompt
from draftwell.flows.context import StepContext
from draftwell.flows.steps.monitor import heads_left
from draftwell.flows.steps.reference_traces import Served
from draftwell.flows.steps.train import renew_datastore
from draftwell.serving.artifacts.base import Provenance
from draftwell.serving.artifacts.datastore import Datastore
from draftwell.serving.artifacts.decoding_config import DecodingConfig, SampledChoice
from tests.support.collecting import collect_traces
from tests.support.models.tiny import llama_pair
from tests.support.patching import replace_everywhere

ORIGIN = Provenance(pair="tiny", fingerprint="f" * 64)
ROWS = [Prompt(f"p{i}", None, [text]) for i, text in enumerate(["abcab cabinet", "hello hello"])]


def config(strategy: str, sampled: SampledChoice | None = None) -> DecodingConfig:
    return DecodingConfig(strategy, {}, {}, ORIGIN, sampled)


@pytest.mark.parametrize(
    ("strategy", "pins", "tokens_before", "made"),
    [
        ("rest", {"datastore": 1}, 0, True),
        ("hybrid", {"datastore": 1}, 2, True),
        ("vanilla_sd", {"datastore": 1}, 0, False),
        ("hybrid", {}, 0, False),
        ("rest", {"datastore": 1}, 10**4, False),
    ],
)
def test_the_champions_datastore_is_made_again_of_new_traces(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    strategy: str,
    pins: dict[str, int],
    tokens_before: int,
    made: bool,
) -> None:
    """A stale one holds what nobody asks for any more; a large one is not given up for a few
    texts."""
    pair = llama_pair(noise=0.02)
    collect_traces(pair, ROWS, tmp_path / "traces", max_tokens=12, rollout=3, temperature=0.0)
    before = (
        Datastore.from_texts([np.arange(tokens_before, dtype=np.int32) % 7], ORIGIN)
        if tokens_before
        else None
    )
    saved: list[Any] = []
    said: list[str] = []
    space: Any = SimpleNamespace(
        traces=tmp_path / "traces",
        traces_at=lambda temperature: tmp_path / "traces",
        begin=lambda: None,
        found=lambda *_: before,
        save=saved.append,
        say=said.append,
        reports=tmp_path,
        spec=SimpleNamespace(name="tiny"),
    )
    replace_everywhere(
        monkeypatch,
        "draftwell.flows.steps.champion.champion_of",
        lambda *_: SimpleNamespace(pins=pins),
    )
    replace_everywhere(
        monkeypatch, "draftwell.flows.steps.tune.champion_decoding", lambda *_: config(strategy)
    )
    report = renew_datastore(StepContext(space, pair), "cpu")
    assert [artifact.kind for artifact in saved] == (["datastore"] if made else [])
    assert (report is not None) is made
    assert bool(said) is (tokens_before == 10**4)


def test_a_drift_names_the_command_for_each_head_that_is_drafted_with() -> None:
    head: Any = object()

    def lines(
        strategy: str, sampled: SampledChoice | None = None, kind: str = "eagle3_head"
    ) -> list[str]:
        return heads_left(
            Served(
                "release 3", "f" * 64, {"decoding_config": config(strategy, sampled), kind: head}
            ),
            "mine",
        )

    for found in (
        lines("eagle3"),
        lines("hybrid"),
        lines("autoregressive", SampledChoice(1.0, "eagle3", {})),
    ):
        [line] = found
        assert "`draftwell step train --kind eagle3_head --pair mine`" in line
    assert "medusa_heads" in lines("medusa", kind="medusa_heads")[0]
    assert lines("vanilla_sd") == []
    assert heads_left(Served("the workspace", "f" * 64, {"eagle3_head": head}), "mine") == []
