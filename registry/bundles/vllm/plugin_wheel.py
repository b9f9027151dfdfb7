"""The wheel `draftwell-vllm` in a bundle: the plug-in of vLLM (`plugin/draftwell_vllm`), built as
the runtime's wheel is."""

from __future__ import annotations

import functools
import importlib.metadata
import tempfile
from pathlib import Path
from typing import Any

import draftwell
from draftwell.registry.bundles.requirements import PROJECT
from draftwell.registry.bundles.wheel import Wheel, build_staged, copy, licences, stage_sources

NAME = "draftwell-vllm"
PACKAGE = Path(__file__).parent / "plugin" / "draftwell_vllm"
PYPROJECT = """\
[build-system]
requires = ["setuptools>=77"]
build-backend = "setuptools.build_meta"

[project]
name = "{name}"
version = "{version}"
description = "Draftwell's stop rules over n-grams and a draft model, and a record of acceptance, for vLLM."
license = "Apache-2.0"
license-files = ["LICENSE*"]
requires-python = ">=3.11"

[project.entry-points."vllm.general_plugins"]
draftwell = "draftwell_vllm:register"

[project.entry-points."vllm.stat_logger_plugins"]
draftwell_acceptance = "draftwell_vllm.stats:AcceptanceLogger"

[tool.setuptools]
packages = ["draftwell_vllm"]
"""  # noqa: E501


@functools.cache
def plugin_version() -> str:
    """Version of the wheel that these sources make; it ends with their digest."""
    with tempfile.TemporaryDirectory() as place:
        return _version(stage_sources(PACKAGE, Path(place)))


def _version(digest: Any) -> str:
    return f"{importlib.metadata.version(PROJECT)}+{digest.hexdigest()[:12]}"


@functools.cache
def plugin_wheel() -> Wheel:
    """The wheel of the plug-in; built once in a process. It asks for no packages: vLLM brings
    numpy, torch and transformers.

    Raises:
        DraftwellError: setuptools is missing or refuses (`wheel_not_built`).
    """
    with tempfile.TemporaryDirectory() as place:
        staged = Path(place) / "staged"
        version = _version(stage_sources(PACKAGE, staged))
        for licence in licences(Path(draftwell.__file__).parents[1]):
            copy(licence, staged / licence.name)
        (staged / "pyproject.toml").write_text(PYPROJECT.format(name=NAME, version=version))
        (staged / "pyproject.toml").chmod(0o644)
        return build_staged(staged, version, "the plug-in's wheel")
