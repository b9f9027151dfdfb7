"""Shared libraries of layers: compiled once, kept in the project's home, loaded without a compiler.

AOTInductor, torch's own ahead-of-time compiler, makes a library of one layer (`compiled_layer`).
Weights and slots are its arguments, so one library serves all layers of a shape. It is kept by
shape, kind of machine, torch and the code it was made from.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from draftwell.serving.artifacts.compiled_libraries import LIBRARY
from draftwell.serving.device import cpu_flags
from draftwell.serving.errors import DraftwellError
from draftwell.serving.runtime.models import (
    compiled_layer,
    lean_layer,
    packed_matmul,
    quantised,
    row_attention,
    row_kernel,
)
from draftwell.serving.runtime.models.compiled_layer import (
    BeforeAttention,
    CompiledLayer,
    HalfLayer,
    Head,
    ManyRows,
    OneRow,
    OneRowAttention,
    RowsAttention,
)

OPTIONS: dict[str, Any] = {
    "cpp.dynamic_threads": True,
    "cpp.enable_floating_point_contract_flag": "fast",
}
"""Of Inductor: as many threads as torch has when called, not when compiled; a product and a sum may
be one instruction."""
KERNELS = packed_matmul.SOURCE, row_kernel.SOURCE
"""The second uses the first."""
VARIES = torch.export.Dim.AUTO
FEW = 4
"""Tokens that a form for several is traced with."""


class Runner(Protocol):
    """A loaded library."""

    def run(self, inputs: list[Tensor]) -> list[Tensor]:
        """Outputs of a call; inputs are the flattened arguments."""


def library(name: str, folders: Sequence[Path]) -> Path:
    """Where a library is, by its key: in the first of the folders that has it; if none has, where
    it will be, in the last."""
    files = [folder / name / LIBRARY for folder in folders]
    return next((file for file in files if file.is_file()), files[-1])


def load(file: Path) -> Runner:
    """A kept library."""
    try:
        runner: Runner = torch._C._aoti.AOTIModelContainerRunnerCpu(str(file), 1)
    except RuntimeError as error:
        raise DraftwellError(
            (
                f"the compiled layer {file} cannot be loaded: delete its folder; it is then "
                "compiled again"
            ),
            code="broken_compiled_layer",
        ) from error
    return runner


def key(module: CompiledLayer, weights: Mapping[str, Tensor]) -> str:
    """What a layer's library depends on: its form, plan and weights' shapes, the kind of machine,
    torch, and the code compiled."""
    plan = replace(module.layer.shape, windows=(module.window,), ropes=())
    return digest(
        type(module).__name__,
        plan,
        [(name, tuple(one.shape), str(one.dtype)) for name, one in weights.items()],
    )


def half_key(module: HalfLayer, weights: Mapping[str, Tensor]) -> str:
    """What the library of half a layer depends on."""
    plan = replace(module.layer.shape, windows=(), ropes=())
    return digest(
        type(module).__name__,
        plan,
        [(name, tuple(one.shape), str(one.dtype)) for name, one in weights.items()],
    )


def attention_key(module: RowsAttention | OneRowAttention) -> str:
    """What the library of an attention depends on."""
    windows = (module.window,) if isinstance(module, RowsAttention) else ()
    return digest(type(module).__name__, replace(module.shape, windows=windows, ropes=()))


def head_key(weight: Tensor) -> str:
    """What the library of a head depends on; `weight` as `Head` takes it."""
    return digest(Head.__name__, tuple(weight.shape), str(weight.dtype))


def digest(*parts: object) -> str:
    """A key of these parts, the processor's instructions, torch and the code."""
    parts_of_code = compiled_layer, lean_layer, packed_matmul, quantised, row_attention, row_kernel
    files = [__file__, *(str(part.__file__) for part in parts_of_code), *map(str, KERNELS)]
    code = [Path(file).read_bytes() for file in files]
    text = repr((*parts, cpu_flags(), torch.__version__, sorted(OPTIONS.items())))
    return hashlib.sha256(b"".join([text.encode(), *code])).hexdigest()[:32]


def shims() -> dict[torch._ops.OpOverload, list[str]]:
    """Inductor's option `aot_inductor.custom_ops_to_c_shims`: it puts `extern` before each text,
    within `extern "C"`."""
    alike = (
        f'static_assert(draftwell::LANES == {packed_matmul.LANES}, "weights are packed for '
        'other vectors");\n'
    )
    kernels = '"C++" {\n' + "\n".join(file.read_text() for file in KERNELS) + alike + "}"
    return {
        torch.ops.draftwell.packed_matmul.default: [kernels, packed_matmul.SHIM.strip()],
        torch.ops.draftwell.row_attention.default: [kernels, row_kernel.SHIM.strip()],
    }


def compiler() -> str | None:
    """Path of the C++ compiler that Inductor calls, or None."""
    return shutil.which(os.environ.get("CXX", "g++"))


