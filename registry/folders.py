"""Names and folders of what is published: the registered model's name, and an artifact's own
files."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

from draftwell.serving.artifacts.base import MANIFEST, read_manifest
from draftwell.serving.errors import DraftwellError


def base_pair(kind: str, pair: str) -> str:
    """The pair alone: releases are registered for `<pair>.<device>`."""
    return pair.rsplit(".", 1)[0] if kind == "release" else pair


def model_name(kind: str, pair: str) -> str:
    """Name of the registered model.

    >>> model_name("verifier", "smollm2-135m")
    'verifier.smollm2-135m'
    """
    if not re.fullmatch(r"[a-z0-9_]+\.[A-Za-z0-9._-]+", f"{kind}.{pair}"):
        raise DraftwellError(
            f"{kind}.{pair} cannot be registered: name the pair with letters, digits, dots and "
            f"dashes",
            code="bad_pair_name",
        )
    return f"{kind}.{pair}"


def copy_artifact(folder: Path, into: Path) -> Path:
    """Copy an artifact's own files, and nothing else in its folder."""
    into.mkdir(parents=True, exist_ok=True)
    for name in (MANIFEST, *read_manifest(folder)["files"]):
        shutil.copyfile(folder / name, into / name)
    return into
