"""Whatever this environment's pip has reported, tests begin without a record of hashes."""

from __future__ import annotations

from pathlib import Path

import pytest

import draftwell.registry.bundles.hashes


@pytest.fixture(autouse=True)
def reports(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder of pip's reports in the place of this environment's."""
    folder = tmp_path_factory.mktemp("reports")
    monkeypatch.setattr(draftwell.registry.bundles.hashes, "reports_folder", lambda: folder)
    return folder
