"""The sha256 of installed packages' files, as pip recorded them when it installed them: what a
bundle's requirements can be locked with.

An installed package does not know which file it came from. pip does: `make setup` has it leave its
report of every installation in `<environment>/share/draftwell/installed/` (installation report,
version 1). What no report knows has no hash here, and nothing is guessed. `make hashes` asks pip
for those.
"""

from __future__ import annotations

import json
import sys
import textwrap
from collections.abc import Mapping
from pathlib import Path

from packaging.utils import canonicalize_name

UNHASHED = "# Without hashes: it is not recorded here which files were installed of "


def reports_folder() -> Path:
    """Where this environment keeps pip's reports."""
    return Path(sys.prefix) / "share" / "draftwell" / "installed"


def recorded_hashes(packages: Mapping[str, str], folder: Path | None = None) -> dict[str, str]:
    """name → sha256 of the file that was installed, of those packages whose file is known.

    Args:
        packages: canonical name → installed version; a record of another version does not count.
        folder: pip's reports of another environment; None takes this one's. The last report of a
            package counts, and one that is cut is passed over.
    """
    found: dict[str, str] = {}
    for path in sorted((folder or reports_folder()).glob("*.json")):
        try:
            for item in json.loads(path.read_text(encoding="utf-8"))["install"]:
                name = canonicalize_name(item["metadata"]["name"])
                if packages.get(name) == item["metadata"]["version"]:
                    found[name] = item["download_info"]["archive_info"]["hashes"]["sha256"]
        except (OSError, ValueError, KeyError, TypeError):
            continue
    return found


def requirement_lines(packages: Mapping[str, str], hashes: Mapping[str, str]) -> list[str]:
    """The lines that pin packages: with their sha256 where all are known, because pip takes hashes
    of all or of none; else after a line that names those that are not."""
    pins = sorted(packages.items())
    missing = sorted(packages.keys() - hashes.keys())
    if not missing:
        return [f"{name}=={version} --hash=sha256:{hashes[name]}" for name, version in pins]
    names = textwrap.shorten(", ".join(missing), 60, placeholder=" …")
    return [f"{UNHASHED}{names}", *(f"{name}=={version}" for name, version in pins)]
