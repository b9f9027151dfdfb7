"""The table of artifact kinds agrees with the classes, with the strategies, and with what is
written to disk."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest

from draftwell.components.drift.drift import WatchedArtifacts
from draftwell.serving.artifacts.kinds import KINDS, READ_BY_STRATEGIES, ArtifactKind, find_kind
from draftwell.serving.runtime.strategies import STRATEGIES
from tests.support.errors import raises_code
from tests.support.loop.publishing import every_kind


@pytest.mark.parametrize("kind", KINDS.values(), ids=list(KINDS))
def test_a_class_is_what_its_row_says(kind: ArtifactKind) -> None:
    found = kind.load_class()
    assert (found.kind, found.schema_version) == (kind.name, kind.schema_version)


def test_the_files_on_disk_are_those_of_the_table(tmp_path: Path) -> None:
    for artifact in every_kind("f" * 64):
        folder = tmp_path / artifact.kind
        folder.mkdir()
        artifact.write_files(folder)
        assert {path.name for path in folder.iterdir()} == set(KINDS[artifact.kind].files)


def test_what_strategies_read_is_in_the_table() -> None:
    assert {name for strategy in STRATEGIES.values() for name in strategy.reads()} == set(
        READ_BY_STRATEGIES
    )


def test_monitoring_takes_every_watched_kind() -> None:
    roles = {kind.drift_role for kind in KINDS.values() if kind.drift_role}
    assert roles <= {field.name for field in fields(WatchedArtifacts)}


def test_an_unknown_kind_is_refused_by_name() -> None:
    with raises_code("unknown_artifact_kind", "thesaurus"):
        find_kind("thesaurus")


def test_the_table_imports_no_torch() -> None:
    code = (
        "import sys, draftwell.serving.artifacts.kinds; sys.exit('torch' in sys.modules or "
        "'numpy' in "
        "sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
