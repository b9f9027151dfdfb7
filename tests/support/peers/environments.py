"""Environments of peers that hold nothing but this interpreter."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from components.engines import environments

FAKE_DRIVER = Path(__file__).parent / "fake_driver.py"


def install(root: Path, patch: pytest.MonkeyPatch, names: tuple[str, ...] = ("vllm", "llama.cpp"), driver: Path = FAKE_DRIVER) -> Path:
    """As `make peers` leaves them under `root`, with a fake driver for each."""
    patch.setenv("DRAFTWELL_PEERS", str(root))
    for name in names:
        (root / name / "bin").mkdir(parents=True)
        (root / name / "bin" / "python").symlink_to(sys.executable)
        (root / name / environments.INSTALLED).touch()
        patch.setitem(environments.DRIVERS, name, driver)
    return root


def is_stopped(pid: int) -> bool:
    """Whether every thread of a process is stopped, as Linux sees it (state T)."""
    return all(task.read_text().rpartition(")")[2].split()[0] == "T" for task in Path(f"/proc/{pid}/task").glob("*/stat"))
