"""Reports of installations, as pip writes them."""

from __future__ import annotations

import json
from pathlib import Path


def reported(folder: Path, name: str, packages: dict[str, tuple[str, str]]) -> None:
    """Write a report of pip's form: name → version and sha256."""
    items = [
        {
            "metadata": {"name": package, "version": version},
            "download_info": {"archive_info": {"hashes": {"sha256": sha}}},
        }
        for package, (version, sha) in packages.items()
    ]
    (folder / f"{name}.json").write_text(json.dumps({"version": "1", "install": items}))
