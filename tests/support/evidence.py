"""Results of others' benchmark tools: tests/components/gate/test_evidence_files.py says which of
them were measured and which made by hand."""

from __future__ import annotations

from pathlib import Path

from tests.support.paths import REPO

DATA = REPO / "tests" / "components" / "gate" / "evidence_data"


def place(name: str) -> Path:
    """A file of the data, or a folder of a tool that writes one."""
    return next(path for path in sorted(DATA.iterdir()) if path.stem == name)
