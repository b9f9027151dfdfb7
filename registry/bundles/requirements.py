"""The exact versions that a bundle is installed with: the runtime's and the server's packages and
all that these need.

They are read from what is installed here, because that is what the gate measured, PyTorch's build
(`+cpu`, `+cu130`) included. Where the sha256 of every package's file is known
(`draftwell.registry.bundles.hashes`), the requirements have it, and pip refuses any other file.

    python -m draftwell.registry.bundles.requirements cpu     # the pins whose sha256 is not known here, for `make hashes`
"""  # noqa: E501

from __future__ import annotations

import hashlib
import importlib.metadata
import re
import sys
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version

from draftwell.registry.bundles.hashes import recorded_hashes, requirement_lines
from draftwell.serving.errors import DraftwellError

PROJECT = "draftwell"
EXTRA = "server"
TORCH_INDEX = "https://download.pytorch.org/whl"
"""Where PyTorch's builds are, by their local version; PyPI's own ones for Linux bring several GB of
CUDA libraries."""
CUDA_PARTS = ("nvidia-", "cuda-", "triton")
"""Beginnings of the names of packages that only CUDA builds of PyTorch bring along."""
HEAD = """\
# Exact versions for a {device} bundle, as they were installed where it was built, under Python {python}.
"""  # noqa: E501
CUDA_NOTE = """\
# PyTorch itself names the exact CUDA libraries that it brings along.
"""
TORCH_FILE = "requirements-torch.txt"
TORCH_HEAD = """\
# Of PyTorch's own index, which is asked for nothing else: pip install --no-deps -r {file}
--index-url {index}
"""
ENGINE_FILE, ENGINE_TORCH_FILE = "requirements-engine.txt", "requirements-engine-torch.txt"
ENGINE_HEAD = """\
# The environment that vLLM was measured in, package by package: pip install --no-deps -r requirements-engine.txt
"""  # noqa: E501
HASHED = """\
# With the sha256 of every file, for this kind of machine: pip install --require-hashes -r {file}
"""


@dataclass(frozen=True)
class Lock:
    """A bundle's requirements.

    Args:
        text: of `requirements-<device>.txt`.
        versions: name → version of all packages; that of PyTorch with its build.
        hashes: name → sha256 of those packages' files that are known.
    """

    text: str
    versions: dict[str, str]
    hashes: dict[str, str]

    @property
    def index(self) -> str | None:
        """Index of that build of PyTorch; None where it is pip's own."""
        return torch_index(self.versions["torch"])

    @property
    def torch_text(self) -> str | None:
        """Of `requirements-torch.txt`, PyTorch alone; None where it is of pip's own index."""
        if self.index is None:
            return None
        head = TORCH_HEAD.format(file=TORCH_FILE, index=self.index)
        lines = requirement_lines({"torch": self.versions["torch"]}, self.hashes)
        return head + "\n".join(lines) + "\n"

    @property
    def missing(self) -> list[str]:
        """Packages whose sha256 is not known here."""
        return sorted(self.versions.keys() - self.hashes.keys())


def runtime_requirements() -> list[str]:
    """What runtime and server need, as pyproject.toml words it, without markers; sorted."""
    needed = set()
    for requirement in needs(PROJECT, {EXTRA}):
        requirement.marker = None
        needed.add(str(requirement))
    return sorted(needed)


def requirements_name(device: str) -> str:
    """File name of the locked requirements."""
    return f"requirements-{device}.txt"


def locked(
    device: str,
    *,
    measured: Mapping[str, str] | None = None,
    wheel: tuple[str, bytes] | None = None,
    further: Iterable[str] = (),
) -> Lock:
    """The requirements of a bundle.

    Args:
        device: cpu or cuda.
        measured: name → version of libraries that the release was tuned with, as its artifacts
            record them. A bundle for CUDA that is built beside another kind of PyTorch takes that
            build.
        wheel: name and bytes of the runtime's wheel, which requirements with hashes list too.
        further: packages that the bundle's models need.
    Raises:
        DraftwellError: a package that the runtime or a model needs is not installed here.
    """
    installed = closure([*runtime_requirements(), *further])
    packages = {
        name: version
        for name, version in installed.items()
        if device != "cpu" or not name.startswith(CUDA_PARTS)
    }
    packages["torch"] = pinned_torch(installed, device, measured or {})
    same = {name: version for name, version in packages.items() if installed[name] == version}
    hashes = recorded_hashes(same)
    text = HEAD.format(device=device, python=".".join(map(str, sys.version_info[:2])))
    text += CUDA_NOTE if device == "cuda" else ""
    lines = requirement_lines(packages, hashes)
    if len(hashes) == len(packages):
        text += HASHED.format(file=requirements_name(device))
        if wheel is not None:
            lines.append(f"./{wheel[0]} --hash=sha256:{hashlib.sha256(wheel[1]).hexdigest()}")
    return Lock(text + "\n".join(lines) + "\n", packages, hashes)


