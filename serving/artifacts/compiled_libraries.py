"""Where the library of the layers is kept (`serving/runtime/models/native`): as
`<folder>/<key>/layers.so`, where the key stands for the kind of machine and the code.

A bundle brings along, in its folder `compiled/`, the one of the machine that built it.
"""

from __future__ import annotations

import os
from pathlib import Path

COMPILED = "compiled"
LIBRARY = "layers.so"


def libraries_folder() -> Path:
    """Where a user's machine keeps what it compiled, for all projects."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "draftwell" / COMPILED


def wanted_mode() -> str:
    """How commands want the library, a `native.library.Compile`: `$DRAFTWELL_COMPILE`, else
    auto."""
    return os.environ.get("DRAFTWELL_COMPILE", "auto")
