"""The wheels in a bundle: `draftwell.serving` alone, runtime and server, under a name of its own;
in one for vLLM `draftwell-vllm`, the plug-in (`vllm/plugin/draftwell_vllm`).

setuptools builds them, in a process of its own and without network, from a staged copy in which
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
from dataclasses import dataclass
from pathlib import Path

from draftwell import serving
from draftwell.registry.bundles.requirements import PROJECT, runtime_requirements
from draftwell.serving.errors import DraftwellError

NAME = "draftwell-runtime"
PACKAGE = Path(serving.__file__).parents[1]
PLUGIN = Path(__file__).parent / "vllm" / "plugin" / "draftwell_vllm"
EPOCH = "315532800"
"""1980-01-01, the first day that a zip file can name."""
PYPROJECT = """\
[build-system]
requires = ["setuptools>=77"]
build-backend = "setuptools.build_meta"

[project]
name = "{name}"
version = "{version}"
license = "Apache-2.0"
license-files = ["LICENSE*"]
requires-python = ">=3.11"
"""
RUNTIME = """\
description = "Draftwell's decoding runtime and its server, without the pipeline."
dependencies = {dependencies}

[project.scripts]
draftwell-serve = "draftwell.serving.server.main:main"

[tool.setuptools.packages.find]
include = ["draftwell*"]

[tool.setuptools.package-data]
"draftwell.serving" = ["**/*"]
"""
VLLM_PLUGIN = """\
description = "Draftwell's stop rules over n-grams and a draft model, and a record of acceptance, and new weights of drafts, for vLLM."

[project.entry-points."vllm.general_plugins"]
draftwell = "draftwell_vllm:register"

[project.entry-points."vllm.stat_logger_plugins"]
draftwell_acceptance = "draftwell_vllm.stats:AcceptanceLogger"

[project.entry-points."vllm.endpoint_plugins"]
draftwell_draft = "draftwell_vllm.draft_route:DraftRoute"

[tool.setuptools]
packages = ["draftwell_vllm"]
"""  # noqa: E501
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
        DraftwellError: setuptools is missing or refuses (`wheel_not_built`).
    """
    top = PACKAGE / "__init__.py"
    files = {f"draftwell/{name}": file for name, file in sources(package).items()}
    project = RUNTIME.format(dependencies=json.dumps(runtime_requirements()))
    return _build(NAME, project, {**files, f"draftwell/{top.name}": top})


@functools.cache
def plugin_version() -> str:
    """Version of the plug-in's wheel that these sources make; it ends with their digest."""
    return _version(VLLM_PLUGIN, sources(PLUGIN))


@functools.cache
def plugin_wheel() -> Wheel:
    """The wheel of the plug-in; built once in a process. It asks for no packages: vLLM brings
    numpy, torch and transformers.

    Raises:
        DraftwellError: setuptools is missing or refuses (`wheel_not_built`).
    """
    return _build("draftwell-vllm", VLLM_PLUGIN, sources(PLUGIN))


def sources(package: Path) -> dict[str, Path]:
    """Name in a wheel → file of a package; what Python or an editor left there is none of them."""
    found = {}
    for file in sorted(package.rglob("*")):
        inside = file.relative_to(package)
        if file.is_file() and not any(
            part == "__pycache__" or part.startswith(".") for part in inside.parts
        ):
            found[(Path(package.name) / inside).as_posix()] = file
    return found


def _version(project: str, files: dict[str, Path]) -> str:
    digest = hashlib.sha256(project.encode())
    for name, file in sorted(files.items()):
        digest.update(json.dumps([name, hashlib.sha256(file.read_bytes()).hexdigest()]).encode())
    return f"{importlib.metadata.version(PROJECT)}+{digest.hexdigest()[:12]}"


def _build(name: str, project: str, files: dict[str, Path]) -> Wheel:
    """Build a wheel of files and of what its pyproject.toml says besides name and version."""
    version = _version(project, files)
    with tempfile.TemporaryDirectory() as place:
        staged, out = Path(place) / "staged", Path(place) / "out"
        out.mkdir()
        for inside, file in {**files, "LICENSE": _licence()}.items():
            (staged / inside).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(file, staged / inside)  # without its date and permissions
            (staged / inside).chmod(0o644)
        pyproject = staged / "pyproject.toml"
        pyproject.write_text(PYPROJECT.format(name=name, version=version) + project)
        pyproject.chmod(0o644)
        done = subprocess.run(
            [sys.executable, "-I", "-c", BUILD, str(out)],
            cwd=staged,
            env={**os.environ, "SOURCE_DATE_EPOCH": EPOCH, "PYTHONHASHSEED": "0"},
            umask=0o022,
            capture_output=True,
            text=True,
            check=False,
        )
        built = list(out.glob("*.whl"))
        if done.returncode != 0 or len(built) != 1:
            last = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
            raise DraftwellError(
                f"the wheel {name} was not built ({last}): pip install 'setuptools>=77'",
                code="wheel_not_built",
            )
        return Wheel(built[0].name, version, built[0].read_bytes())


def _licence() -> Path:
    """The licence of a checkout, or the one that pip installed with the project."""
    beside = PACKAGE.parent / "LICENSE"
    if beside.is_file():
        return beside
    installed = importlib.metadata.files(PROJECT) or []
    return next(Path(str(file.locate())) for file in installed if file.name == "LICENSE")
