"""A stand-in for cosign that works like it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

COSIGN = """#!/usr/bin/env python3
# A "signature" is the key's first line and the sha256 of what was signed.
import hashlib, pathlib, sys
words = sys.argv[1:]
key, bundle = (pathlib.Path(words[words.index(name) + 1]) for name in ("--key", "--bundle"))
if not key.exists():
    sys.exit("Error: reading key: open: no such file")
mark = key.read_text().split()[0] + hashlib.sha256(pathlib.Path(words[-1]).read_bytes()).hexdigest()
if words[0] == "sign-blob":
    assert "--yes" in words
    bundle.write_text(mark)
elif bundle.read_text() != mark:
    sys.exit("Error: failed to verify signature")
"""


def put_on_path(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Write it into `folder`/bin, and let that be the first on PATH."""
    tool = folder / "bin" / "cosign"
    tool.parent.mkdir()
    tool.write_text(COSIGN)
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tool.parent}:{os.environ['PATH']}")
