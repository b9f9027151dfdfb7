"""The sha256 of installed packages' files, as pip recorded them when it installed them: what a
bundle's requirements can be locked with.

An installed package does not know which file it came from. pip does: `make setup` has it leave its
report of every installation in `<environment>/share/draftwell/installed/` (installation report,
version 1), and a package that was installed from an address has `direct_url.json`. What neither
knows has no hash here, and nothing is guessed. `make hashes` asks pip for those.
"""

from __future__ import annotations

import importlib.metadata
import json
import re
import sys
from collections.abc import Iterator, Mapping
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import Any

from packaging.utils import canonicalize_name

SHA256 = re.compile(r"[0-9a-f]{64}")


def reports_folder() -> Path:
    """Where this environment keeps pip's reports."""
    return Path(sys.prefix) / "share" / "draftwell" / "installed"


def recorded_hashes(packages: Mapping[str, str], folder: Path | None = None) -> dict[str, str]:
    """name → sha256 of the file that was installed, of those packages whose file is known.

    Args:
        packages: canonical name → installed version; a record of another version does not count.
        folder: pip's reports of another environment; None takes this one's.
    """
    found = (
        {name: sha for name in packages if (sha := _from_address(name))} if folder is None else {}
    )
    for name, version, sha in _reported(folder or reports_folder()):
        if packages.get(name) == version:
            found[name] = sha  # the last report counts: a package may be installed again
    return found


def _reported(folder: Path) -> Iterator[tuple[str, str, str]]:
    """Name, version and sha256 of all that the reports know, the oldest report first; one that is
    cut or foreign is passed over."""
    for path in sorted(folder.glob("*.json")):
        try:
            items = json.loads(path.read_text(encoding="utf-8"))["install"]
            read = [
                (
                    canonicalize_name(item["metadata"]["name"]),
                    str(item["metadata"]["version"]),
                    _sha256(item["download_info"]),
                )
                for item in items
            ]
        except (OSError, ValueError, KeyError, TypeError):
            continue
        yield from ((name, version, sha) for name, version, sha in read if sha)


def _from_address(name: str) -> str | None:
    """The sha256 that `direct_url.json` (PEP 610) has of a package."""
    try:
        text = importlib.metadata.distribution(name).read_text("direct_url.json")
    except (PackageNotFoundError, OSError, AttributeError):
        return None
    try:
        return _sha256(json.loads(text)) if text else None
    except (ValueError, TypeError):
        return None


def _sha256(info: Mapping[str, Any]) -> str | None:
    archive = info.get("archive_info") or {}
    sha = (archive.get("hashes") or {}).get("sha256") or str(archive.get("hash", "")).removeprefix(
        "sha256="
    )
    return sha if SHA256.fullmatch(sha) else None
