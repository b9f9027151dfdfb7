"""How long a server needs to start from a bundle: measured on a process of its own, as a restart would be."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

from components.gate.gate import Footprint
from serving.artifacts.pair_files import PairFiles

CHILD = """
import pathlib, sys
from serving.server.model.loading import from_bundle
from serving.server.settings import ServerSettings
from_bundle(ServerSettings(bundle=pathlib.Path(sys.argv[1]), slots=1))
"""
"""What `draftwell-serve` does before it listens: check every digest, load the models, decode a few tokens. With several slots it also times
batches (5 s at most), which says nothing of the bundle."""


def footprint(bundle: Path, size: int, files: PairFiles, device: str, *, limit: float) -> Footprint:
    """Size and start-up time of a bundle.

    Args:
        size: of the bundle, bytes.
        limit: seconds after which a start is given up, and has failed.
    """
    megabytes = size / 1e6
    if device != "cpu":
        return Footprint(megabytes, note=f"start-up not measured: the gate's own models hold the {device} device")
    if not room_for_another(files):
        return Footprint(megabytes, note="start-up not measured: there is too little memory to load the models once more")
    seconds, failure = startup_seconds(bundle, limit=limit)
    return Footprint(megabytes, seconds, failure)


def startup_seconds(bundle: Path, *, limit: float) -> tuple[float, str | None]:
    """Seconds from the start of a process until a bundle's first tokens are decoded, and why they were not."""
    begin = time.perf_counter()
    try:
        done = subprocess.run([sys.executable, "-c", CHILD, str(bundle)], capture_output=True, text=True, timeout=limit, check=False)
    except subprocess.TimeoutExpired:
        return time.perf_counter() - begin, f"the bundle was not ready after {limit:g} s"
    lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
    return time.perf_counter() - begin, None if done.returncode == 0 else f"the bundle does not start: {lines[-1][:300]}"


def room_for_another(files: PairFiles) -> bool:
    """Whether memory is enough for a pair's models once more: their weights on disk, packed and in another dtype beside."""
    weights = sum(path.stat().st_size for folder in files.roles().values() for path in folder.glob("*.safetensors"))
    return 3 * weights < available_memory()


def available_memory() -> int:
    """Bytes that new processes may take, as Linux estimates them; elsewhere as much as anybody wants."""
    info = Path("/proc/meminfo")
    lines = info.read_text().splitlines() if info.is_file() else []
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable")), sys.maxsize)
