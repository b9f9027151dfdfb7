"""The flow `engine-recalibration`: one step around the plain function, with the time that it may
take."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from draftwell.flows.orchestration import engine_flow
from draftwell.flows.steps.engine.recalibrate import EngineDriftSettings


def test_the_flow_returns_what_became_of_it_and_shows_it(
    pair_file: Path, prefect_server: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    from prefect.client.orchestration import get_client
    from prefect.client.schemas.filters import ArtifactFilter, ArtifactFilterKey

    asked: list[tuple[Any, EngineDriftSettings]] = []

    def instead(space: Any, settings: EngineDriftSettings, say: Any) -> dict[str, Any]:
        asked.append((space, settings))
        return {
            "state": "deployed",
            "why": "a bundle is deployed",
            "bundle": "dist/vllm/tiny/2-cpu",
            "report": {"long": 1},
        }

    monkeypatch.setattr("draftwell.flows.steps.engine.space.engine_space", lambda *of, **_: of[:4])
    monkeypatch.setattr(engine_flow, "recalibrate_engine", instead)
    settings = EngineDriftSettings(pair=str(pair_file), device="cpu", minutes=5.0)
    found = engine_flow.engine_recalibration(settings)
    assert found == {
        "state": "deployed",
        "why": "a bundle is deployed",
        "bundle": "dist/vllm/tiny/2-cpu",
    }
    assert asked == [((str(pair_file), None, "cpu", None), settings)]
    with get_client(sync_client=True) as client:
        [shown] = client.read_artifacts(
            artifact_filter=ArtifactFilter(
                key=ArtifactFilterKey(any_=["engine-recalibration-tiny"])
            )
        )
    assert "a bundle is deployed" in str(shown.data)
