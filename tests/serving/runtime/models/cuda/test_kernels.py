"""The kernels, in processes of their own: whether Triton interprets or compiles is settled when it
is imported."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

CHECKS = Path(__file__).with_name("kernel_checks.py")
needs_triton = pytest.mark.skipif(
    find_spec("triton") is None, reason="Triton is not installed: the dev extra has it on Linux"
)


def run(*arguments: str, **variables: str) -> None:
    """A child process; fails with what it said."""
    found = subprocess.run(
        [sys.executable, *arguments],
        env=os.environ | variables,
        capture_output=True,
        text=True,
        check=False,
    )
    assert found.returncode == 0, found.stdout[-6000:] + found.stderr[-2000:]


def check(*words: str, **variables: str) -> None:
    options = ("-q", "-x", "-p", "no:cacheprovider", "-p", "no:xdist", "-o", "timeout=600")
    run("-m", "pytest", *options, *words, str(CHECKS), **variables)


@needs_triton
@pytest.mark.timeout(900)
def test_products_and_choices_in_the_interpreter() -> None:
    check("-k", "products or chosen or beside", TRITON_INTERPRET="1")


@needs_triton
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_kernels_in_the_interpreter() -> None:
    check(TRITON_INTERPRET="1")


CACHE = """
import os, stat, triton
from draftwell.serving.runtime.models.cuda import kernels
folder = triton.knobs.cache.dir
assert folder == os.environ["WANTED"], folder
assert stat.S_IMODE(os.stat(folder).st_mode) == 0o700
"""


@needs_triton
def test_what_triton_compiles_is_kept_for_this_user_alone(tmp_path: Path) -> None:
    wanted = tmp_path / "draftwell" / "triton"
    run("-c", CACHE, XDG_CACHE_HOME=str(tmp_path), WANTED=str(wanted))


COMPILE = """
import os
import sys
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.language import constexpr
from triton.runtime import driver
from triton.runtime.jit import JITFunction
from draftwell.serving.runtime.commands import Forward
from draftwell.serving.runtime.models.cuda import kernels
from draftwell.serving.runtime.models.cuda.cuda_llama import CudaLlama
from tests.support.models.lean_families import lean_family


class Hopper:
    def get_current_target(self):
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self):
        return 0

    def get_current_stream(self, device):
        return 0


compiled = set()
run = JITFunction.run


def compile_only(self, *arguments, grid, warmup, **options):
    kernel = run(self, *arguments, grid=grid, warmup=True, **options)
    assert kernel.asm["cubin"]
    compiled.add(self.__name__)


driver.set_active(Hopper())
kernels.OVERLAPS = constexpr(True)
JITFunction.run = compile_only
for name, tokens in zip(("llama", "gemma2"), map(int, sys.argv[1:])):
    model = CudaLlama(lean_family(name, torch.bfloat16), ops=kernels)
    model.rollback(slot := model.open(), 0)
    model.forward([Forward("target", slot, (1,) * tokens)])
assert len(compiled) == 7, compiled
assert triton.knobs.cache.dir == os.environ["TRITON_CACHE_DIR"], "where the user wants it"
"""


@needs_triton
@pytest.mark.timeout(900)
@pytest.mark.parametrize("tokens", [(100, 1), pytest.param((1, 100), marks=pytest.mark.slow)])
def test_kernels_compile_for_hopper_without_one(tmp_path: Path, tokens: tuple[int, int]) -> None:
    """By passes of one token and of a prompt, each of another model."""
    run("-c", COMPILE, *map(str, tokens), TRITON_CACHE_DIR=str(tmp_path))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device: compiled kernels")
def test_kernels_on_a_device() -> None:
    check(TRITON_INTERPRET="0")
