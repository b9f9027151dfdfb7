"""Which compiled layers a pair uses on this machine."""

from __future__ import annotations

from pathlib import Path

import pytest

from draftwell.serving.artifacts.compiled_libraries import (
    LIBRARY,
    libraries_folder,
    note_used,
    used_by,
)


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("DRAFTWELL_HOME", str(tmp_path / "home"))
    return libraries_folder()


def kept(folder: Path, key: str) -> Path:
    file = folder / key / LIBRARY
    file.parent.mkdir(parents=True)
    file.write_text(key)
    return file


def test_what_a_pair_uses_is_noted_once_and_found_by_its_fingerprint(
    home: Path, tmp_path: Path
) -> None:
    one, two, bundled = kept(home, "1"), kept(home, "2"), kept(tmp_path / "bundle", "3")
    note_used("print", [two, one, two, bundled])
    assert used_by("print") == [one, two], "a bundle's own libraries are no part of this machine's"
    written = (home / "print.json").stat().st_mtime_ns
    note_used("print", [one, two])
    note_used("print", [])
    assert (home / "print.json").stat().st_mtime_ns == written
    note_used("print", [three := kept(home, "4")])
    assert used_by("print") == [one, two, three], (
        "a command that loads one of the models leaves the others noted"
    )
    one.unlink()
    assert used_by("print") == [two, three]


@pytest.mark.parametrize("text", ["", "[]", '{"libraries": 3}', '{"libraries": [3]}'])
def test_an_unreadable_note_is_no_note(home: Path, text: str) -> None:
    home.mkdir(parents=True)
    assert used_by("print") == []
    (home / "print.json").write_text(text)
    assert used_by("print") == []


def test_a_home_that_may_only_be_read_is_no_error(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError("read-only")

    monkeypatch.setattr("draftwell.serving.artifacts.compiled_libraries.write_json", refuse)
    note_used("print", [kept(home, "1")])
    assert used_by("print") == []
