"""Kernels compiled as for processors that lack instructions of this one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
import torch

from draftwell.serving.device import cpu_flags
from draftwell.serving.runtime.models import packed_matmul
from draftwell.serving.runtime.models.compiled_library import compiler

LACKS = {"no-avx512bf16": "avx512_bf16", "no-avx512f": "avx512f"}
PROCESSORS = ("native", *(name for name, flag in LACKS.items() if flag in cpu_flags().split()))
"""This one, and as far as it is neither: one without instructions for bfloat16, and one with
vectors of eight floats."""


def compiles(test: Callable[..., None]) -> Callable[..., None]:
    """Marks of a test that compiles a library."""
    return pytest.mark.slow(pytest.mark.skipif(compiler() is None, reason="no C++ compiler")(test))


def check_any_thread_count(compute: Callable[[], list[torch.Tensor]]) -> None:
    """No number of threads changes a result."""
    before, found = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            found.append(torch.cat(compute()))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(one, found[0]) for one in found)


@contextmanager
def compiled_for(processor: str, folder: Path) -> Iterator[None]:
    """Within it libraries are compiled, and weights packed, for such a processor.

    Args:
        folder: an empty one, for the compiler's files.
    """
    with pytest.MonkeyPatch.context() as patch, ExitStack() as stack:
        patch.setenv("TORCHINDUCTOR_CACHE_DIR", str(folder / "inductor"))
        if processor == "no-avx512f":
            patch.setattr(packed_matmul, "LANES", 8)
            patch.setattr(packed_matmul, "OUTPUTS", 16)
            # of torch's headers those for such vectors
            stack.enter_context(torch._inductor.config.patch({"cpp.simdlen": 256}))
        if processor != "native":
            wrapper = folder / "g++"
            wrapper.write_text(f'#!/bin/sh\nexec {compiler()} "$@" -m{processor}\n')
            wrapper.chmod(0o755)
            patch.setenv("CXX", str(wrapper))
            stack.enter_context(torch._inductor.config.patch({"cpp.cxx": (None, str(wrapper))}))
        yield
