"""What the compiler makes of the kernels. Apart from the tests that run them, which put other
compilers in place of this one."""

from __future__ import annotations

import platform
import subprocess
from pathlib import Path

import pytest

from draftwell.serving.runtime.models.compiled_library import compiler
from draftwell.serving.runtime.models.packed_matmul import SOURCE


@pytest.mark.skipif(
    compiler() is None or platform.machine() != "x86_64",
    reason="no C++ compiler for this processor's kin",
)
@pytest.mark.parametrize(
    ("flags", "instruction"),
    [(("-mavx512f", "-mavx512vl", "-mavx512bf16"), "vdpbf16ps"), (("-mavx2", "-mfma"), "vfmadd")],
)
def test_products_are_not_calls(flags: tuple[str, ...], instruction: str, tmp_path: Path) -> None:
    """As libraries are compiled, without the highest optimisation: the multiplications of up to
    twelve tokens stand in the loops."""
    source = tmp_path / "kernel.cpp"
    source.write_text(
        f'#include "{SOURCE}"\nvoid f(const uint16_t* x, const uint16_t* w, float* out, int64_t n) '
        "{ draftwell::matmul(x, w, out, n, n, n); }\n"
    )
    subprocess.run(
        [
            str(compiler()),
            "-O1",
            "-S",
            "-std=c++17",
            *flags,
            str(source),
            "-o",
            str(tmp_path / "kernel.s"),
        ],
        check=True,
        timeout=60,
    )
    text = (tmp_path / "kernel.s").read_text()
    assert text.count(instruction) >= 2 * (1 + 2 + 3 + 4 + 5 + 6)
