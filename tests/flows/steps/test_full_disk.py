"""A disk that is full: one clear line, nothing half-written is read, and the same command goes on
once there is room."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from draftwell.serving.recording.trace import TraceSet
from tests.support.paths import REPO

pytestmark = pytest.mark.slow

ROOM = 40_960
"""Bytes: enough for the plan of a collection, not for its shard."""


@pytest.fixture
def tiny_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of its own with hardly any room."""
    folder = tmp_path / "disk"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={ROOM}", "none", str(folder)]
    mounted = subprocess.run(command, capture_output=True, text=True, check=False)
    if mounted.returncode != 0:
        pytest.skip(f"no file system can be mounted here: {mounted.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True)


def collect(
    home: Path, pair: Path, prompts: Path, limit: Callable[[], None] | None = None
) -> subprocess.CompletedProcess[str]:
    """`draftwell step collect` in a process of its own."""
    environment = {**os.environ, "DRAFTWELL_HOME": str(home), "PYTHONPATH": str(REPO)}
    command = [
        sys.executable,
        "-m",
        "draftwell.flows.cli.main",
        "step",
        "collect",
        "--pair",
        str(pair),
        "--prompts",
        str(prompts),
        "--set",
        "max_tokens=16",
        "--set",
        "threads=1",
    ]
    return subprocess.run(
        command,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=900,
        preexec_fn=limit,
    )


def check_refused(done: Any, home: Path) -> None:
    assert done.returncode == 2, done.stderr
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("Error: no room left to write")
    assert "free some space" in last
    assert "Traceback" not in done.stderr
    assert [path.name for path in home.rglob("*shard*")] == []


def traces_of(home: Path) -> TraceSet:
    return TraceSet(home / "pairs" / "tiny" / "float32" / "traces")


def test_a_full_file_system(
    tiny_disk: Path, tmp_path: Path, pair_file: Path, prompts_file: Path
) -> None:
    check_refused(collect(tiny_disk, pair_file, prompts_file), tiny_disk)
    subprocess.run(["mount", "-o", "remount,size=64m", str(tiny_disk)], check=True)
    done = collect(tiny_disk, pair_file, prompts_file)
    assert done.returncode == 0, done.stderr
    assert collect(tmp_path / "roomy", pair_file, prompts_file).returncode == 0
    assert traces_of(tiny_disk).digest() == traces_of(tmp_path / "roomy").digest()


def test_a_limit_on_files(tmp_path: Path, pair_file: Path, prompts_file: Path) -> None:
    """What needs no right to mount: a quota says it in other words."""

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (ROOM, ROOM))

    check_refused(collect(tmp_path / "home", pair_file, prompts_file, limit), tmp_path / "home")
    done = collect(tmp_path / "home", pair_file, prompts_file)
    assert done.returncode == 0, done.stderr
    assert traces_of(tmp_path / "home").read(["position"]).num_rows > 0
