"""A collection that is killed with SIGKILL, at any moment and again and again, ends with the digest
of an unbroken one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from draftwell.components.collect import work as collection
from draftwell.components.collect.plan import is_complete, read_plan
from tests.components.collect.killed_collector import FILES, POINTS, SHARDS, collect
from tests.support.killing import child
from tests.support.models.table_model import TableModel


@pytest.fixture(scope="module", autouse=True)
def shard_size() -> Iterator[None]:
    """`collect` of the child sets it here too; it is put back for other files."""
    before = collection.SHARD_PROMPTS
    yield
    collection.SHARD_PROMPTS = before


@pytest.fixture(scope="module")
def digest(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Of an unbroken run."""
    trace = collect(tmp_path_factory.mktemp("whole"))
    assert len(trace.shards) == SHARDS
    return trace.digest()


def kill(folder: Path, point: str, number: int) -> bool:
    """Run a child until it dies; False where it ended before that."""
    return child("tests.components.collect.killed_collector", folder, point, number).returncode != 0


def check_end(folder: Path, digest: str) -> None:
    """Whole, the same, and nothing half-written beside it."""
    assert collect(folder).digest() == digest
    assert is_complete(folder)
    assert sorted(path.name for path in folder.iterdir()) == [
        ".lock",
        "digest.json",
        "plan.json",
        *(f"shard-{i:05d}.parquet" for i in range(SHARDS)),
    ]


def test_killed_before_anything_is_bound(tmp_path: Path, digest: str) -> None:
    assert kill(tmp_path, "fsync", 1)
    assert len(list(tmp_path.glob(".plan.json.*"))) == 1
    assert read_plan(tmp_path) is None
    check_end(tmp_path, digest)


def forwards_of(folder: Path) -> int:
    """Forwards of an unbroken run."""
    calls = 0
    real = TableModel.forward

    def count(self: TableModel, rows: object) -> object:
        nonlocal calls
        calls += 1
        return real(self, rows)  # type: ignore[arg-type]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TableModel, "forward", count)
        collect(folder)
    return calls


@pytest.mark.slow
def test_killed_at_every_kind_of_moment(tmp_path: Path, digest: str) -> None:
    forwards = forwards_of(tmp_path / "counted")
    moments = [f"forward-{number}" for number in (1, forwards // 3, forwards // 2, forwards)]
    moments += [f"{point}-{number}" for point in POINTS[1:] for number in range(1, FILES + 1)]
    codes = child("tests.components.collect.killed_collector", tmp_path, *moments).stdout.split()
    assert codes == ["-9"] * len(moments)
    half = tmp_path / "rename-3"  # the plan, a shard, and half of the next
    assert [path.name for path in half.glob("shard-*")] == ["shard-00000.parquet"]
    assert len(list(half.glob(".shard-00001*"))) == 1
    assert not is_complete(half)
    for moment in moments:
        check_end(tmp_path / moment, digest)


@pytest.mark.slow
def test_killed_again_and_again(tmp_path: Path, digest: str) -> None:
    """Each run dies at its second file, so that it gets one further; the last one has nothing left
    to die of."""
    deaths = 0
    while kill(tmp_path, "renamed" if deaths % 2 else "rename", 1 if deaths % 2 else 2):
        deaths += 1
        assert deaths < 20, "a killed run makes no progress"
    assert deaths >= SHARDS
    check_end(tmp_path, digest)
