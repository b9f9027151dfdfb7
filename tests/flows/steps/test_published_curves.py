"""A release draws how the head that it publishes was trained, also where training registered
nothing (`train`, publish=false)."""

from __future__ import annotations

import json
from inspect import unwrap
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from draftwell.flows.context import StepContext
from draftwell.flows.steps.publish import run_publish
from draftwell.serving.artifacts.acceptance_table import AcceptanceTable
from draftwell.serving.artifacts.base import Provenance
from draftwell.serving.artifacts.decoding_config import DecodingConfig
from tests.support.patching import replace_everywhere

CURVE = [[1, 0.25], [2, 0.5]]
MADE = Provenance(pair="tiny", fingerprint="f" * 64)


class EnoughError(Exception):
    """Everything is published."""


@pytest.mark.parametrize("of_this_head", [True, False])
def test_curves_are_those_of_the_published_head(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, of_this_head: bool
) -> None:
    published: dict[str, Any] = {}

    class Store:
        def publish(self, folder: Path, *, metrics: Any = None, **_: Any) -> Any:
            published[folder.name] = metrics
            return SimpleNamespace(version=1)

    def enough(*_: Any, **__: Any) -> None:
        raise EnoughError

    replace_everywhere(monkeypatch, "draftwell.registry.store.Store", Store)
    replace_everywhere(monkeypatch, "draftwell.registry.pairs.model_records", lambda *_: {})
    replace_everywhere(monkeypatch, "draftwell.registry.releases.create_release", enough)
    # any artifact has a digest
    digest = AcceptanceTable([0] * 20, [0] * 20, MADE).save(tmp_path / "eagle3_head")
    DecodingConfig("autoregressive", {}, {}, MADE).save(tmp_path / "decoding_config")
    report = {"digest": digest if of_this_head else "of another", "curves": {"loss": CURVE}}
    (tmp_path / "eagle3_head.json").write_text(json.dumps(report))
    space: Any = SimpleNamespace(
        device="cpu",
        reports=tmp_path,
        device_reports=tmp_path,
        spec=SimpleNamespace(name="tiny"),
        files=lambda: SimpleNamespace(draft=None),
        to_release=lambda device: {
            "eagle3_head": tmp_path / "eagle3_head",
            "decoding_config": tmp_path / "decoding_config",
        },
        folder=lambda kind, device=None: tmp_path / "nowhere",
        shipped_folder=lambda kind: None,
    )
    pair: Any = None
    with pytest.raises(EnoughError):
        unwrap(run_publish)(StepContext(space, pair), {})
    assert published == {
        "eagle3_head": {"loss": CURVE} if of_this_head else {},
        "decoding_config": None,
    }
