"""A distillation that was killed goes on and ends as an unbroken one does, bit for bit."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.killing import child

CHILD = "tests.components.distil.distil_child"


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Digest of the draft, steps, agreement and curve of a run that nobody stopped."""
    return child(CHILD, tmp_path_factory.mktemp("unbroken") / "work").stdout


@pytest.mark.slow
@pytest.mark.parametrize(
    "point",
    [("shard-", "before", "2"), ("checkpoint", "before", "9"), ("checkpoint", "behind", "14")],
)
def test_killed_at_any_moment(unbroken: str, tmp_path: Path, point: tuple[str, str, str]) -> None:
    folder = tmp_path / "work"
    assert child(CHILD, folder, *point).returncode == -9
    assert child(CHILD, folder).stdout == unbroken
    assert not list(folder.rglob("*.partial"))
