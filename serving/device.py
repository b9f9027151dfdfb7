"""The device that a process computes on, and the class of machine that it is: numbers measured on
one say nothing about another."""

from __future__ import annotations

import ctypes
import math
import os
import platform
import re
from collections.abc import Iterable
from importlib.util import find_spec
from pathlib import Path
from shutil import which
from typing import Any

from draftwell.serving.cpu_quota import cpu_quota
from draftwell.serving.errors import DraftwellError

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
    """The device of every command and flow that is not given one: `$DRAFTWELL_DEVICE`, else cuda
    where there is such a device, else cpu.

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
        raise DraftwellError(
            f"there is no {option} {device}: choose cpu or cuda", code="unknown_device"
        )
    return device


def checked_device(device: str, option: str = "--device") -> str:
    """A device's name, where there is such a device here."""
    if known_device(device, option) == "cuda" and not cuda_available():
        raise DraftwellError(
            (
                f"{option} cuda: {cuda_problem() or 'torch sees no CUDA device here'}, or use "
                f"{option} cpu"
            ),
            code="no_cuda",
        )
    return device


def cuda_problem() -> str | None:
    """Why torch cannot compute on a CUDA device here, in one line with the fix; None where it can.

    A build of torch without CUDA, no driver, a driver that is older than the build, no visible
    device, a device that the build has no code for, or one on which a first addition fails.
    """
    import torch

    if torch.version.cuda is None:
        return f"torch {torch.__version__} is a build without CUDA: install a CUDA build of torch"
    if not torch.cuda.is_available():
        return driver_problem(driver_version(), torch.version.cuda)
    major, minor = torch.cuda.get_device_capability()
    if not has_code_for((major, minor), torch.cuda.get_arch_list()):
        return (
            f"torch {torch.__version__} has no code for this GPU "
            f"({torch.cuda.get_device_name()}, sm_{major}{minor}; it has "
            f"{', '.join(torch.cuda.get_arch_list())}): install a build for it"
        )
    try:
        torch.ones(1, device="cuda").add_(1).item()
    except RuntimeError as error:
        return f"the GPU does not compute ({' '.join(str(error).split()[:16])}): see nvidia-smi"
    return None


def driver_version() -> int | None:
    """The CUDA version that the NVIDIA driver supports, as 1000 × major + 10 × minor; 0: no driver;
    None: torch cannot tell."""
    import torch

    try:
        return int(getattr(torch._C, "_cuda_getDriverVersion")())  # only builds with CUDA have it  # noqa: B009
    except (AttributeError, RuntimeError):
        return None


def driver_problem(driver: int | None, built_for: str) -> str:
    """Why no device is seen by a torch with CUDA, with the fix.

    Args:
        driver: as `driver_version` returns it.
        built_for: CUDA version of the build of torch, such as 13.0; a driver for an earlier minor
            version runs it.

    >>> driver_problem(12040, "13.0").partition(":")[0]
    'the NVIDIA driver supports CUDA 12.4, torch was built for 13.0'
    """
    if driver == 0:
        return "there is no NVIDIA driver here (nvidia-smi): install it"
    if driver is not None and driver // 1000 < int(built_for.partition(".")[0]):
        return (
            f"the NVIDIA driver supports CUDA {driver // 1000}.{driver % 1000 // 10}, "
            f"torch was built for {built_for}: update the "
            f"driver, or install a build of torch for CUDA {driver // 1000}"
        )
    return (
        "torch sees no CUDA device: check nvidia-smi, CUDA_VISIBLE_DEVICES, and the "
        "container's --gpus"
    )


