"""What the metrics of a bench depend on: the machine's class, its threads, the libraries and the
code; no host name."""

from __future__ import annotations

import platform
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from draftwell.components.report.provenance import git_commit, library_versions
from draftwell.serving.device import device_class, usable_cores
from draftwell.serving.runtime.engine.thread_governor import core_times
from draftwell.serving.runtime.pair import LoadedPair


def describe_machine(pair: LoadedPair) -> dict[str, Any]:
    """Class, CPU and device names, cores, threads, dtype, whether the target's layers are
    compiled, versions, and the commit."""
    cuda = pair.device.startswith("cuda")
    return {
        "device_class": device_class(pair.device),
        "cpu": cpu_model(),
        "cores": usable_cores(),
        "threads": torch.get_num_threads(),
        "dtype": pair.dtype,
        "device": pair.device,
        "draft_device": draft_device_of(pair),
        "device_name": torch.cuda.get_device_name(torch.device(pair.device))
        if cuda
        else cpu_model(),
        "cuda": torch.version.cuda if cuda else None,
        "compiled": pair.exact,
        "libraries": library_versions(),
        "commit": git_commit(),
    }


class Others:
    """Other processes beside this one's threads, from now on."""

    def __init__(self) -> None:
        self._before = core_times()

    def cores(self) -> float | None:
        """Cores that the threads lacked on average, because others used them; None where the system
        does not tell."""
        before, now = self._before, core_times()
        if before is None or now is None or now.clock == before.clock:
            return None
        free = now.unused - before.unused + now.own - before.own
        return max(0.0, torch.get_num_threads() - free / (now.clock - before.clock))


def draft_device_of(pair: LoadedPair) -> str | None:
    """Where the torch draft computes, if not where the target does: `cpu` or `cuda`."""
    device = getattr(pair.models.get("draft"), "device", None)
    return (
        None
        if device is None or device.type == torch.device(pair.device).type
        else str(device.type)
    )


def cpu_model() -> str:
    """Name of the CPU as the system gives it."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.is_file() else []
    return next(
        (line.partition(":")[2].strip() for line in lines if line.startswith("model name")),
        platform.processor(),
    )


@contextmanager
def using_threads(threads: int | None) -> Iterator[None]:
    """Compute with this many threads, then with as many as before; None changes nothing."""
    before = torch.get_num_threads()
    try:
        if threads is not None:
            torch.set_num_threads(threads)
        yield
    finally:
        torch.set_num_threads(before)