def engine_lock(packages: Mapping[str, str], reports: Path) -> dict[str, bytes]:
    """Name → text of the file with the exact versions of the environment that the gate measured an
    engine in, and of one with those packages alone that are builds of PyTorch's own index.

    Args:
        packages: canonical name → version, of all that is installed in the engine's environment.
        reports: folder of pip's reports of that environment.
    """
    hashes = recorded_hashes(packages, reports)
    index = torch_index(packages.get("torch", "0"))
    builds = {
        name: version
        for name, version in packages.items()
        if index and name.startswith("torch") and torch_index(version) == index
    }
    head = TORCH_HEAD.format(file=ENGINE_TORCH_FILE, index=index)
    files = {ENGINE_FILE: (ENGINE_HEAD, packages), ENGINE_TORCH_FILE: (head, builds)}
    return {
        name: (head + "\n".join(requirement_lines(listed, hashes)) + "\n").encode()
        for name, (head, listed) in files.items()
        if listed
    }


def pinned_torch(installed: Mapping[str, str], device: str, measured: Mapping[str, str]) -> str:
    """The version of PyTorch that a bundle is installed with: the one that is installed here, if it
    is for the device; for CUDA beside another one, the build that the release was tuned with, as
    far as it is one for CUDA that the runtime takes, else PyPI's.

    Args:
        installed: name → version of all packages here; PyPI's build of PyTorch has no plus in its
            version, and CUDA libraries beside it.
        measured: as in `locked`.
    """
    here = Version(installed["torch"])
    if device == "cpu":
        is_cpu = here.local == "cpu" or not sys.platform.startswith("linux")
        return str(here) if is_cpu else f"{here.public}+cpu"
    cuda_parts = any(name.startswith(CUDA_PARTS) for name in installed)
    if (here.local or "").startswith("cu") or (here.local is None and cuda_parts):
        return str(here)
    try:
        tuned = Version(measured.get("torch", ""))
    except InvalidVersion:
        return here.public
    taken = all(
        needed.specifier.contains(tuned, prereleases=True)
        for needed in needs(PROJECT, {EXTRA})
        if needed.name == "torch"
    )
    return str(tuned) if taken and (tuned.local or "cu").startswith("cu") else here.public


def torch_index(version: str) -> str | None:
    """PyTorch's index of a build.

    >>> torch_index("2.13.0+cpu"), torch_index("2.13.0")
    ('https://download.pytorch.org/whl/cpu', None)
    """
    build = Version(version).local or ""
    return f"{TORCH_INDEX}/{build}" if re.fullmatch(r"cpu|cu\d+", build) else None


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
            found[name] = importlib.metadata.distribution(name).version
        except PackageNotFoundError as error:
            raise DraftwellError(
                f"the package {name}, which a bundle's runtime needs, is not installed here: "
                f"in Draftwell's checkout `pip install -c constraints.txt -e '.[{EXTRA}]'`",
                code="missing_package",
            ) from error
        waiting += needs(name, requirement.extras)
    return found


def needs(name: str, extras: Collection[str] = ()) -> list[Requirement]:
    """What an installed package itself asks for on this machine, with some of its extras."""
    return [
        requirement
        for requirement in map(Requirement, importlib.metadata.requires(name) or [])
        if requirement.marker is None
        or any(requirement.marker.evaluate({"extra": extra}) for extra in ("", *extras))
    ]


if __name__ == "__main__":
    lock = locked(sys.argv[1] if len(sys.argv) > 1 else "cpu")
    print("\n".join(f"{name}=={lock.versions[name]}" for name in lock.missing))
