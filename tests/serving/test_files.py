"""Files, folders and links that survive a kill and a loss of power at every step."""

import errno
import fcntl
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from draftwell.serving import files
from tests.support.lost_writes import outcomes

Outcomes = Callable[..., tuple[set[object], set[object]]]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """The folder that is watched."""
    (tmp_path / "root").mkdir()
    return tmp_path / "root"


@pytest.fixture
def after(root: Path, tmp_path: Path) -> Outcomes:
    """What a crash on the way, and one behind the end, leave in the watched folder."""
    return lambda act, read: outcomes(root, act, read, tmp_path / "left")


def text_of(*names: str) -> Callable[[Path], str | None]:
    def read(root: Path) -> str | None:
        path = root.joinpath(*names)
        return path.read_text() if path.exists() else None

    return read


def contents(folder: Path) -> tuple[str, ...] | None:
    """The texts of a folder with a folder in it; None where it is not there."""
    if not folder.exists():
        return None
    return tuple((folder / name).read_text() for name in ("a", "deep/b"))


def fill(folder: Path, text: str) -> None:
    (folder / "deep").mkdir(parents=True)
    for name in ("a", "deep/b"):
        (folder / name).write_text(text)


def write(folder: Path, text: str) -> None:
    with files.whole_folder(folder) as place:
        fill(place, text)


def test_a_file_in_a_new_folder_is_whole_or_away_and_then_on_disk(
    root: Path, after: Outcomes
) -> None:
    path = root / "new" / "deep" / "file"
    assert after(lambda: files.write_text(path, "new"), text_of("new", "deep", "file")) == (
        {None, "new"},
        {"new"},
    )


def test_a_file_is_replaced_at_once(root: Path, after: Outcomes) -> None:
    (root / "file").write_text("old")
    assert after(lambda: files.write_text(root / "file", "new"), text_of("file")) == (
        {"old", "new"},
        {"new"},
    )
    assert os.listdir(root) == ["file"]


def test_a_folder_is_whole_or_away_and_then_on_disk(root: Path, after: Outcomes) -> None:
    assert after(
        lambda: write(root / "x" / "folder", "new"), lambda it: contents(it / "x/folder")
    ) == (
        {None, ("new", "new")},
        {("new", "new")},
    )


def test_a_folder_is_replaced_at_once(root: Path, after: Outcomes) -> None:
    """At no moment is the place empty."""
    fill(root / "folder", "old")
    assert after(lambda: write(root / "folder", "new"), lambda it: contents(it / "folder")) == (
        {("old", "old"), ("new", "new")},
        {("new", "new")},
    )
    assert os.listdir(root) == ["folder"]


def test_where_folders_cannot_change_places_the_old_one_can_be_put_back(
    root: Path, after: Outcomes, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(root / "folder", "old")
    monkeypatch.setattr(files, "_exchange", lambda *_: False)

    def read(left: Path) -> object:
        files.put_back(left)
        return contents(left / "folder")

    found = after(lambda: write(root / "folder", "new"), read)
    assert found == ({("old", "old"), ("new", "new")}, {("new", "new")})
    assert os.listdir(root) == ["folder"]


def test_a_rest_beside_its_folder_is_not_put_back(root: Path) -> None:
    fill(root / "folder", "new")
    fill(files.set_aside(root / "folder"), "old")
    files.put_back(root)
    assert contents(root / "folder") == ("new", "new")


@pytest.mark.parametrize("exchange", [True, False])
def test_an_error_leaves_the_old_folder_and_no_rest(
    root: Path, monkeypatch: pytest.MonkeyPatch, exchange: bool
) -> None:
    fill(root / "folder", "old")
    if not exchange:
        monkeypatch.setattr(files, "_exchange", lambda *_: False)
    real = os.replace

    def full(source: Path, to: Path) -> None:
        if to == root / "folder" and not to.exists() and source != files.set_aside(to):
            raise OSError(errno.ENOSPC, "No space left on device")
        real(source, to)

    def refused(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    if exchange:
        monkeypatch.setattr(files, "_exchange", refused)
    with pytest.raises(OSError, match="No space"):
        write(root / "folder", "new")
    assert (os.listdir(root), contents(root / "folder")) == (["folder"], ("old", "old"))


def test_what_the_system_refuses_for_another_reason_is_an_error(root: Path) -> None:
    fill(root / "one", "x")
    with pytest.raises(FileNotFoundError):
        files._exchange(root / "one", root / "missing")


def test_a_link_leads_to_the_old_or_the_new(root: Path, after: Outcomes) -> None:
    for name in ("1-cpu", "2-cpu"):
        (root / name).mkdir()
    (root / "current").symlink_to("1-cpu")
    assert after(
        lambda: files.write_link(root / "current", "2-cpu"),
        lambda it: os.readlink(it / "current"),
    ) == ({"1-cpu", "2-cpu"}, {"2-cpu"})
    assert sorted(os.listdir(root)) == ["1-cpu", "2-cpu", "current"]


def test_a_removed_folder_is_whole_or_away(root: Path, after: Outcomes) -> None:
    fill(root / "folder", "old")
    assert after(
        lambda: files.remove_folder(root / "folder", root / ".gone"),
        lambda it: contents(it / "folder"),
    ) == ({("old", "old"), None}, {None})
    assert os.listdir(root) == []


def test_a_file_system_that_syncs_no_folders_is_no_error(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = [errno.EINVAL, errno.EIO]

    def fsync(handle: int) -> None:
        raise OSError(answers.pop(0), "refused")

    monkeypatch.setattr(os, "fsync", fsync)
    files.sync(root)
    with pytest.raises(OSError, match="refused"):
        files.sync(root)


def test_all_may_read_a_whole_folder(root: Path) -> None:
    with files.whole_folder(root / "folder") as place:
        (place / "weights").touch(0o600)
        (place / "program").touch(0o700)
    modes = {path.name: path.stat().st_mode & 0o777 for path in root.rglob("*")}
    assert modes == {"folder": 0o755, "weights": 0o644, "program": 0o744}


def test_a_file_system_without_locks_is_used_without_them_and_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    failures = [errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EIO]

    def fail(handle: int, operation: int) -> None:
        raise OSError(failures[0], os.strerror(failures.pop(0)))

    monkeypatch.setattr(fcntl, "flock", fail)
    for count in (1, 2, 3):
        with files.file_lock(tmp_path / "lock", wait=False) as held:
            assert held
        assert len(caplog.records) == count
    with pytest.raises(OSError, match="Input/output"), files.file_lock(tmp_path / "lock"):
        pass


def test_a_device_without_an_end_is_not_read_for_ever(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "MOST_TEXT", 100)
    text = root / "text"
    text.write_text("é" * 50)
    assert files.read_text(text) == "é" * 50
    for longer in (root / "longer", Path("/dev/zero")):
        if longer.parent == root:
            longer.write_text("é" * 51)
        with pytest.raises(OSError, match="File too large"):
            files.read_text(longer)