def examples(
    module: CompiledLayer, weights: Mapping[str, Tensor]
) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """Arguments of `forward` to trace a layer with, and which of their sizes vary.

    Sizes that vary are neither 0 nor 1, which would be taken as fixed, and all different, so that
    none is taken for another.
    """
    shape, dtype = module.layer.shape, torch.bfloat16
    several, one_row = isinstance(module, OneRow | ManyRows), isinstance(module, OneRow)
    tokens = FEW if several else 1
    rope = torch.zeros(tokens, 1, shape.head_dim, dtype=dtype)
    states = torch.zeros(tokens, len(weights["attention_norm"]), dtype=dtype), rope, rope.clone()
    by_token = {0: VARIES} if several else None
    slots = (
        (shape.kv_heads, 48, shape.head_dim) if one_row else (3, shape.kv_heads, 48, shape.head_dim)
    )
    memory = tuple(torch.zeros(*slots, dtype=dtype) for _ in range(2))
    vary_memory = {1: VARIES} if one_row else {0: VARIES, 2: VARIES}
    positions = torch.arange(5, 5 + tokens)
    place: tuple[Tensor, ...]
    vary_place: tuple[Any, ...]
    if one_row:
        place, vary_place = (
            (positions, torch.zeros(tokens, 9, dtype=dtype)),
            (by_token, {**(by_token or {}), 1: VARIES}),
        )
    else:
        place, vary_place = (
            (torch.zeros_like(positions), positions, torch.arange(9)),
            (by_token, by_token, {0: VARIES}),
        )
    dense = [torch.zeros(one.shape, dtype=one.dtype) for one in weights.values()]
    return (states, memory, place, dense), (
        (by_token,) * 3,
        (vary_memory,) * 2,
        vary_place,
        [None] * len(dense),
    )


def build(module: CompiledLayer, weights: Mapping[str, Tensor], file: Path) -> None:
    """Compile a layer into the shared library `file`: 10 to 13 s of processor time (SmolLM2-135M),
    the first of a machine 12 s more."""
    build_library(module, *examples(module, weights), file)


def build_half(module: HalfLayer, weights: Mapping[str, Tensor], hidden: int, file: Path) -> None:
    """Compile half a layer of a model with states of size `hidden`."""
    shape = module.layer.shape
    states = [torch.zeros(FEW, hidden, dtype=torch.bfloat16)]
    if isinstance(module, BeforeAttention):
        states += [torch.zeros(FEW, 1, shape.head_dim, dtype=torch.bfloat16) for _ in range(2)]
    else:
        states.insert(0, torch.zeros(FEW, shape.heads * shape.head_dim, dtype=torch.bfloat16))
    dense = [torch.zeros(one.shape, dtype=one.dtype) for one in weights.values()]
    build_library(
        module, (tuple(states), dense), (({0: VARIES},) * len(states), [None] * len(dense)), file
    )


def build_attention(module: RowsAttention | OneRowAttention, file: Path) -> None:
    """Compile the attention of rows of one token, or of one row."""
    shape, dtype, by_token = module.shape, torch.bfloat16, {0: VARIES}
    heads = tuple(
        torch.zeros(FEW, count, shape.head_dim, dtype=dtype)
        for count in (shape.heads, shape.kv_heads, shape.kv_heads)
    )
    if isinstance(module, OneRowAttention):
        slot = tuple(torch.zeros(shape.kv_heads, 48, shape.head_dim, dtype=dtype) for _ in range(2))
        into = torch.arange(5, 5 + FEW), torch.zeros(FEW, 9, dtype=dtype)
        return build_library(
            module,
            (heads, slot, into),
            ((by_token,) * 3, ({1: VARIES},) * 2, (by_token, {0: VARIES, 1: VARIES})),
            file,
        )
    memory = tuple(
        torch.zeros(3, shape.kv_heads, 48, shape.head_dim, dtype=dtype) for _ in range(2)
    )
    place = torch.zeros(FEW, dtype=torch.long), torch.arange(5, 5 + FEW), torch.arange(9)
    build_library(
        module,
        (heads, memory, place),
        ((by_token,) * 3, ({0: VARIES, 2: VARIES},) * 2, (by_token, by_token, {0: VARIES})),
        file,
    )


def build_head(weight: Tensor, file: Path) -> None:
    """The same for a head; of `weight` the shape and dtype count."""
    inputs = 2 * weight.shape[1] if weight.dim() > 2 else weight.shape[1]
    states = torch.zeros(FEW, inputs, dtype=torch.bfloat16)
    build_library(
        Head(), (states, torch.zeros(weight.shape, dtype=weight.dtype)), ({0: VARIES}, None), file
    )


def build_library(
    module: torch.nn.Module, arguments: tuple[Any, ...], vary: tuple[Any, ...], file: Path
) -> None:
    """Trace a module with arguments of which some sizes vary, and compile it.

    Raises:
        DraftwellError: there is no C++ compiler, or it fails.
    """
    if compiler() is None:
        raise DraftwellError(
            (
                "layers cannot be compiled, there is no C++ compiler here: install g++, or "
                "load the pair with compile=off"
            ),
            code="no_compiler",
        )
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with (
            tempfile.TemporaryDirectory(dir=file.parent) as folder,
            torch.no_grad(),
            warnings.catch_warnings(),
        ):
            warnings.simplefilter("ignore")  # the compiler's own, about itself
            traced = torch.export.export(module, arguments, dynamic_shapes=vary).module()
            options = {
                **OPTIONS,
                "aot_inductor.output_path": str(Path(folder) / LIBRARY),
                "aot_inductor.custom_ops_to_c_shims": shims(),
            }
            made = torch._inductor.aot_compile(traced, arguments, options=options)
            Path(str(made)).replace(file)
    # tracer, compiler, linker and a folder that may not be written to have errors of their own
    except Exception as error:
        raise DraftwellError(
            (
                f"the layers could not be compiled ({str(error)[:200]!r}): load the pair with "
                "compile=off"
            ),
            code="compile_failed",
        ) from error
