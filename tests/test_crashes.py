"""Everything that is written survives a kill and a loss of power: after a crash at any step the old
or the new one is there, whole, and what was reported as done stays."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.lost_writes import outcomes
from tests.support.writers import WRITERS


@pytest.mark.parametrize("name", WRITERS)
def test_a_crash_leaves_the_old_or_the_new_one(tmp_path: Path, name: str) -> None:
    it = WRITERS[name]
    root, scratch = tmp_path / "root", tmp_path / "left"
    root.mkdir()
    first = outcomes(root, lambda: it.write(root, 1), it.read, scratch / "first")
    assert first == ({None, 1}, {1})
    if it.replaces:
        second = outcomes(root, lambda: it.write(root, 2), it.read, scratch / "second")
        assert second == ({1, 2}, {2})
