"""The exact versions that a bundle is installed with: the runtime's and the server's packages and
all that these need.

They are read from what is installed here, because that is what the gate measured, PyTorch's build
(`+cpu`, `+cu130`) included. Where the sha256 of every package's file is known
(`draftwell.registry.bundles.hashes`), the requirements have it, and pip refuses any other file; otherwise
none has, because pip takes hashes of all or of none, and the first lines say which are missing.

    python -m draftwell.registry.bundles.requirements cpu     # the pins whose sha256 is not known here, for `make hashes`
"""  # noqa: E501

from __future__ import annotations

import hashlib
import importlib.metadata
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version

from draftwell.registry.bundles.hashes import recorded_hashes
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
HASHED = """\
# With the sha256 of every file, for this kind of machine: pip install --require-hashes -r {file}
"""
UNHASHED = "# Without hashes: it is not recorded here which files were installed of "
SHOWN = 3
"""Names of packages without a hash that the note gives."""


@dataclass(frozen=True)
class Lock:
    """A bundle's requirements.

    Args:
        text: of `requirements-<device>.txt`.
        torch: version of PyTorch that is pinned, its build included.
        hashes: name → sha256 of the packages' files; empty unless all are known.
        versions: name → version of all packages.
        missing: packages whose sha256 is not known here.
        note: what is not as it was measured; None where nothing is.
    """

    text: str
    torch: str
    hashes: dict[str, str]
    versions: dict[str, str]
    missing: tuple[str, ...] = ()
    note: str | None = None

    @property
    def index(self) -> str | None:
        """Index of that build of PyTorch; None where it is pip's own."""
        return torch_index(self.torch)


def runtime_requirements() -> list[str]:
    """What runtime and server need, as pyproject.toml words it, without markers; sorted."""
    needed = set()
    for line in importlib.metadata.requires(PROJECT) or []:
        requirement = Requirement(line)
        if _applies(requirement, {EXTRA}):
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
) -> Lock:
    """The requirements of a bundle.

    Args:
        device: cpu or cuda.
        measured: name → version of libraries that the release was tuned with, as its artifacts
            record them. A bundle for CUDA that is built beside another kind of PyTorch takes that
            build.
        wheel: name and bytes of the runtime's wheel, which requirements with hashes list too.
    Raises:
        DraftwellError: a package that the runtime needs is not installed here.
    """
    installed = closure(runtime_requirements())
    built_here = installed["torch"]
    torch, note = pinned_torch(
        built_here, device, measured or {}, any(name.startswith(CUDA_PARTS) for name in installed)
    )
    packages = {
        name: version
        for name, version in installed.items()
        if device != "cpu" or not name.startswith(CUDA_PARTS)
    }
    packages["torch"] = torch
    known = recorded_hashes(
        {
            name: version
            for name, version in packages.items()
            if name != "torch" or torch == built_here
        }
    )
    missing = tuple(sorted(packages.keys() - known.keys()))
    head = HEAD.format(device=device, python=".".join(map(str, sys.version_info[:2])))
    head += CUDA_NOTE if device == "cuda" else ""
    head += f"# {note}.\n" if note else ""
    if missing:
        text = head + _unhashed(missing, packages, device)
        return Lock(text, torch, {}, packages, missing, note)
    lines = [
        f"{name}=={version} --hash=sha256:{known[name]}"
        for name, version in sorted(packages.items())
    ]
    if wheel is not None:
        lines.append(f"./{wheel[0]} --hash=sha256:{hashlib.sha256(wheel[1]).hexdigest()}")
    text = head + HASHED.format(file=requirements_name(device)) + "\n".join(lines) + "\n"
    return Lock(text, torch, known, packages, (), note)


def _unhashed(missing: Sequence[str], packages: Mapping[str, str], device: str) -> str:
    """Requirements without hashes, because those of some packages are not recorded."""
    more = f" and {len(missing) - SHOWN} more" if len(missing) > SHOWN else ""
    lines = [
        line for name, version in sorted(packages.items()) for line in _plain(name, version, device)
    ]
    names = ", ".join(missing[:SHOWN]) + more
    return f"{UNHASHED}{names} (make hashes).\n" + "\n".join(lines) + "\n"


def pinned_torch(
    installed: str, device: str, measured: Mapping[str, str], cuda_parts: bool
) -> tuple[str, str | None]:
    """The version of PyTorch that a bundle is installed with, and a remark where it is not the one
    that is installed here.

    Args:
        installed: version here, its build after the plus.
        measured: as in `locked`.
        cuda_parts: whether CUDA libraries are installed beside it, as with PyPI's build, which has
            no plus.
    """
    public, build = Version(installed).public, Version(installed).local or ""
    if device == "cpu":
        return (
            installed if build == "cpu" or not sys.platform.startswith("linux") else f"{public}+cpu"
        ), None
    if build.startswith("cu") or (not build and cuda_parts):
        return installed, None
    tuned = _version(measured.get("torch", ""))
    if tuned and (tuned.local or "cu").startswith("cu"):
        for needed in map(Requirement, runtime_requirements()):
            if needed.name == "torch" and not needed.specifier.contains(tuned, prereleases=True):
                return public, (
                    f"Built beside torch {installed}, which has no CUDA: the release was "
                    f"tuned with torch {tuned}, "
                    f"and the runtime needs {needed}"
                )
        return (
            str(tuned),
            (
                f"Built beside torch {installed}: the pinned torch {tuned} is the one that the "
                "release was tuned with"
            ),
        )
    return (
        public,
        (
            f"Built beside torch {installed}, which has no CUDA: which CUDA build of it was "
            "measured is not known"
        ),
    )


def _version(text: str) -> Version | None:
    """A version that an artifact recorded; None where it is none."""
    try:
        return Version(text)
    except InvalidVersion:
        return None


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
            distribution = importlib.metadata.distribution(name)
        except PackageNotFoundError as error:
            raise DraftwellError(
                f"the package {name}, which a bundle's runtime needs, is not installed here: "
                f"pip install '{PROJECT}[{EXTRA}]'",
                code="missing_package",
            ) from error
        found[name] = distribution.version
        further = map(Requirement, distribution.requires or [])
        waiting += [r for r in further if _applies(r, requirement.extras)]
    return found


def _applies(requirement: Requirement, extras: Iterable[str]) -> bool:
    """Whether a requirement holds on this machine, for a package that is asked for with some
    extras."""
    return requirement.marker is None or any(
        requirement.marker.evaluate({"extra": extra}) for extra in ("", *extras)
    )


def _plain(name: str, version: str, device: str) -> list[str]:
    """A package's lines without a hash: of PyTorch only Linux has several builds."""
    if name != "torch" or device != "cpu" or Version(version).local != "cpu":
        return [f"{name}=={version}"]
    return [
        f'torch=={version} ; sys_platform == "linux"',
        f'torch=={Version(version).public} ; sys_platform != "linux"',
    ]


if __name__ == "__main__":
    lock = locked(sys.argv[1] if len(sys.argv) > 1 else "cpu")
    print("\n".join(f"{name}=={lock.versions[name]}" for name in lock.missing))
