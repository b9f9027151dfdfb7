"""Provenance of what the components make: which pair, which trace, which code and which
libraries."""

from __future__ import annotations

import hashlib
import os
import platform
import subprocess
from collections.abc import Iterable, Mapping
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from draftwell.serving.artifacts.base import Provenance
from draftwell.serving.device import device_class
from draftwell.serving.runtime.pair import LoadedPair

__all__ = ["code_digest", "device_class", "git_commit", "library_versions", "provenance"]

PACKAGES = ("components", "flows", "registry", "serving")
LIBRARIES = (
    "draftwell",
    "torch",
    "transformers",
    "numpy",
    "onnxruntime",
    "safetensors",
    "scikit-learn",
)


def provenance(
    pair: LoadedPair,
    *,
    trace_digest: str | None = None,
    parents: Mapping[str, str] | None = None,
    parameters: Mapping[str, Any] | None = None,
    metrics: Mapping[str, float] | None = None,
    device_class: str | None = None,
    training_prompts: Iterable[str] | None = None,
    unknown_prompts: Iterable[str] = (),
) -> Provenance:
    """Where an artifact of `pair` that is made now comes from.

    Args:
        trace_digest: digest over all rows of the trace set it is made from.
        parents: kind → digest of the artifacts it is made from.
        parameters: settings it is made with; values that are no number, text or None are written as
            text.
        metrics: measured on it; None and NaN are left out, because JSON cannot hold them.
        device_class: machine class, for metrics that are valid on one class only.
        training_prompts: hashes of the prompts that it has learnt from
            (`draftwell.components.prompts.overlap`); None where they are not known.
        unknown_prompts: names of what it is made from whose prompts are not known, where
            `training_prompts` has the others'.
    """
    return Provenance(
        pair=pair.name,
        fingerprint=pair.fingerprint,
        device_class=device_class,
        trace_digest=trace_digest,
        parents=dict(parents or {}),
        training_prompts=None if training_prompts is None else sorted(set(training_prompts)),
        unknown_prompts=sorted(set(unknown_prompts)),
        git_commit=git_commit(),
        library_versions=library_versions(),
        parameters={name: plain(value) for name, value in (parameters or {}).items()},
        metrics={
            name: float(value)
            for name, value in (metrics or {}).items()
            if value is not None and value == value
        },
    )


def plain(value: Any) -> str | int | float | bool | None:
    """A setting as a JSON scalar."""
    return value if value is None or isinstance(value, (str, int, float, bool)) else str(value)


def library_versions() -> dict[str, str]:
    """Versions of Python and of the libraries that results depend on; what is not installed is left
    out."""
    found = {"python": platform.python_version()}
    for name in LIBRARIES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


@lru_cache
def code_digest() -> str:
    """sha256 over the sources of this project as they are installed here: two versions differ in it
    where no commit is known, and so does an edited checkout from a clean one."""
    root = Path(__file__).resolve().parents[2]
    found = hashlib.sha256()
    for package in PACKAGES:
        for path in sorted(
            one for kind in ("*.py", "*.cpp", "*.h") for one in (root / package).rglob(kind)
        ):
            found.update(
                (
                    f"{path.relative_to(root).as_posix()} "
                    f"{hashlib.sha256(path.read_bytes()).hexdigest()}\n"
                ).encode()
            )
    return found.hexdigest()


def git_commit() -> str | None:
    """Commit of this project's own checkout; where it is installed, not checked out, the one that
    its image was built of (`$DRAFTWELL_COMMIT`), or None."""
    here = Path(__file__).resolve()
    # an installed copy may be inside another project's repository
    if not (here.parents[2] / ".git").exists():
        return os.environ.get("DRAFTWELL_COMMIT") or None
    try:
        found = subprocess.run(
            ["git", "rev-parse", "HEAD"],
            cwd=here.parent,
            capture_output=True,
            text=True,
            timeout=10,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return found.stdout.strip() or None
