"""The wheel in a bundle: `draftwell.serving` alone, runtime and server, under a name of its own.

setuptools builds it, in a process of its own and without network, from a staged copy in which
nothing tells time, machine or user: the same sources give the same bytes. The version ends with a
digest of the sources, so that pip tells two builds apart.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import draftwell
from draftwell import serving
from draftwell.registry.bundles.requirements import PROJECT, runtime_requirements
from draftwell.serving.errors import DraftwellError

NAME = "draftwell-runtime"
EPOCH = "315532800"
"""1980-01-01, the first day that a zip file can name."""
PYPROJECT = """\
[build-system]
requires = ["setuptools>=77"]
build-backend = "setuptools.build_meta"

[project]
name = "{name}"
version = "{version}"
description = "Draftwell's decoding runtime and its server, without the pipeline."
license = "Apache-2.0"
license-files = ["LICENSE*"]
requires-python = ">=3.11"
dependencies = {dependencies}

[project.scripts]
draftwell-serve = "draftwell.serving.server.main:main"

[tool.setuptools.packages.find]
include = ["draftwell*"]

[tool.setuptools.package-data]
"draftwell.serving" = ["**/*"]
"""
BUILD = "import sys; from setuptools.build_meta import build_wheel; build_wheel(sys.argv[1])"


@dataclass(frozen=True)
class Wheel:
    """A built wheel: its file name, which pip reads, its version, and its bytes."""

    name: str
    version: str
    data: bytes


@functools.cache
def runtime_wheel() -> Wheel:
    """The wheel of the runtime that runs here; built once in a process."""
    return build_wheel(Path(serving.__file__).parent)


def build_wheel(package: Path) -> Wheel:
    """Build the runtime's wheel.

    Args:
        package: the folder `serving`.
    Raises:
        DraftwellError: setuptools is missing or refuses.
    """
    with tempfile.TemporaryDirectory() as place:
        staged = Path(place) / "staged"
        return build_staged(staged, _stage(package, staged), "the runtime's wheel")


def build_staged(staged: Path, version: str, what: str) -> Wheel:
    """Build what was staged, next to its folder.

    Args:
        version: that its pyproject.toml states.
        what: it is, for errors.
    Raises:
        DraftwellError: setuptools is missing or refuses (`wheel_not_built`).
    """
    out = staged.parent / "out"
    out.mkdir()
    environment = {**os.environ, "SOURCE_DATE_EPOCH": EPOCH, "PYTHONHASHSEED": "0"}
    done = subprocess.run(
        [sys.executable, "-I", "-c", BUILD, str(out)],
        cwd=staged,
        env=environment,
        umask=0o022,
        capture_output=True,
        text=True,
        check=False,
    )
    built = list(out.glob("*.whl"))
    if done.returncode != 0 or len(built) != 1:
        last = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
        raise DraftwellError(
            f"{what} was not built ({last}): pip install 'setuptools>=77'", code="wheel_not_built"
        )
    return Wheel(built[0].name, version, built[0].read_bytes())


def _stage(package: Path, staged: Path) -> str:
    """Copy the sources, write pyproject.toml next to them, and return the version that it
    states."""
    digest = stage_sources(package, staged / "draftwell")
    top = Path(draftwell.__file__)
    copy(top, staged / "draftwell" / top.name)
    for licence in licences(top.parents[1]):
        copy(licence, staged / licence.name)
    dependencies = json.dumps(runtime_requirements())
    digest.update(dependencies.encode())
    version = f"{importlib.metadata.version(PROJECT)}+{digest.hexdigest()[:12]}"
    project = staged / "pyproject.toml"
    project.write_text(PYPROJECT.format(name=NAME, version=version, dependencies=dependencies))
    project.chmod(0o644)
    return version


def stage_sources(package: Path, staged: Path) -> Any:
    """Copy a package's sources, and return sha256 over their names and contents."""
    digest = hashlib.sha256()
    for file in sorted(_sources(package)):
        name = (Path(package.name) / file.relative_to(package)).as_posix()
        copy(file, staged / name)
        digest.update(json.dumps([name, hashlib.sha256(file.read_bytes()).hexdigest()]).encode())
    return digest


def _sources(package: Path) -> Iterator[Path]:
    """The package's files; what Python or an editor left there is none of them."""
    for file in package.rglob("*"):
        parts = file.relative_to(package).parts
        if (
            file.is_file()
            and "__pycache__" not in parts
            and not any(part.startswith(".") for part in parts)
        ):
            yield file


def licences(root: Path) -> list[Path]:
    """The licence of a checkout, or the one that pip installed with the project."""
    if (beside := root / "LICENSE").is_file():
        return [beside]
    installed = importlib.metadata.files(PROJECT) or []
    return [Path(str(file.locate())) for file in installed if file.name == "LICENSE"][:1]


def copy(file: Path, to: Path) -> None:
    """Copy a file's contents; without its date and permissions."""
    to.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(file, to)
    to.chmod(0o644)
