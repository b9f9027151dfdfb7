"""What vLLM computes with on CPUs: the libraries and as many cores as where it was measured.

    python cpu.py libraries        # for LD_PRELOAD: tcmalloc and Intel's OpenMP of this Python's environment, where they are
    python cpu.py cores [THREADS]  # for VLLM_CPU_OMP_THREADS_BIND: the first of the cores that this process may use

Needs Python's own library alone.
"""  # noqa: E501

from __future__ import annotations

import importlib.util
import math
import os
import pathlib
import sys

QUOTA = pathlib.Path("/sys/fs/cgroup/cpu.max")
"""Of a container: microseconds of processor time in each period, or max."""


def libraries() -> str:
    """Paths for LD_PRELOAD; those that it cannot express, with a space or a colon, are left out."""
    found = importlib.util.find_spec("vllm")
    package = (
        pathlib.Path(found.origin).parent if found and found.origin else pathlib.Path(sys.prefix)
    )
    paths = [
        *sorted(package.glob("libs/libtcmalloc_minimal*.so*")),
        *(pathlib.Path(sys.prefix) / "lib").glob("libiomp5.so"),
    ]
    return ":".join(path for path in map(str, paths) if not set(path) & set(" :"))


def cores(threads: int | None) -> str:
    """Numbers of cores with commas: as many as were measured, or as there are; None: as there are.
    Says where there are fewer."""
    mask = sorted(os.sched_getaffinity(0))
    here = min(len(mask), quota())
    if threads is not None and here < threads:
        print(
            f"draftwell: {threads} compute threads were measured and {here} cores are "
            f"here: tune and gate again with --set threads={here}, "
            "or give it more cores",
            file=sys.stderr,
        )
    return ",".join(map(str, mask[: min(here, threads or here)]))


def quota() -> int:
    """Cores that a container's quota comes to, rounded up; very many without one."""
    try:
        most, period = QUOTA.read_text().split()
        return max(1, math.ceil(int(most) / int(period)))
    except (OSError, ValueError):
        return sys.maxsize


if __name__ == "__main__":
    what, *more = sys.argv[1:]
    print(libraries() if what == "libraries" else cores(int(more[0]) if more else None))
