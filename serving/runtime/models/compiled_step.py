"""Plain decoding, one token of one row, by compiled layers: one call a layer instead of some twenty.

At one token a forward pass reads every weight once and computes next to nothing; the time goes into memory and into calls.
AOTInductor, torch's own ahead-of-time compiler, makes a shared library of one layer (`compiled_layer`). Weights and slots are its
arguments, so one library serves all layers of a shape. It is kept in a folder of the project's home, by shape, kind of machine, torch and
the code it was made from, and loaded without a compiler. More tokens at once go the eager way of `lean_llama`, where oneDNN's kernels are
faster than what is made here.
"""

from __future__ import annotations

import hashlib
import logging
import os
import shutil
import tempfile
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from serving.device import device_class
from serving.errors import DraftwellError
from serving.runtime.models import compiled_layer, lean_layer
from serving.runtime.models.architecture import Architecture
from serving.runtime.models.compiled_layer import OneToken
from serving.runtime.models.lean_layer import Layer
from serving.runtime.models.slots import Slots

log = logging.getLogger(__name__)

Compile = Literal["auto", "on", "off"]
"""Compiled layers: those that were compiled before; all, compiled now where they are missing; none."""
OPTIONS: dict[str, Any] = {"cpp.dynamic_threads": True, "cpp.enable_floating_point_contract_flag": "fast"}
"""Of Inductor: as many threads as torch has when called, not when compiled; a product and a sum may be one instruction."""
LIBRARY = "layer.so"


class Runner(Protocol):
    """A loaded library."""

    def run(self, inputs: list[Tensor]) -> list[Tensor]:
        """Outputs of a call; inputs are the flattened arguments."""


class CompiledStep:
    """All layers of a model over one token.

    Args:
        weights: of each layer, by name (`lean_layer.layer_weights`), as they are stored.
        windows: as in `Architecture`.
        runners: for each different window its library.
    """

    def __init__(self, weights: Sequence[Mapping[str, Tensor]], windows: Sequence[int | None], runners: Mapping[int | None, Runner],
                 slots: Slots):
        self._layers = [(runners[window], list(one.values())) for one, window in zip(weights, windows, strict=True)]
        self._slots = slots
        self._columns = torch.arange(slots.max_context)

    def __call__(self, x: Tensor, ropes: Sequence[tuple[Tensor, Tensor]], slot: int, position: int) -> Tensor:
        """States `[1, hidden]` of the token at `position` of `slot` before the first layer → after the last.

        Args:
            ropes: for each layer cosines and sines of the position, `[1, 1, head_dim]`.
        """
        place = [torch.tensor([slot]), torch.tensor([position]), self._columns[: position + 1]]
        memories = zip(self._slots.keys, self._slots.values, strict=True)
        for (runner, weights), rope, memory in zip(self._layers, ropes, memories, strict=True):
            (x,) = runner.run([x, *rope, *memory, *place, *weights])
        return x


def compiled_step(layers: Sequence[Layer], weights: Sequence[Mapping[str, Tensor]], slots: Slots, wanted: Compile,
                  home: Path) -> CompiledStep | None:
    """The compiled layers of a bfloat16 model, or None where they are not wanted or, under `auto`, not there yet.

    Args:
        home: the project's home; libraries are kept in its folder `compiled`.
    Raises:
        DraftwellError: they are to be compiled, and there is no C++ compiler or it fails; or a kept library is broken.
    """
    if wanted == "off":
        return None
    runners: dict[int | None, Runner] = {}
    windows = layers[0].shape.windows
    for window in dict.fromkeys(windows):
        number = windows.index(window)
        module = OneToken(layers[number], list(weights[number]), window)
        file = library(module, weights[number], home)
        if wanted == "on" and not file.is_file():
            build(module, weights[number], file)
        if not file.is_file():
            return None
        try:
            runners[window] = load(file)
        except DraftwellError as error:
            if wanted == "on":
                raise
            log.warning("%s; single tokens are decoded without it", error)  # such as one of another machine's C library
            return None
    return CompiledStep(weights, windows, runners, slots)


def is_compiled(layer: Layer, weights: Mapping[str, Tensor], home: Path) -> bool:
    """Whether a model with this first layer was compiled before (if not for all of its windows, `compiled_step` finds out)."""
    return library(OneToken(layer, list(weights), layer.shape.windows[0]), weights, home).is_file()


def library(module: OneToken, weights: Mapping[str, Tensor], home: Path) -> Path:
    """Where a layer's library is, or will be."""
    return home / "compiled" / key(module, weights) / LIBRARY


def load(file: Path) -> Runner:
    """A kept library."""
    try:
        runner: Runner = torch._C._aoti.AOTIModelContainerRunnerCpu(str(file), 1)
    except RuntimeError as error:
        raise DraftwellError(f"the compiled layer {file} cannot be loaded: delete its folder; it is then compiled again",
                             code="broken_compiled_layer") from error
    return runner


def key(module: OneToken, weights: Mapping[str, Tensor]) -> str:
    """What a library depends on: the layer's plan and weights' shapes, the kind of machine, torch, and the code it is compiled from."""
    plan = replace(module.layer.shape, windows=(module.window,), ropes=())
    tensors = [(name, tuple(one.shape), str(one.dtype)) for name, one in weights.items()]
    code = [Path(str(part.__file__)).read_bytes() for part in (compiled_layer, lean_layer)]
    text = repr((plan, tensors, device_class("cpu"), torch.__version__, sorted(OPTIONS.items())))
    return hashlib.sha256(b"".join([text.encode(), *code])).hexdigest()[:32]


def compiler() -> str | None:
    """Path of the C++ compiler that Inductor calls, or None."""
    return shutil.which(os.environ.get("CXX", "g++"))


def examples(shape: Architecture, weights: Mapping[str, Tensor]) -> tuple[Any, ...]:
    """Arguments of `OneToken.forward` to trace a layer with; sizes that vary are neither 0 nor 1, which would be taken as fixed."""
    rope = torch.zeros(1, 1, shape.head_dim, dtype=torch.bfloat16)
    states = torch.zeros(1, len(weights["attention_norm"]), dtype=torch.bfloat16), rope, rope.clone()
    memory = [torch.zeros(3, shape.kv_heads, 48, shape.head_dim, dtype=torch.bfloat16) for _ in range(2)]
    place = torch.tensor([1]), torch.tensor([4]), torch.arange(5)
    return states, tuple(memory), place, [torch.zeros_like(one) for one in weights.values()]


def build(module: OneToken, weights: Mapping[str, Tensor], file: Path) -> None:
    """Compile a layer into the shared library `file`; takes up to a minute on idle cores."""
    if compiler() is None:
        raise DraftwellError("layers cannot be compiled, there is no C++ compiler here: install g++, or load the pair with compile=off",
                             code="no_compiler")
    vary = torch.export.Dim.AUTO
    dynamic = ((None,) * 3, ({0: vary, 2: vary},) * 2, (None, None, {0: vary}), [None] * len(weights))
    file.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=file.parent) as folder, torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the compiler's own, about itself
        arguments = examples(module.layer.shape, weights)
        try:
            traced = torch.export.export(module, arguments, dynamic_shapes=dynamic).module()
            options = {**OPTIONS, "aot_inductor.output_path": str(Path(folder) / LIBRARY)}
            made = torch._inductor.aot_compile(traced, arguments, options=options)
        except Exception as error:  # tracer, compiler and linker have errors of their own
            raise DraftwellError(f"the layers could not be compiled ({str(error)[:200]!r}): load the pair with compile=off",
                                 code="compile_failed") from error
        Path(str(made)).replace(file)