def has_code_for(capability: tuple[int, int], built_for: Iterable[str]) -> bool:
    """Whether a build runs on a GPU: code for its major version and no later minor one, or PTX
    (`compute_…`) of an earlier version.

    >>> (
    ...     has_code_for((9, 0), ["sm_80", "sm_90"]),
    ...     has_code_for((6, 1), ["sm_70", "sm_80"]),
    ...     has_code_for((12, 1), ["sm_120"]),
    ... )
    (True, False, True)
    """
    for name in built_for:
        kind, _, digits = name.partition("_")
        digits = digits.rstrip("af")
        if not digits.isdecimal():
            continue
        version = (int(digits[:-1]), int(digits[-1]))
        if (kind == "sm" and version[0] == capability[0] and version <= capability) or (
            kind == "compute" and version <= capability
        ):
            return True
    return False


def kernel_problem(device: Any) -> str | None:
    """Why the kernels in Triton do not run on a CUDA device; None: they do.

    Args:
        device: a `torch.device`.
    """
    import torch

    if find_spec("triton") is None:
        return "Triton is not installed"
    if not (os.environ.get("CC") or which("gcc") or which("clang")):
        return "there is no C compiler for Triton (gcc)"
    if torch.cuda.get_device_capability(device) < (8, 0):
        return "the card is older than Ampere"
    return None


def device_type(device: str) -> str:
    """cpu or cuda, of a torch device such as `cuda:0`."""
    return device.partition(":")[0]


def device_class(device: str = "cpu") -> str:
    """Name of the machine class of a torch device, the same on every machine of that class.

    A CPU is described by architecture, cores that this process may use, and its best instruction
    set; a GPU by its product name. No host name, no serial number.

    >>> device_class("cpu").startswith("cpu-")
    True
    """
    import torch

    if device.startswith("cuda"):
        return f"cuda-{slug(torch.cuda.get_device_name(torch.device(device)))}"
    return f"cpu-{slug(platform.machine())}-{usable_cores()}c-{instruction_set()}"


M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
"""Numbers of `mallopt`'s parameters (malloc.h)."""


def keep_freed_memory() -> None:
    """Let the C library keep some of what is freed, for the next tensor of that size.

    Else the system gives new pages, zeroed, to every tensor as large as the logits of some rows,
    which takes longer than a softmax over them. It holds for the whole process, so the commands and
    the server ask for it, never the engine in a program of somebody else. Does nothing where the
    library has no `mallopt`.
    """
    set_parameter = getattr(ctypes.CDLL(None), "mallopt", None)
    if set_parameter is not None:
        set_parameter(M_MMAP_THRESHOLD, 32 << 20)  # the most that it takes
        set_parameter(M_TRIM_THRESHOLD, 64 << 20)


def core_ids() -> list[int]:
    """Ids of the cores that this process may run on."""
    return (
        sorted(os.sched_getaffinity(0))
        if hasattr(os, "sched_getaffinity")
        else list(range(os.cpu_count() or 1))
    )


def usable_cores() -> int:
    """Number of cores that this process may keep busy: those it may run on, or as many whole ones
    as its container's quota pays for."""
    quota = cpu_quota()
    return len(core_ids()) if quota is None else max(1, min(len(core_ids()), math.floor(quota)))


def default_threads() -> int:
    """Compute threads where none are named: as many as torch has (it knows of no quota), at most
    one for each usable core."""
    import torch

    return min(torch.get_num_threads(), usable_cores())


def set_threads(threads: int | None) -> None:
    """Fix the compute threads of this thread and of those that begin to compute later, before the
    first forward pass.

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
    """All instructions that this processor has, as Linux lists them; elsewhere its name: native
    code runs only where they are the same."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next(
        (
            " ".join(sorted(line.split()[2:]))
            for line in lines
            if line.startswith(("flags", "Features"))
        ),
        platform.processor(),
    )


def lacks_bfloat16() -> bool:
    """Whether this CPU has no instructions for bfloat16: by torch, models are several times slower
    in it."""
    import torch

    return not torch.ops.mkldnn._is_mkldnn_bf16_supported()


def slug(name: str) -> str:
    """Lower case letters, digits and underscores, joined by dashes."""
    return re.sub(r"[^a-z0-9_]+", "-", name.lower()).strip("-")
