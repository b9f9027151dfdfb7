"""The digest of a trace set: sha256 over its rows, kept in a sidecar file so that they are read
once."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any


def file_state(path: Path) -> list[str | int]:
    """What of a file changes when its content does; a shard that is replaced has another inode,
    however fast it was."""
    stat = path.stat()
    return [path.name, stat.st_size, stat.st_mtime_ns, stat.st_ino]


def known_digest(sidecar: Path, key: dict[str, Any]) -> str | None:
    """The digest in a sidecar, where it is of files in just this state."""
    import json

    try:
        known = json.loads(sidecar.read_text())
    except (OSError, ValueError):
        return None
    if not isinstance(known, dict) or not isinstance(digest := known.pop("digest", None), str):
        return None
    return digest if known == key else None


def update_hashes(hashes: dict[str, Any], name: str, array: Any) -> None:
    """Add a piece of a column to its running hashes: validity, lengths and values apart, so that
    cuts leave no mark."""
    import pyarrow as pa
    import pyarrow.compute as pc

    def update(part: str, data: bytes) -> None:
        hashes.setdefault(f"{name}/{part}/{array.type}", hashlib.sha256()).update(data)

    update("valid", array.is_valid().to_numpy(zero_copy_only=False).tobytes())
    present = array.drop_null()
    if pa.types.is_list(array.type):
        update("length", pc.list_value_length(present).to_numpy(zero_copy_only=False).tobytes())
        update_hashes(hashes, f"{name}[]", present.flatten())
    elif pa.types.is_string(array.type):
        values = [value.encode() for value in present.to_pylist()]
        update("length", b"".join(len(value).to_bytes(4, "little") for value in values))
        update("value", b"".join(values))
    else:
        update("value", present.to_numpy(zero_copy_only=False).tobytes())
