"""Peak memory over the models' weights and caches, for each contender in turn.

On a CPU it is the process's peak of resident memory during one generation (`VmHWM`, reset through
`/proc/self/clear_refs`) over what was resident with the models loaded and every page of their
caches written, before any forward pass ran. So it is an upper bound: it includes libraries that
start with the first forward pass, and what earlier contenders left. On CUDA it is the allocator's
peak over what was allocated then. Where neither is available it is None.
"""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch

from draftwell.components.bench.interleaved import leaving_out
from draftwell.components.bench.runner import Contender
from draftwell.serving.runtime.pair import LoadedPair
from draftwell.serving.runtime.requests import Sampling

STATUS, CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")
MEGABYTE = 1e6


def peaks_over_models(
    pair: LoadedPair,
    contenders: Sequence[Contender],
    ids: Sequence[int],
    sampling: Sampling,
    left_out: dict[str, str] | None = None,
) -> dict[str, float | None]:
    """Label → peak megabytes (10⁶ bytes) over weights and caches while the contender decodes one
    prompt.

    Call it before anything else runs on the pair. `ids` is best the longest prompt of the run.
    """
    touch_caches(pair)
    base = resident(pair.device)
    peaks = {}
    for contender in contenders:
        with leaving_out(contender.label, left_out):
            peak = peak_during(partial(contender.generate, ids, sampling), pair.device)
            peaks[contender.label] = (
                None if peak is None or base is None else max(0.0, (peak - base) / MEGABYTE)
            )
    return peaks


def peak_during(work: Callable[[], object], device: str = "cpu") -> float | None:
    """Highest memory in bytes while `work` runs; None where this system does not report it (the
    work is done anyway)."""
    give_back()
    if device.startswith("cuda"):
        torch.cuda.reset_peak_memory_stats(device)
        work()
        return float(torch.cuda.max_memory_allocated(device))
    known = reset_peak()
    work()
    return status_bytes("VmHWM") if known else None


def resident(device: str = "cpu") -> float | None:
    """Memory in bytes that is in use now."""
    give_back()
    if device.startswith("cuda"):
        return float(torch.cuda.memory_allocated(device))
    return status_bytes("VmRSS")


def touch_caches(pair: LoadedPair) -> None:
    """Write every page of the models' caches, so that they count as theirs. No request may be in
    flight."""
    for model in pair.models.values():
        slots = getattr(model, "slots", None)
        for tensor in [*getattr(slots, "keys", []), *getattr(slots, "values", [])]:
            tensor.zero_()
        for memory in getattr(model, "memory", {}).values():
            memory.fill(0)


def give_back() -> None:
    """Let Python and, with glibc, the C library hand unused memory back to the system."""
    gc.collect()
    try:
        ctypes.CDLL("libc.so.6").malloc_trim(0)
    except (OSError, AttributeError):
        return


def reset_peak() -> bool:
    """Set the process's peak to what is resident now; False where the system refuses."""
    try:
        CLEAR.write_text("5")
    except OSError:
        return False
    return status_bytes("VmHWM") is not None


def status_bytes(key: str) -> float | None:
    """A size of `/proc/self/status` in bytes."""
    lines = STATUS.read_text().splitlines() if STATUS.is_file() else []
    line = next((line for line in lines if line.startswith(key + ":")), None)
    return None if line is None else float(line.split()[1]) * 1024
