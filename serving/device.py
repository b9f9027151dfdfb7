"""The device that a process computes on, and the class of machine that it is: numbers measured on one say nothing about another."""

from __future__ import annotations

import math
import os
import platform
import re
from pathlib import Path

from serving.cpu_quota import cpu_quota
from serving.errors import DraftwellError

DEVICES = ("cpu", "cuda")
VARIABLE = "DRAFTWELL_DEVICE"
"""Environment variable that names the default device of a machine."""
FAST_DTYPES = ("amx_bf16", "avx512_bf16", "avx_vnni", "avx512_vnni")
"""Instruction sets that decide how fast bfloat16 and int8 run, the strongest first."""


def cuda_available() -> bool:
    """Whether torch sees a CUDA device here: the one place that asks."""
    import torch  # here and below: importing it takes seconds, and `--help` must not pay for that

    return torch.cuda.is_available()


def default_device() -> str:
    """The device of every command and flow that is not given one: `$DRAFTWELL_DEVICE`, else cuda where there is such a device, else cpu.

    Raises:
        DraftwellError: the variable names no device, or one that is not here.
    """
    named = os.environ.get(VARIABLE)
    if named:
        return checked_device(named, VARIABLE)
    return "cuda" if cuda_available() else "cpu"


def known_device(device: str, option: str = "--device") -> str:
    """A device's name, whether this machine has one or not.

    Args:
        option: what named it, for the message.
    """
    if device not in DEVICES:
        raise DraftwellError(f"there is no {option} {device}: choose cpu or cuda", code="unknown_device")
    return device


def checked_device(device: str, option: str = "--device") -> str:
    """A device's name, where there is such a device here."""
    if known_device(device, option) == "cuda" and not cuda_available():
        raise DraftwellError(f"{option} cuda: torch sees no CUDA device here: install a CUDA build of torch, or use {option} cpu",
                             code="no_cuda")
    return device


def device_type(device: str) -> str:
    """cpu or cuda, of a torch device such as `cuda:0`."""
    return device.partition(":")[0]


def device_class(device: str = "cpu") -> str:
    """Name of the machine class of a torch device, the same on every machine of that class.

    A CPU is described by architecture, cores that this process may use, and its best instruction set; a GPU by its
    product name. No host name, no serial number.

    >>> device_class("cpu").startswith("cpu-")
    True
    """
    import torch

    if device.startswith("cuda"):
        return f"cuda-{slug(torch.cuda.get_device_name(torch.device(device)))}"
    return f"cpu-{slug(platform.machine())}-{usable_cores()}c-{instruction_set()}"


def core_ids() -> list[int]:
    """Ids of the cores that this process may run on."""
    return sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else list(range(os.cpu_count() or 1))


def usable_cores() -> int:
    """Number of cores that this process may keep busy: those it may run on, or as many whole ones as its container's quota pays for."""
    quota = cpu_quota()
    return len(core_ids()) if quota is None else max(1, min(len(core_ids()), math.floor(quota)))


def default_threads() -> int:
    """Compute threads where none are named: as many as torch has (it knows of no quota), at most one for each usable core."""
    import torch

    return min(torch.get_num_threads(), usable_cores())


def set_threads(threads: int | None) -> None:
    """Fix the compute threads of this thread and of those that begin to compute later, before the first forward pass.

    Args:
        threads: None takes `default_threads`.
    """
    import torch

    torch.set_num_threads(threads or default_threads())


def instruction_set() -> str:
    """The instruction set that the fastest kernels of this CPU use, such as `avx512_bf16`."""
    import torch

    capabilities = torch.cpu.get_capabilities() if hasattr(torch.cpu, "get_capabilities") else {}
    for name in FAST_DTYPES:
        if capabilities.get(name):
            return name
    return slug(torch.backends.cpu.get_cpu_capability())


def cpu_flags() -> str:
    """All instructions that this processor has, as Linux lists them; elsewhere its name: native code runs only where they are the same."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((" ".join(sorted(line.split()[2:])) for line in lines if line.startswith(("flags", "Features"))), platform.processor())


def lacks_bfloat16() -> bool:
    """Whether this CPU has no instructions for bfloat16: prompts and drafts are then read several times slower than in float32."""
    import torch

    return not torch.ops.mkldnn._is_mkldnn_bf16_supported()


def slug(name: str) -> str:
    """Lower case letters, digits and underscores, joined by dashes."""
    return re.sub(r"[^a-z0-9_]+", "-", name.lower()).strip("-")
