"""What `kernels` computes, by torch: for CPUs, and what kernels are compared with.

Nothing here reads from the device. `fields` is a pass as `packing` makes it; `live` is one int32,
how many of the rows are no padding: tiles beyond may be left out. What comes out for padding is
nobody's affair.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from draftwell.serving.number_format import Weights
from draftwell.serving.runtime.models.architecture import Architecture
from draftwell.serving.runtime.models.cuda import packing
from draftwell.serving.runtime.models.lean_layer import Rope, norm

PROGRAMS = 396
"""How many programs shall share a product: three for each of the 132 multiprocessors of an H100 or
H200. A constant, whatever the card: another one would give other sums."""
FEWEST = 3
"""Steps of one program at least: as many are loaded at once."""
OUTPUTS = 64
"""Outputs of one program."""


def step_of(dtype: torch.dtype) -> int:
    """Inputs that a program multiplies at once."""
    return 32 if dtype == torch.float32 else 64


@dataclass(frozen=True, eq=False)
class SplitWeight:
    """A weight `[out, in]` and its bias `[out]`.

    Args:
        splits: pieces of the inputs, summed apart and then in order.
        piece: inputs of each piece but perhaps the last.
    """

    weight: Tensor
    bias: Tensor | None
    splits: int
    piece: int


def split(
    weight: Tensor, bias: Tensor | None = None, weights: Weights | None = None
) -> SplitWeight:
    """A weight and the pieces of its sums, which depend on its shape and dtype alone.

    Args:
        weights: None: rounded weights are read on CPUs only (`pair.check_weights`).
    """
    assert weights is None, weights
    outputs, inputs = weight.shape
    step = step_of(weight.dtype)
    steps = -(-inputs // step)
    wanted = max(1, PROGRAMS // -(-outputs // OUTPUTS))
    piece = max(FEWEST, -(-steps // wanted)) * step
    return SplitWeight(weight.detach().contiguous(), bias, -(-inputs // piece), piece)


def sharing(groups: int) -> int:
    """Tokens of a tile at most, where so many query heads share a key head."""
    return 1


def product(x: Tensor, by: SplitWeight, live: Tensor) -> Tensor:
    """`[tokens, in]` → float32 sums of each piece of the inputs, `[splits, tokens, out]`, without
    the bias."""
    pieces = x.float().split(by.piece, -1), by.weight.float().split(by.piece, -1)
    return torch.stack([F.linear(*piece) for piece in zip(*pieces, strict=True)])


def total(parts: Tensor, bias: Tensor | None) -> Tensor:
    """Sums over all inputs, `[tokens, out]`: of the pieces in order."""
    summed = parts[0]
    for part in parts[1:]:
        summed = summed + part
    return summed if bias is None else summed + bias


def add_norm(
    parts: Tensor,
    bias: Tensor | None,
    x: Tensor,
    weights: tuple[Tensor | None, Tensor],
    eps: float,
    dtype: torch.dtype,
) -> Tensor:
    """Add a product to the states x `[tokens, hidden]` float32, in place; their norm, in `dtype`.

    Args:
        parts: `[splits, tokens, hidden]`; of no product, if there are no splits.
        weights: of the norm of what is added, if it has one, and of the norm after it.
    """
    before, after = weights
    if len(parts):
        x += norm(total(parts, bias), None if before is None else before.float(), eps)
    normed: Tensor = norm(x, after.float(), eps).to(dtype)
    return normed


def place_heads(
    parts: Tensor,
    bias: Tensor | None,
    qk_norm: Tensor | None,
    rope: Rope,
    fields: Tensor,
    memory: tuple[Tensor, Tensor],
    shape: Architecture,
) -> Tensor:
    """Queries `[tokens, heads, head_dim]` of the product qkv; keys and values go into their places.

    Args:
        qk_norm: `[heads + kv_heads, head_dim]`.
        rope: cosines and signed sines `[positions, 1, head_dim]` float32.
        memory: keys and values of a layer, `[slots, kv_heads, positions, head_dim]`.
    """
    keys, values = memory
    qkv = total(parts, bias).unflatten(-1, (-1, shape.head_dim))
    qk, value = qkv.split([shape.heads + shape.kv_heads, shape.kv_heads], 1)
    if qk_norm is not None:
        qk = F.rms_norm(qk, qk.shape[-1:], None, shape.eps) * qk_norm
    cos, sin = (one[fields[packing.POSITION]] for one in rope)
    qk = (qk * cos + qk.roll(shape.head_dim // 2, -1) * sin).to(keys.dtype)
    where = fields[packing.SLOT], slice(None), fields[packing.PLACE]
    keys[where], values[where] = qk[:, shape.heads :], value.to(keys.dtype)
    query: Tensor = qk[:, : shape.heads]
    return query


def attend(
    query: Tensor,
    memory: tuple[Tensor, Tensor],
    fields: Tensor,
    shape: Architecture,
    window: int | None,
) -> Tensor:
    """Queries `[tokens, heads, head_dim]` → `[tokens, heads * head_dim]`.

    Args:
        memory: as for `place_heads`.
        window: positions that a token sees, its own included; None: all.
    """
    start, position = fields[packing.START, :, None], fields[packing.POSITION, :, None]
    p = torch.arange(memory[0].shape[2], device=query.device)
    seen = (p <= position) & (position - p < (window or packing.NEVER))
    depth = (p - start).clamp(0, packing.DEPTH - 1)
    on_path = start + fields[packing.PATHS :].T.gather(1, depth)
    places = torch.where(p < start, p, on_path).where(seen, 0)
    keys, values = (one[fields[packing.SLOT, :, None], :, places].float() for one in memory)
    grouped = query.float().unflatten(1, (shape.kv_heads, -1))
    scores = torch.einsum("tkgd,tpkd->tkgp", grouped, keys) * shape.scale
    if shape.attention_softcap:
        scores = torch.tanh(scores / shape.attention_softcap) * shape.attention_softcap
    weights = scores.masked_fill(~seen[:, None, None], -torch.inf).softmax(-1)
    return torch.einsum("tkgp,tpkd->tkgd", weights, values).flatten(1).to(query.dtype)


def activate(parts: Tensor, bias: Tensor | None, activation: str, dtype: torch.dtype) -> Tensor:
    """The gate's activation times up, `[tokens, intermediate]`, of their product `[splits, tokens,
    2 * intermediate]`."""
    gate, up = total(parts, bias).chunk(2, -1)
    bend = F.silu if activation == "silu" else partial(F.gelu, approximate="tanh")
    return (bend(gate) * up).to(dtype)


def choose(logits: Tensor, fields: Tensor, tokens: Tensor | None) -> None:
    """Write the likeliest token of each row of logits `[tokens, columns]` over the ids, and bring
    positions and places to it: so the same pass, run again, reads it.

    Args:
        tokens: `[columns]` ids of the columns; None: column i is token i.
    """
    place = logits.max(-1).indices  # of equals the first, as in LogitRows.top
    fields[packing.ID] = (place if tokens is None else tokens[place]).int()
    fields[packing.POSITION] += 1
    fields[packing.PLACE] += 1
