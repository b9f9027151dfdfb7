"""Where libraries of compiled layers are kept, and which of them a pair uses; made by
`serving/runtime/models/compiled_library.py`.

A library is `<folder>/<key>/layer.so`, where the key stands for all that it depends on, the kind of
machine among it. A bundle brings along, in its folder `compiled/`, those that its pair used on the
machine that built it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from draftwell.serving.artifacts.pair_files import draftwell_home
from draftwell.serving.files import write_json

COMPILED = "compiled"
LIBRARY = "layer.so"


def libraries_folder() -> Path:
    """Where this machine keeps the libraries that it compiled."""
    return draftwell_home() / COMPILED


def wanted_mode(default: str) -> str:
    """How commands want layers compiled, a `compiled_step.Compile`: `$DRAFTWELL_COMPILE`, else the
    default."""
    return os.environ.get("DRAFTWELL_COMPILE", default)


def note_used(fingerprint: str, files: Iterable[Path]) -> None:
    """Note which of this machine's libraries a pair uses, so that a bundle can bring them along
    (`used_by`).

    What was noted before stays, as far as it is still there: some commands load some of a pair's
    models only.
    """
    folder = libraries_folder()
    known = [file.parent.name for file in used_by(fingerprint)]
    keys = sorted({*known, *(file.parent.name for file in files if file.parent.parent == folder)})
    if keys != known:
        with suppress(OSError):  # a home that may only be read
            write_json(folder / f"{fingerprint}.json", {"libraries": keys})


def used_by(fingerprint: str) -> list[Path]:
    """The libraries that a pair, by its fingerprint, used when it was last loaded on this machine,
    as far as they are still there."""
    folder = libraries_folder()
    try:
        keys = json.loads((folder / f"{fingerprint}.json").read_text())["libraries"]
        files = [folder / str(key) / LIBRARY for key in keys]
    except (OSError, ValueError, KeyError, TypeError):
        return []
    return [file for file in files if file.is_file()]
