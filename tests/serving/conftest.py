"""Fixtures of the serving tests."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path

import pytest

from draftwell.serving.runtime.commands import Role


@pytest.fixture(scope="session")
def tiny_models(tmp_path_factory: pytest.TempPathFactory) -> dict[Role, Path]:
    """The tiny pair as model folders; nobody may write to them."""
    from tests.support.server.bundles import save_tiny_models

    return save_tiny_models(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module", autouse=True)
def what_libraries_hold_is_no_garbage() -> Iterator[None]:
    """Servers that start or switch look twice at all that is held (`memory.collect_garbage`), which
    beside pytest's own objects takes half a second: here at what the module has made alone."""
    thaw = gc.unfreeze
    gc.freeze()
    with pytest.MonkeyPatch.context() as patch:
        for name in ("freeze", "unfreeze"):
            patch.setattr(gc, name, lambda: None)
        yield
    thaw()
