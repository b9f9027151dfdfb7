"""A cost-padded target: the same function, with the memory traffic and the arithmetic of a larger
model.

Beside every gated feed-forward stands a second one of zeros, and their outputs are added:
mathematically the layer is widened by zero rows (gate, up) and zero columns (down). A padded unit
gives silu(0)·0 = 0, so the sum is what it was.

The zeros stand in matrices of their own, because one wide matrix is not bit-exact: the kernels cut
a long sum into other blocks than a short one (tried with torch 2.13 on a Xeon with AMX, one thread:
down projection 1536 → 20224, bfloat16 differed in the last bit from 33 rows on, float32 at 1 row).
Side by side the real matrices keep their shapes, hence their kernels, and every output bit, in
every dtype and with any number of threads or rows.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from draftwell.serving.errors import DraftwellError

ALIGN = 64
"""Padded widths are multiples of this, as real models' are."""


class PaddedMLP(nn.Module):
    """A feed-forward and its padding.

    Args:
        real: the layer's own gated feed-forward (`gate_proj`, `up_proj`, `down_proj`).
        extra: one of the same kind whose weights are all zero.
    """

    def __init__(self, real: nn.Module, extra: nn.Module):
        super().__init__()
        self.real, self.extra = real, extra

    def forward(self, x: Tensor) -> Tensor:
        """`[..., hidden]` → `[..., hidden]`."""
        out: Tensor = self.real(x) + self.extra(x)
        return out


def feed_forwards(mlp: Any) -> list[Any]:
    """The gated feed-forwards whose outputs a layer adds up: itself, or itself and its padding."""
    return [mlp.real, mlp.extra] if isinstance(mlp, PaddedMLP) else [mlp]


def pad_to(module: Any, parameters: float) -> int:
    """Widen the feed-forward of a Llama-shaped causal language model, in place, until it holds
    about so many parameters.

    Args:
        module: a `PreTrainedModel` whose layers have a gated `mlp`.
        parameters: wanted total, at least what the module has; met to within half of `ALIGN` units
            a layer.
    Returns:
        the parameters that the module has now.
    Raises:
        DraftwellError: a module of another shape, or one that is larger already.
    """
    mlps = gated_feed_forwards(module)
    before = parameter_count(module)
    if not before <= parameters < float("inf"):
        raise DraftwellError(
            (
                f"the target has {before:,} parameters and cannot be padded to {parameters:g}: "
                "name a larger number"
            ),
            code="bad_pad_target",
        )
    per_unit = sum(parameter_count(mlp) / mlp.gate_proj.out_features for mlp in mlps)
    units = round((parameters - before) / per_unit / ALIGN) * ALIGN
    if not units:
        return before
    for layer, mlp in zip(module.base_model.layers, mlps, strict=True):
        layer.mlp = PaddedMLP(mlp, zeros_like_mlp(mlp, units))
    module.config.get_text_config().intermediate_size += units
    return parameter_count(module)


def pad_at_least(module: Any, parameters: float) -> int:
    """As `pad_to`, but a module that has so many parameters stays as it is."""
    return pad_to(module, max(parameters, parameter_count(module)))


def parameter_count(module: nn.Module) -> int:
    """Parameters of a module; tied ones count once."""
    return sum(parameter.numel() for parameter in module.parameters())


def gated_feed_forwards(module: Any) -> list[Any]:
    """The feed-forward of every layer; refused if they are not gated, without biases and of one
    width."""
    found = [getattr(layer, "mlp", None) for layer in getattr(module.base_model, "layers", [])]
    projections = [
        getattr(mlp, name, None) for mlp in found for name in ("gate_proj", "up_proj", "down_proj")
    ]
    if not found or not all(isinstance(p, nn.Linear) and p.bias is None for p in projections):
        raise DraftwellError(
            f"{module.config.model_type} models have no plain gated feed-forward that "
            "could be widened: "
            "only a Llama-shaped target can be padded",
            code="unsupported_architecture",
        )
    return found


def zeros_like_mlp(mlp: Any, width: int) -> Any:
    """A feed-forward of the same class with `width` units, all of whose weights are zero."""
    hidden, weight = mlp.gate_proj.in_features, mlp.gate_proj.weight
    shell = copy.copy(mlp)  # the same activation and settings, other projections
    shell._modules = dict(mlp._modules)
    shell.gate_proj, shell.up_proj = (
        zero_linear(hidden, width, weight),
        zero_linear(hidden, width, weight),
    )
    shell.down_proj = zero_linear(width, hidden, weight)
    shell.intermediate_size = width
    return shell


def zero_linear(inputs: int, outputs: int, like: Tensor) -> nn.Linear:
    """A linear layer of zeros with the dtype and device of `like`.

    The zeros are written: pages that were only ever reserved would all be the kernel's one page of
    zeros, which stays in the cache, and padding would cost nothing.
    """
    layer = nn.Linear(inputs, outputs, bias=False, dtype=like.dtype, device="meta")
    layer.weight = nn.Parameter(
        torch.empty(outputs, inputs, dtype=like.dtype, device=like.device).fill_(0),
        requires_grad=False,
    )
    return layer
