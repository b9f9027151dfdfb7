"""Reading a file of results as it stands on disk."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def kept_results(file: Path) -> dict[str, Any]:
    """Key → plain JSON of each result."""
    rows = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()[1:]]
    return {row["key"]: row["value"] for row in rows}
