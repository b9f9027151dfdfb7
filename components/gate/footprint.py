"""How long a server needs to start from a bundle: measured on a process of its own, as a restart
would be."""

from __future__ import annotations

import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import torch

from draftwell.serving.artifacts.pair_files import PairFiles
from draftwell.serving.bundle.verdict import Check, GateVerdict, Skipped, Thresholds
from draftwell.serving.device import cuda_available
from draftwell.serving.memory import LOADING, free_memory, weight_bytes

CHILD = """
import pathlib, sys
from draftwell.serving.server.model.loading import from_bundle
from draftwell.serving.server.settings import ServerSettings
from_bundle(ServerSettings(bundle=pathlib.Path(sys.argv[1]), slots=1))
"""
"""What `draftwell-serve` does before it listens: check every digest, load the models, decode a few
tokens."""


@dataclass(frozen=True)
class Footprint:
    """What it takes to serve a bundle.

    Args:
        bundle_mb: size in 10^6 bytes, without the models that are fetched.
        startup_seconds: from the start of a process to its first tokens; None where that was not
            measured.
        failure: why the bundle did not start, in a line.
        unmeasured: why the start was not measured.
    """

    bundle_mb: float
    startup_seconds: float | None = None
    failure: str | None = None
    unmeasured: str | None = None


def judge_footprint(found: Footprint, thresholds: Thresholds) -> GateVerdict:
    """Judge size and start of a bundle; one that does not start fails, however long it tried.

    A start that took too long may have been a slow minute: it is one measurement without an
    interval. So that failure is transient.
    """
    size, start = thresholds.max_bundle_mb, thresholds.max_startup_seconds
    large = None
    if size is not None:
        detail = f"{found.bundle_mb:.1f} MB without fetched models (at most {size:g})"
        large = Check("bundle size", found.bundle_mb, size, found.bundle_mb <= size, detail)
    slow, seconds = None, found.startup_seconds
    if start is not None and seconds is not None:
        took = f"{seconds:.1f} s to the first tokens of a new process (at most {start:g})"
        late = seconds > start
        passed = not found.failure and not late
        slow = Check("start-up", seconds, start, passed, found.failure or took, late)
    why = found.unmeasured
    return GateVerdict.of([large, slow, Skipped("start-up", why) if why else None])


def footprint(bundle: Path, size: int, files: PairFiles, device: str, *, limit: float) -> Footprint:
    """Size and start-up time of a bundle.

    Args:
        size: of the bundle, bytes.
        limit: seconds after which a start has failed.
    """
    megabytes = size / 1e6
    if device != "cpu" and not cuda_available():
        return Footprint(megabytes, unmeasured=f"there is no {device} device here")
    if not room_for_another(files) or (device != "cpu" and not room_on_card()):
        why = f"there is too little memory on {device} to load the models once more"
        return Footprint(megabytes, unmeasured=why)
    seconds, failure = startup_seconds(bundle, limit=limit)
    return Footprint(megabytes, seconds, failure)


def startup_seconds(bundle: Path, *, limit: float) -> tuple[float, str | None]:
    """Seconds from the start of a process until a bundle's first tokens are decoded, and why they
    were not."""
    begin = time.perf_counter()
    try:
        done = subprocess.run(
            [sys.executable, "-c", CHILD, str(bundle)],
            capture_output=True,
            text=True,
            timeout=limit,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return time.perf_counter() - begin, f"the bundle was not ready after {limit:g} s"
    lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
    return (
        time.perf_counter() - begin,
        None if done.returncode == 0 else f"the bundle does not start: {lines[-1][:300]}",
    )


def room_on_card() -> bool:
    """Whether a CUDA device has as much memory free as this process, with the gate's own models,
    holds of it."""
    free, _ = torch.cuda.mem_get_info()
    return free > torch.cuda.memory_reserved()


def room_for_another(files: PairFiles) -> bool:
    """Whether memory is enough for a pair's models once more: their weights on disk, packed, and in
    another dtype."""
    free = free_memory()
    return free is None or LOADING["cpu"] * weight_bytes(files) < free
