"""Bundles of the registry's tests. Whatever this environment's pip has reported, they begin without
a record of hashes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import draftwell.registry.bundles.hashes
from draftwell.registry.bundles.build import build_bundle
from draftwell.registry.pairs import PairSpec
from draftwell.registry.promotion import promote
from draftwell.registry.store import Store
from draftwell.serving.artifacts.pair_files import PairFiles
from tests.support.loop.publishing import KeptRegistry, Make, verdict


@pytest.fixture(autouse=True)
def reports(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder of pip's reports in the place of this environment's."""
    folder = tmp_path_factory.mktemp("reports")
    monkeypatch.setattr(draftwell.registry.bundles.hashes, "reports_folder", lambda: folder)
    return folder


@pytest.fixture
def champion(store: Store, make_release: Make, kept: KeptRegistry) -> Store:
    """The registry with a first champion."""
    made = make_release("release")
    kept.after(store, "promoted", lambda: promote(store, "tiny", "cpu", 1, verdict(made)))
    return store


@pytest.fixture
def build(store: Store, spec: PairSpec, files: PairFiles, tmp_path: Path) -> Make:
    """Builds a bundle of the champion in `dist`, unless told otherwise."""

    def built(**options: Any) -> Path:
        return build_bundle(store, spec, files, **{"out": tmp_path / "dist", **options})

    return built
