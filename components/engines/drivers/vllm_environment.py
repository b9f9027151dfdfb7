"""The environment that vLLM documents for CPUs, which must be there before Python starts."""

from __future__ import annotations

import os
import sys
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

PREPARED = "DRAFTWELL_PREPARED"


def prepare(*, one_process: bool) -> None:
    """Start this process again with Intel's OpenMP and tcmalloc loaded first, and `OMP_NUM_THREADS`
    threads, one to a core.

    Args:
        one_process: whether the model computes in this process. For worker processes vLLM pins
            threads by itself.
    """
    if os.environ.get(PREPARED):
        return
    cores = ",".join(
        map(str, sorted(os.sched_getaffinity(0))[: int(os.environ["OMP_NUM_THREADS"])])
    )
    found = find_spec("vllm")
    package = Path(found.origin).parent if found and found.origin else Path(sys.prefix)
    libraries = [
        *package.glob("libs/libtcmalloc_minimal*.so*"),
        *(Path(sys.prefix) / "lib").glob("libiomp5.so"),
    ]
    variables = {
        PREPARED: "1",
        "LD_PRELOAD": ":".join(map(str, libraries)),
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_STREAM": "ext://sys.stderr",
        "VLLM_CPU_OMP_THREADS_BIND": cores,
    }
    if one_process:
        # what vLLM sets for its workers (vllm/utils/ompmultiprocessing.py)
        variables |= {
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "KMP_AFFINITY": f"granularity=fine,explicit,proclist=[{cores}]",
            "KMP_BLOCKTIME": "5",
            "KMP_TPAUSE": "0",
        }
    root = os.environ.get("VLLM_CACHE_ROOT", str(Path(sys.prefix) / "cache"))
    defaults = {
        "VLLM_CACHE_ROOT": root,
        "VLLM_CPU_KVCACHE_SPACE": "2",
        # in /tmp otherwise, where others may write
        "TORCHINDUCTOR_CACHE_DIR": str(Path(root) / "inductor"),
    }
    if for_cpus():
        # vLLM 0.32 cannot load again what it compiles ahead of time ('function' object has no
        # attribute 'finalize_loading'), so each start would compile for a minute. Without that it
        # reads Inductor's cache.
        defaults["VLLM_USE_AOT_COMPILE"] = "0"
    os.execve(sys.executable, [sys.executable, *sys.argv], defaults | dict(os.environ) | variables)


def for_cpus() -> bool:
    """Whether the installed vLLM is built for CPUs."""
    for name in ("vllm-cpu", "vllm"):
        try:
            return "cpu" in f"{name} {version(name)}"
        except PackageNotFoundError:
            continue
    return False
