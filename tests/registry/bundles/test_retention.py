"""What is served and the newest bundles stay."""

from __future__ import annotations

from pathlib import Path

import pytest

from draftwell.registry.bundles.retention import prune
from tests.support.errors import raises_code


@pytest.fixture
def home(tmp_path: Path) -> Path:
    for name in ("1-cpu", "2-cpu", "2-cpu.2", "9-cpu", "10-cpu", "1-cuda", "notes"):
        (tmp_path / "tiny" / name).mkdir(parents=True)
        (tmp_path / "tiny" / name / "manifest.json").write_text(name)
    (tmp_path / "tiny" / "current").symlink_to("1-cpu")
    return tmp_path / "tiny"


def names(home: Path) -> set[str]:
    return {path.name for path in home.iterdir() if not path.name.startswith(".")}


@pytest.mark.parametrize(
    ("keep", "removed"),
    [(1, ["2-cpu", "2-cpu.2", "9-cpu"]), (2, ["2-cpu", "2-cpu.2"]), (3, ["2-cpu"]), (4, [])],
)
def test_the_oldest_go_and_what_is_served_stays(home: Path, keep: int, removed: list[str]) -> None:
    before = names(home)
    assert [path.name for path in prune(home, keep)] == removed
    assert names(home) == before - set(removed)
    assert prune(home, keep) == []


def test_a_folder_that_is_not_there_and_keeping_none(home: Path, tmp_path: Path) -> None:
    assert prune(tmp_path / "none") == []
    with raises_code("bad_value", "keep 0"):
        prune(home, 0)
