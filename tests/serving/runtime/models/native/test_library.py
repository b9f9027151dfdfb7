"""The library is made once, found again, verified, and done without where it cannot be had."""

from __future__ import annotations

import logging
import os
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from draftwell.serving.artifacts.compiled_libraries import COMPILED, libraries_folder, own_folder
from draftwell.serving.runtime.models.native import library
from draftwell.serving.runtime.models.native.library import build, find, find_library, key, load
from tests.support.errors import raises_code
from tests.support.models.by_library import by_library, compiles
from tests.support.models.llama_shapes import llama


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine that has compiled nothing yet."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return libraries_folder()


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A library that was compiled."""
    return build(tmp_path_factory.mktemp("compiled"))


Compiler = Callable[[str], Path]


@pytest.fixture
def compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Compiler:
    """Makes the machine's compiler a script, which finds where it is to write in `$out`, and counts
    its calls in the file that it returns."""

    def made(script: str) -> Path:
        calls, tool = tmp_path / "calls", tmp_path / "g++"
        tool.write_text(
            f'#!/bin/sh\necho call >> {calls}\nwhile [ "$1" != -o ]; do shift; done; out=$2\n'
            f"{script}\n"
        )
        tool.chmod(0o755)
        monkeypatch.setenv("CXX", str(tool))
        return calls

    return made


def put(folder: Path, compiled: Path, data: bytes | None = None) -> Path:
    """A library in its place in a folder, with other bytes than its name says where they are
    given."""
    file = folder / key() / compiled.name
    if folder == libraries_folder():
        own_folder("compiled", key())
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(compiled.read_bytes() if data is None else data)
    file.chmod(0o600)
    return file


@compiles
def test_it_is_made_once_for_all_models(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert find_library("auto", []) is not None
    (file,) = home.glob("*/*.so")
    assert file == find(home)
    for place in (file.parent, home, home.parent):
        assert stat.S_IMODE(place.stat().st_mode) == 0o700
    monkeypatch.setattr(library, "build", lambda folder: pytest.fail("made again"))
    assert by_library(llama()).library is by_library(llama(hidden_size=64)).library


def test_off_looks_for_none(home: Path) -> None:
    assert find_library("off", []) is None
    assert not home.exists()


def test_without_a_compiler_layers_run_by_torch_unless_it_is_asked_for(
    home: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("CXX", "/nowhere/g++")
    with caplog.at_level(logging.WARNING):
        assert find_library("auto", []) is None
    assert "install g++" in caplog.text
    with raises_code("no_compiler", "install g++", "compile=off"):
        find_library("on", [])


def test_a_compiler_that_fails_is_told_with_what_it_says(home: Path, compiler: Compiler) -> None:
    compiler("echo 'no room left' >&2; exit 1")
    with raises_code("compile_failed", "no room left"):
        find_library("on", [])
    assert not list(home.glob("*/*.so"))


@compiles
def test_a_compiler_that_fails_once_is_tried_again(
    home: Path, compiled: Path, compiler: Compiler, caplog: pytest.LogCaptureFixture
) -> None:
    calls = compiler(
        f'[ "$(wc -l < {home.parent.parent}/calls)" = 2 ] || exit 1; cp {compiled} $out'
    )
    assert find_library("on", []) is not None
    assert calls.read_text().split() == ["call"] * 2
    assert "trying once more" in caplog.text


@compiles
@pytest.mark.parametrize("kept", [0, 1000], ids=["forged", "cut short"])
def test_a_library_that_is_not_what_its_name_says_is_compiled_again(
    home: Path, compiled: Path, compiler: Compiler, caplog: pytest.LogCaptureFixture, kept: int
) -> None:
    """It is never loaded: what it does when that happens is done by then."""
    file = put(home, compiled, compiled.read_bytes()[:kept] or b"forged")
    with raises_code("forged_library", str(file)):
        load(file)
    calls = compiler(f"cp {compiled} $out")
    assert find_library("on", []) is not None
    assert file.read_bytes() == compiled.read_bytes()
    assert str(file) in caplog.text
    assert "compiled again" in caplog.text
    assert calls.read_text().split() == ["call"]


def test_a_library_that_never_runs_is_named(home: Path, compiler: Compiler) -> None:
    calls = compiler("echo no library > $out")
    with raises_code("broken_compiled_layer", str(home)):
        find_library("on", [])
    assert calls.read_text().split() == ["call"] * 2, "compiled again"
    assert find_library("auto", []) is None


@compiles
def test_a_bundles_library_comes_first(home: Path, compiled: Path, tmp_path: Path) -> None:
    put(tmp_path / "bundle", compiled)
    assert find_library("on", [tmp_path / "bundle"]) is not None
    assert not home.exists()


def test_another_processor_or_code_has_another_one(monkeypatch: pytest.MonkeyPatch) -> None:
    mine = key()
    monkeypatch.setattr(library, "cpu_flags", lambda: "avx2 of another kind")
    assert key() != mine


@compiles
def test_a_bundles_library_that_does_not_load_gives_way_to_this_machines(
    home: Path, compiled: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    other, own = put(tmp_path / "bundle", compiled, b"forged"), put(home, compiled)
    with caplog.at_level(logging.INFO):
        assert find_library("on", [tmp_path / "bundle"]) is load(own)
    assert str(other) in caplog.text


def foreign(path: Path) -> None:
    if os.getuid() != 0:
        pytest.skip("only root can give a file away")
    os.chown(path, 65534, -1)


def linked(path: Path) -> None:
    path.rename(path.with_name("elsewhere"))
    path.symlink_to("elsewhere")


OPENED = {"a group's": 0o770, "everybody's": 0o702}
SPOILT: dict[str, Callable[[Path], None]] = {
    "another's": foreign,
    "a link": linked,
    **{name: lambda path, mode=mode: path.chmod(mode) for name, mode in OPENED.items()},
}
LEVELS = ("file", "key", "compiled", "draftwell")


@pytest.mark.parametrize(
    ("level", "how"),
    [(level, how) for level in LEVELS for how in SPOILT if level == "file" or how not in OPENED],
)
def test_code_that_others_may_have_written_is_not_run(
    home: Path, level: str, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(library, "load", lambda file: pytest.fail("loaded"))
    file = put(home, Path(f"{'0' * 64}.so"), b"code")
    place = (file, *file.parents)[LEVELS.index(level)]
    SPOILT[how](place)
    with raises_code("foreign_library", f"{place} "):
        find_library("on", [])


@pytest.mark.parametrize("mode", OPENED.values(), ids=OPENED)
@pytest.mark.parametrize("level", LEVELS[1:])
def test_a_folder_of_ones_own_that_others_could_write_to_is_emptied_and_closed(
    home: Path, level: str, mode: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a umask of 002 leaves it, with which earlier versions made it."""
    monkeypatch.setattr(library, "load", lambda file: pytest.fail("loaded"))
    file = put(home, Path(f"{'0' * 64}.so"), b"code")
    place = (file, *file.parents)[LEVELS.index(level)]
    place.chmod(mode)
    own_folder(COMPILED, key())
    assert not file.exists()
    assert place.stat().st_mode & 0o777 == 0o700


def test_without_a_place_for_a_cache_the_variable_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with raises_code("no_cache_folder", "XDG_CACHE_HOME"):
        find_library("on", [])
