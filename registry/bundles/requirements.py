"""The exact versions that a bundle is installed with: the runtime's and the server's packages and all that these need.

They are read from what is installed here, because that is what the gate measured. The one package that differs between devices is
PyTorch, with the libraries that it brings along.
"""

from __future__ import annotations

import importlib.metadata
import sys
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from serving.errors import DraftwellError

PROJECT = "draftwell"
EXTRA = "server"
CPU_INDEX = "https://download.pytorch.org/whl/cpu"
"""Where PyTorch's CPU builds are; its default ones for Linux bring several GB of CUDA libraries."""
CUDA_PARTS = ("nvidia-", "cuda-", "triton")
"""Beginnings of the names of packages that only CUDA builds of PyTorch bring along."""
HEAD = """\
# Exact versions for a {device} bundle, as they were installed where it was built, under Python {python}.
"""
CUDA_NOTE = """\
# PyTorch itself names the exact CUDA libraries that it brings along.
"""


def runtime_requirements() -> list[str]:
    """What runtime and server need, as pyproject.toml words it, without markers; sorted."""
    needed = set()
    for line in importlib.metadata.requires(PROJECT) or []:
        requirement = Requirement(line)
        if _applies(requirement, {EXTRA}):
            requirement.marker = None
            needed.add(str(requirement))
    return sorted(needed)


def locked(device: str) -> str:
    """The text of `requirements-<device>.txt`.

    Raises:
        DraftwellError: a package that the runtime needs is not installed here.
    """
    lines = []
    for name, version in sorted(closure(runtime_requirements()).items()):
        if name == "torch":
            lines += _torch(version, device)
        elif device != "cpu" or not name.startswith(CUDA_PARTS):
            lines.append(f"{name}=={version}")
    head = HEAD.format(device=device, python=".".join(map(str, sys.version_info[:2])))
    return head + (CUDA_NOTE if device == "cuda" else "") + "\n".join(lines) + "\n"


def closure(requirements: Iterable[str]) -> dict[str, str]:
    """name → installed version of some packages and of all that they need on this machine.

    Raises:
        DraftwellError: one of them is not installed.
    """
    found: dict[str, str] = {}
    waiting = [Requirement(line) for line in requirements]
    seen = set()
    while waiting:
        requirement = waiting.pop()
        name = canonicalize_name(requirement.name)
        if (key := (name, frozenset(requirement.extras))) in seen:
            continue
        seen.add(key)
        try:
            distribution = importlib.metadata.distribution(name)
        except PackageNotFoundError as error:
            raise DraftwellError(f"the package {name}, which a bundle's runtime needs, is not installed here: "
                                 f"pip install '{PROJECT}[{EXTRA}]'", code="missing_package") from error
        found[name] = distribution.version
        further = map(Requirement, distribution.requires or [])
        waiting += [r for r in further if _applies(r, requirement.extras)]
    return found


def _applies(requirement: Requirement, extras: Iterable[str]) -> bool:
    """Whether a requirement holds on this machine, for a package that is asked for with some extras."""
    return requirement.marker is None or any(requirement.marker.evaluate({"extra": extra}) for extra in ("", *extras))


def _torch(version: str, device: str) -> list[str]:
    """PyTorch's lines: builds differ in the local version after the plus, and only Linux has several."""
    public = Version(version).public
    if device != "cpu":
        return [f"torch=={public}"]
    return [f'torch=={public}+cpu ; sys_platform == "linux"', f'torch=={public} ; sys_platform != "linux"']
