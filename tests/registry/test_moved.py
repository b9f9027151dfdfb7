"""A home that was renamed, moved or copied, or that has an odd name."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from draftwell.registry.releases import record_gate
from draftwell.registry.store import Store
from tests.support.loop.publishing import Make, forget_places, publish, table, verdict, verifier

MARK = "f" * 64


def files_below(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("how", ["moved", "copied"])
def test_what_was_published_before_is_read_and_gated_at_the_new_place(
    make_release: Make, store: Store, tmp_path: Path, how: str
) -> None:
    made = make_release("one")
    old, new = tmp_path / "registry", tmp_path / "new home" / "registry"
    new.parent.mkdir()
    if how == "moved":
        old.rename(new)
    else:
        shutil.copytree(old, new)
    before = files_below(old)

    forget_places()  # as a new process, which has not opened the old one
    there = Store(f"sqlite:///{new}/mlflow.db")
    for kind, version in made.pins.items():
        there.download(there.resolve(kind, "tiny", version), tmp_path / "down" / kind)
    record_gate(there, verdict(made), words="good")
    found = publish(there, verifier(made.fingerprint), tmp_path / "verifier")
    assert str(new) in found.source
    assert files_below(old) == before
    assert [path.name for path in (new / "artifacts" / "tiny").rglob("gates")] == ["gates"]


def test_a_home_behind_a_link_stays_as_it_is(store: Store, tmp_path: Path) -> None:
    made = publish(store, table(MARK), tmp_path / "table")
    (tmp_path / "link").symlink_to(tmp_path / "registry")
    there = Store(f"sqlite:///{tmp_path}/link/mlflow.db")
    assert there.resolve("acceptance_table", "tiny", 1).source == made.source


@pytest.mark.parametrize(
    "name", ["a space", "qu'o\"te", "100%", "ha#sh", "ünï☃", "a&b=c;d", "[x]*", "new\nline"]
)
def test_a_home_with_an_odd_name(name: str, empty_database: Path, tmp_path: Path) -> None:
    place = tmp_path / name / "mlflow"
    place.mkdir(parents=True)
    shutil.copyfile(empty_database, place / "mlflow.db")
    there = Store(f"sqlite:///{place}/mlflow.db")
    made = publish(there, table(MARK), tmp_path / "table")
    there.log_text(made, "kept", "note.md")
    there.download(made, tmp_path / "down")
    assert Path(made.source).is_relative_to(place)
    assert sorted(os.listdir(tmp_path)) == sorted(["down", "table", name])
