"""The library is made once, found again, and done without where it cannot be had."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from draftwell.serving.artifacts.compiled_libraries import LIBRARY, libraries_folder
from draftwell.serving.runtime.models.native import library
from draftwell.serving.runtime.models.native.library import build, find, find_library, key
from tests.support.errors import raises_code
from tests.support.models.by_library import by_library, compiles
from tests.support.models.llama_shapes import llama


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine that has compiled nothing yet."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return libraries_folder()


@compiles
def test_it_is_made_once_for_all_models(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert find_library("auto", []) is not None
    assert [file.relative_to(home) for file in home.glob("*/*")] == [Path(key()) / LIBRARY]
    monkeypatch.setattr(library, "build", lambda file: pytest.fail("made again"))
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


def test_a_compiler_that_fails_is_told_with_what_it_says(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    failing = tmp_path / "g++"
    failing.write_text("#!/bin/sh\necho 'no room left' >&2; exit 1\n")
    failing.chmod(0o755)
    monkeypatch.setenv("CXX", str(failing))
    with raises_code("compile_failed", "no room left"):
        find_library("on", [])
    assert not list(home.glob("*/*"))


def test_a_broken_library_is_named(home: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = home / key() / LIBRARY
    file.parent.mkdir(parents=True)
    file.write_bytes(b"no library")
    with raises_code("broken_compiled_layer", str(file)):
        find_library("on", [])
    assert find_library("auto", []) is None


@compiles
def test_a_bundles_library_comes_first(home: Path, tmp_path: Path) -> None:
    build(tmp_path / "bundle" / key() / LIBRARY)
    assert find([tmp_path / "bundle", home]).is_relative_to(tmp_path / "bundle")
    assert find_library("on", [tmp_path / "bundle"]) is not None
    assert not home.exists()


def test_another_processor_or_code_has_another_one(monkeypatch: pytest.MonkeyPatch) -> None:
    mine = key()
    monkeypatch.setattr(library, "cpu_flags", lambda: "avx2 of another kind")
    assert key() != mine


@compiles
def test_a_bundles_library_that_does_not_load_gives_way_to_this_machines(
    home: Path, tmp_path: Path
) -> None:
    file = tmp_path / "bundle" / key() / LIBRARY
    file.parent.mkdir(parents=True)
    file.write_bytes(b"of a newer C library")
    assert find_library("on", [tmp_path / "bundle"]) is not None
    assert (home / key() / LIBRARY).is_file()


@compiles
def test_code_that_everybody_may_have_written_is_not_run(home: Path) -> None:
    build(file := home / key() / LIBRARY)
    file.chmod(0o777)
    with raises_code("foreign_library", str(file)):
        find_library("on", [])
