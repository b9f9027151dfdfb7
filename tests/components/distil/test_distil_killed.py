"""A distillation that was killed goes on and ends as an unbroken one does, bit for bit."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.paths import REPO


def child(folder: Path, *point: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tests.components.distil.distil_child", str(folder), *point]
    return subprocess.run(command, cwd=REPO, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Digest of the draft, steps, agreement and curve of a run that nobody stopped."""
    done = child(tmp_path_factory.mktemp("unbroken") / "work")
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
@pytest.mark.parametrize(
    "point",
    [("shard-", "before", "2"), ("checkpoint", "before", "9"), ("checkpoint", "behind", "14")],
)
def test_killed_at_any_moment(unbroken: str, tmp_path: Path, point: tuple[str, str, str]) -> None:
    folder = tmp_path / "work"
    assert child(folder, *point).returncode == -9
    done = child(folder)
    assert done.returncode == 0, done.stderr
    assert done.stdout == unbroken
    assert not list(folder.rglob("*.partial"))
