"""The class of machine that this process runs on: numbers measured on one class say nothing about another."""

from __future__ import annotations

import os
import platform
import re

import torch

FAST_DTYPES = ("amx_bf16", "avx512_bf16", "avx_vnni", "avx512_vnni")
"""Instruction sets that decide how fast bfloat16 and int8 run, the strongest first."""


def device_class(device: str = "cpu") -> str:
    """Name of the machine class of a torch device, the same on every machine of that class.

    A CPU is described by architecture, cores that this process may use, and its best instruction set; a GPU by its
    product name. No host name, no serial number.

    >>> device_class("cpu").startswith("cpu-")
    True
    """
    if device.startswith("cuda"):
        return f"cuda-{slug(torch.cuda.get_device_name(torch.device(device)))}"
    return f"cpu-{slug(platform.machine())}-{usable_cores()}c-{instruction_set()}"


def core_ids() -> list[int]:
    """Ids of the cores that this process may run on."""
    return sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else list(range(os.cpu_count() or 1))


def usable_cores() -> int:
    """Number of cores that this process may run on."""
    return len(core_ids())


def instruction_set() -> str:
    """The instruction set that the fastest kernels of this CPU use, such as `avx512_bf16`."""
    capabilities = torch.cpu.get_capabilities() if hasattr(torch.cpu, "get_capabilities") else {}
    for name in FAST_DTYPES:
        if capabilities.get(name):
            return name
    return slug(torch.backends.cpu.get_cpu_capability())


def lacks_bfloat16() -> bool:
    """Whether this CPU has no instructions for bfloat16: prompts and drafts are then read several times slower than in float32."""
    return not torch.ops.mkldnn._is_mkldnn_bf16_supported()


def slug(name: str) -> str:
    """Lower case letters, digits and underscores, joined by dashes."""
    return re.sub(r"[^a-z0-9_]+", "-", name.lower()).strip("-")
