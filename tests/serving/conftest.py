"""Fixtures of the serving tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from draftwell.serving.runtime.commands import Role


@pytest.fixture(scope="session")
def tiny_models(tmp_path_factory: pytest.TempPathFactory) -> dict[Role, Path]:
    """The tiny pair as model folders; nobody may write to them."""
    from tests.support.server.bundles import save_tiny_models

    return save_tiny_models(tmp_path_factory.mktemp("models"))
