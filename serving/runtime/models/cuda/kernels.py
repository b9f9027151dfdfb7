"""The kernels of a pass, in Triton: `reference` says what each computes.

A token's numbers never depend on what else is in the pass. Tiles and blocks are constants; sums
over the inputs of a product are cut by the weight's shape (`reference.split`), keys by their
absolute positions, and the pieces are added in order. cuBLAS chooses all that by the number of
rows, which is why a row comes out differently in another batch (Thinking Machines, "Defeating
Nondeterminism in LLM Inference"). Padding is computed where leaving it out would take longer: only
its own numbers come of it.

Tests on CPUs run in Triton's interpreter: tests/serving/runtime/models/cuda/test_kernels.py.
"""

# A kernel has no other way to its numbers than parameters, and none of them has a type.
# ruff: noqa: PLR0913
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
from __future__ import annotations

import os
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language import constexpr

from draftwell.serving.artifacts.compiled_libraries import own_folder
from draftwell.serving.runtime.models.architecture import Architecture
from draftwell.serving.runtime.models.cuda import packing
from draftwell.serving.runtime.models.cuda.reference import OUTPUTS, SplitWeight, step_of
from draftwell.serving.runtime.models.lean_layer import Rope

if not os.environ.keys() & {"TRITON_CACHE_DIR", "TRITON_HOME"}:
    # Triton runs what is there, and asks nobody whose it is.
    triton.knobs.cache.dir = str(own_folder("triton"))

TILE = PROMPT_TILE = (64, OUTPUTS, 4)
"""Tokens, outputs and warps of one program of a product, for few tokens and for more than a tile:
64 are the fewest of Hopper's wgmma, and for as many it still takes less time than reading the
weights. (128, 128, 8) reads prompts faster, where a card gives the same bits."""
QUERIES = 16
"""Query heads times tokens of one program of attention."""
SPAN, BLOCK = 256, 64
"""Positions of one program of attention, and of one of its steps."""
COLUMNS, CHOICES = 1024, 8192
"""Of one program of an activation, and of one step of a choice."""

ID, SLOT, POSITION, PLACE, START, _, FIRST, SHARING, LIVE, PATHS = map(constexpr, packing.ORDER)


def on_hopper() -> bool:
    """Whether kernels are compiled, and for devices on which one may start while the last ends."""
    if triton.knobs.runtime.interpret or not torch.cuda.is_available():
        return False
    devices = range(torch.cuda.device_count())
    return {torch.cuda.get_device_capability(device) for device in devices} == {(9, 0)}


OVERLAPS = constexpr(on_hopper())
"""Programmatic dependent launch: it hides the time in which a kernel is started, a large part of a
small model's pass. Newer devices have it, too, but Triton 3.6 fails to compile some kernels there.
"""


def power(size: int) -> int:
    """The smallest power of two that is at least so large."""
    return 1 << (size - 1).bit_length()


def padded(size: int) -> int:
    """Elements of the block that holds `size`."""
    return max(16, power(size))


def warps(columns: int) -> int:
    """Warps for a row of so many columns, a constant of the model."""
    return min(16, max(4, padded(columns) // 512))


def sharing(groups: int) -> int:
    """Tokens of a tile at most, where so many query heads share a key head."""
    return max(1, QUERIES // power(groups))


@triton.jit
def _enter():
    """Let the next kernel start, and wait for what the last one wrote: first in each kernel."""
    if OVERLAPS:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()


@triton.jit
def _field(fields, field: constexpr, tokens, at):
    return tl.load(fields + tokens * field + at)


@triton.jit
def _product(
    x, weight, out, live, tokens, outputs, inputs, piece, M: constexpr, N: constexpr, K: constexpr,
    SKIPS: constexpr,
):  # fmt: skip
    _enter()
    first = tl.program_id(1) * M
    if SKIPS:  # noqa: SIM102 - one is known to the compiler
        if first >= tl.load(live):
            return
    rows, columns = first + tl.arange(0, M), tl.arange(0, N)
    column = tl.program_id(0) * N
    known = column + columns < outputs
    weight += column.to(tl.int64) * inputs
    split = tl.program_id(2)
    begin = split * piece
    total = tl.zeros((M, N), tl.float32)
    for at in range(begin, tl.minimum(begin + piece, inputs), K):
        ks = at + tl.arange(0, K)
        a = tl.load(
            x + rows[:, None] * inputs + ks[None, :],
            mask=(rows[:, None] < tokens) & (ks[None, :] < inputs),
            other=0.0,
        )
        b = tl.load(
            weight + columns[None, :] * inputs + ks[:, None],
            mask=known[None, :] & (ks[:, None] < inputs),
            other=0.0,
        )
        total = tl.dot(a, b, total, input_precision="ieee")
    out += (split * tokens + first).to(tl.int64) * outputs + column
    places = tl.arange(0, M)[:, None] * outputs + columns[None, :]
    tl.store(out + places, total, mask=(rows[:, None] < tokens) & known[None, :])


def product(x: Tensor, by: SplitWeight, live: Tensor) -> Tensor:
    tokens, inputs = x.shape
    outputs = len(by.weight)
    out = x.new_empty(by.splits, tokens, outputs, dtype=torch.float32)
    rows, columns, warps = TILE if tokens <= TILE[0] else PROMPT_TILE
    _product[(triton.cdiv(outputs, columns), triton.cdiv(tokens, rows), by.splits)](
        x,
        by.weight,
        out,
        live,
        tokens,
        outputs,
        inputs,
        by.piece,
        M=rows,
        N=columns,
        K=step_of(x.dtype),
        SKIPS=tokens > rows,
        num_warps=warps,
        launch_pdl=OVERLAPS.value,
        num_stages=4,
    )
    return out


@triton.jit
def _total(parts, bias, at, step, known, mask, SPLITS: constexpr, BIASED: constexpr):
    """Sums of the pieces, in order, of the columns `at`; `known`: columns of the bias."""
    total = tl.load(parts + at, mask=mask, other=0.0)
    for _ in tl.static_range(1, SPLITS):
        parts += step
        total += tl.load(parts + at, mask=mask, other=0.0)
    if BIASED:
        total += tl.load(bias + known, mask=mask, other=0.0).to(tl.float32)
    return total


@triton.jit
def _normed(x, weight, columns, mask, size, eps):
    square = tl.sum(x * x, 0) / size
    return x * (1.0 / tl.sqrt(square + eps)) * tl.load(weight + columns, mask=mask, other=0.0)


@triton.jit
def _add_norm(
    parts, bias, x, before, after, out, tokens, size, eps, SPLITS: constexpr, BIASED: constexpr,
    NORMED: constexpr, COLUMNS: constexpr,
):  # fmt: skip
    _enter()
    token = tl.program_id(0)
    columns = tl.arange(0, COLUMNS)
    mask = columns < size
    own = token * size + columns
    state = tl.load(x + own, mask=mask, other=0.0)
    if SPLITS:
        added = _total(parts, bias, own, tokens * size, columns, mask, SPLITS, BIASED)
        if NORMED:
            added = _normed(added, before, columns, mask, size, eps)
        state += added
        tl.store(x + own, state, mask=mask)
    normed = _normed(state, after, columns, mask, size, eps)
    tl.store(out + own, normed.to(out.dtype.element_ty), mask=mask)


def add_norm(
    parts: Tensor,
    bias: Tensor | None,
    x: Tensor,
    weights: tuple[Tensor | None, Tensor],
    eps: float,
    dtype: torch.dtype,
) -> Tensor:
    tokens, size = x.shape
    out = torch.empty_like(x, dtype=dtype)
    before, after = weights
    _add_norm[(tokens,)](
        parts,
        x if bias is None else bias,
        x,
        x if before is None else before,
        after,
        out,
        tokens,
        size,
        eps,
        SPLITS=len(parts),
        BIASED=bias is not None,
        NORMED=before is not None,
        COLUMNS=padded(size),
        num_warps=warps(size),
        launch_pdl=OVERLAPS.value,
    )
    return out


@triton.jit
def _place_heads(
    parts, bias, qk_norm, cos, sin, fields, query, keys, values, tokens, context, eps,
    SPLITS: constexpr, HEADS: constexpr, KV_HEADS: constexpr, DIM: constexpr, PADDED: constexpr,
    BIASED: constexpr, NORMED: constexpr,
):  # fmt: skip
    _enter()
    token, head = tl.program_id(0), tl.program_id(1)
    width = (HEADS + 2 * KV_HEADS) * DIM
    own, step, dims = token * width, tokens * width, tl.arange(0, PADDED)
    mask = dims < DIM
    here, other = head * DIM + dims, head * DIM + (dims + DIM // 2) % DIM
    x = _total(parts, bias, own + here, step, here, mask, SPLITS, BIASED)
    if head < HEADS + KV_HEADS:
        y = _total(parts, bias, own + other, step, other, mask, SPLITS, BIASED)
        if NORMED:
            scale = 1.0 / tl.sqrt(tl.sum(x * x, 0) / DIM + eps)
            x = x * scale * tl.load(qk_norm + here, mask=mask, other=0.0)
            y = y * scale * tl.load(qk_norm + other, mask=mask, other=0.0)
        turn = _field(fields, POSITION, tokens, token) * DIM + dims
        x = x * tl.load(cos + turn, mask=mask, other=0.0)
        x += y * tl.load(sin + turn, mask=mask, other=0.0)
    if head < HEADS:
        into = query + token * HEADS * DIM + here
    else:
        slot = _field(fields, SLOT, tokens, token).to(tl.int64)
        line = (slot * KV_HEADS + (head - HEADS) % KV_HEADS) * context
        at = (line + _field(fields, PLACE, tokens, token)) * DIM + dims
        into = keys + at
        if head >= HEADS + KV_HEADS:
            into = values + at
    tl.store(into, x.to(query.dtype.element_ty), mask=mask)


def place_heads(
    parts: Tensor,
    bias: Tensor | None,
    qk_norm: Tensor | None,
    rope: Rope,
    fields: Tensor,
    memory: tuple[Tensor, Tensor],
    shape: Architecture,
) -> Tensor:
    splits, tokens, _ = parts.shape
    query = memory[0].new_empty(tokens, shape.heads, shape.head_dim)
    _place_heads[(tokens, shape.heads + 2 * shape.kv_heads)](
        parts,
        parts if bias is None else bias,
        parts if qk_norm is None else qk_norm,
        *rope,
        fields,
        query,
        *memory,
        tokens,
        memory[0].shape[2],
        shape.eps,
        SPLITS=splits,
        HEADS=shape.heads,
        KV_HEADS=shape.kv_heads,
        DIM=shape.head_dim,
        PADDED=padded(shape.head_dim),
        BIASED=bias is not None,
        NORMED=qk_norm is not None,
        num_warps=1,
        launch_pdl=OVERLAPS.value,
    )
    return query


@triton.jit
def _place(fields, tokens, first, start, p, there):
    """Where the keys of positions p lie: from `start` on, by the path of the token `first`."""
    on_path = there & (p >= start)
    depth = tl.where(on_path, p - start, 0) + PATHS
    path = tl.load(fields + tokens * depth + first, mask=on_path, other=0)
    return tl.where(on_path, start + path, p)


@triton.jit
def _attend(
    query, keys, values, fields, sums, tops, tokens, context, scale, softcap, window,
    HEADS: constexpr, KV_HEADS: constexpr, GROUPS: constexpr, DIM: constexpr, PADDED: constexpr,
    QUERIES: constexpr, SPAN: constexpr, BLOCK: constexpr, CAPPED: constexpr,
):  # fmt: skip
    _enter()
    tile, shared, span = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    count = _field(fields, SHARING, tokens, tile)
    first = _field(fields, FIRST, tokens, tile)
    group = HEADS // KV_HEADS
    lines, dims, steps = tl.arange(0, QUERIES), tl.arange(0, PADDED), tl.arange(0, BLOCK)
    token, head = first + lines // GROUPS, shared * group + lines % GROUPS
    own = (lines // GROUPS < count) & (lines % GROUPS < group)
    known = dims < DIM
    position = tl.load(fields + tokens * POSITION + token, mask=own, other=-1)
    line = token * HEADS + head
    at = line[:, None] * DIM + dims[None, :]
    q = tl.load(query + at, mask=own[:, None] & known[None, :], other=0.0)
    slot, start = _field(fields, SLOT, tokens, first), _field(fields, START, tokens, first)
    earliest = _field(fields, POSITION, tokens, first)
    last = _field(fields, POSITION, tokens, first + tl.maximum(count, 1) - 1)
    begin = span * SPAN
    # the first token of a tile sees the earliest positions
    if (count == 0) | (begin > last) | (begin + SPAN <= earliest - window + 1):
        return
    memory = (slot.to(tl.int64) * KV_HEADS + shared) * context * DIM
    top = tl.full((QUERIES,), float("-inf"), tl.float32)
    weight = tl.zeros((QUERIES,), tl.float32)
    total = tl.zeros((QUERIES, PADDED), tl.float32)
    for block in range(begin, tl.minimum(begin + SPAN, last + 1), BLOCK):
        p = block + steps
        there = p <= last
        place = memory + _place(fields, tokens, first, start, p, there) * DIM
        k_at, k_mask = place[None, :] + dims[:, None], there[None, :] & known[:, None]
        k = tl.load(keys + k_at, mask=k_mask, other=0.0)
        scores = tl.dot(q, k, input_precision="ieee") * scale
        if CAPPED:
            scores = softcap * (2.0 * tl.sigmoid(2.0 * scores / softcap) - 1.0)
        ahead = position[:, None] - p[None, :]
        scores = tl.where((ahead >= 0) & (ahead < window), scores, float("-inf"))
        higher = tl.maximum(top, tl.max(scores, 1))
        base = tl.where(higher == float("-inf"), 0.0, higher)
        fade, weights = tl.exp(top - base), tl.exp(scores - base[:, None])
        v_at, v_mask = place[:, None] + dims[None, :], there[:, None] & known[None, :]
        v = tl.load(values + v_at, mask=v_mask, other=0.0)
        weight = weight * fade + tl.sum(weights, 1)
        total = tl.dot(weights.to(v.dtype), v, total * fade[:, None], input_precision="ieee")
        top = higher
    line += span * tokens * HEADS
    tl.store(tops + 2 * line, top, mask=own)
    tl.store(tops + 2 * line + 1, weight, mask=own)
    at = line.to(tl.int64)[:, None] * DIM + dims[None, :]
    tl.store(sums + at, total, mask=own[:, None] & known[None, :])


@triton.jit
def _combine(
    sums, tops, fields, out, tokens, window, HEADS: constexpr, DIM: constexpr, PADDED: constexpr,
    SPAN: constexpr,
):  # fmt: skip
    _enter()
    token, head = tl.program_id(0), tl.program_id(1)
    position = _field(fields, POSITION, tokens, token)
    dims = tl.arange(0, PADDED)
    mask = dims < DIM
    top, weight = float("-inf"), 0.0
    total = tl.zeros((PADDED,), tl.float32)
    for span in range(tl.maximum(position - window + 1, 0) // SPAN, position // SPAN + 1):
        line = ((span * tokens + token) * HEADS + head).to(tl.int64)
        own = tl.load(tops + 2 * line)
        higher = tl.maximum(top, own)
        fade, share = tl.exp(top - higher), tl.exp(own - higher)
        weight = weight * fade + tl.load(tops + 2 * line + 1) * share
        part = tl.load(sums + line * DIM + dims, mask=mask, other=0.0)
        total = total * fade + part * share
        top = higher
    into = out + (token * HEADS + head) * DIM + dims
    tl.store(into, (total / weight).to(out.dtype.element_ty), mask=mask)


def attend(
    query: Tensor,
    memory: tuple[Tensor, Tensor],
    fields: Tensor,
    shape: Architecture,
    window: int | None,
) -> Tensor:
    keys, values = memory
    tokens, context = len(query), keys.shape[2]
    spans = triton.cdiv(context, SPAN)
    sums = query.new_empty(spans, *query.shape, dtype=torch.float32)
    tops = query.new_empty(spans, tokens, shape.heads, 2, dtype=torch.float32)
    out = query.new_empty(tokens, shape.heads * shape.head_dim)
    seen = window or packing.NEVER
    sizes: dict[str, Any] = {
        "HEADS": shape.heads,
        "DIM": shape.head_dim,
        "PADDED": padded(shape.head_dim),
        "SPAN": SPAN,
    }
    groups = power(shape.groups)
    _attend[(tokens, shape.kv_heads, spans)](
        query,
        keys,
        values,
        fields,
        sums,
        tops,
        tokens,
        context,
        shape.scale,
        shape.attention_softcap or 0.0,
        seen,
        KV_HEADS=shape.kv_heads,
        GROUPS=groups,
        QUERIES=max(QUERIES, groups),
        BLOCK=BLOCK,
        CAPPED=bool(shape.attention_softcap),
        num_warps=4,
        launch_pdl=OVERLAPS.value,
        num_stages=2,
        **sizes,
    )
    _combine[(tokens, shape.heads)](
        sums,
        tops,
        fields,
        out,
        tokens,
        seen,
        num_warps=1,
        launch_pdl=OVERLAPS.value,
        **sizes,
    )
    return out


@triton.jit
def _activate(
    parts, bias, out, tokens, size, SPLITS: constexpr, GELU: constexpr, BIASED: constexpr,
    COLUMNS: constexpr,
):  # fmt: skip
    _enter()
    token = tl.program_id(0)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    mask = columns < size
    own, step = 2 * token * size + columns, 2 * tokens * size
    gate = _total(parts, bias, own, step, columns, mask, SPLITS, BIASED)
    up = _total(parts, bias, own + size, step, columns + size, mask, SPLITS, BIASED)
    if GELU:
        # tanh(z) = 2 · sigmoid(2z) − 1
        bent = gate * tl.sigmoid(1.5957691216057308 * (gate + 0.044715 * gate * gate * gate))
    else:
        bent = gate * tl.sigmoid(gate)
    tl.store(out + token * size + columns, (bent * up).to(out.dtype.element_ty), mask=mask)


def activate(parts: Tensor, bias: Tensor | None, activation: str, dtype: torch.dtype) -> Tensor:
    splits, tokens, width = parts.shape
    size = width // 2
    out = parts.new_empty(tokens, size, dtype=dtype)
    _activate[(tokens, triton.cdiv(size, COLUMNS))](
        parts,
        parts if bias is None else bias,
        out,
        tokens,
        size,
        SPLITS=splits,
        GELU=activation != "silu",
        BIASED=bias is not None,
        COLUMNS=COLUMNS,
        num_warps=4,
        launch_pdl=OVERLAPS.value,
    )
    return out


@triton.jit
def _choose(
    logits, stride, columns, fields, tokens, ids, NAMED: constexpr, COLUMNS: constexpr,
):  # fmt: skip
    _enter()
    row = tl.program_id(0)
    if row >= _field(fields, LIVE, tokens, 1):
        return
    logits += row.to(tl.int64) * stride
    best = tl.full((COLUMNS,), float("-inf"), tl.float32)
    where = tl.zeros((COLUMNS,), tl.int32)
    for first in range(0, columns, COLUMNS):
        at = first + tl.arange(0, COLUMNS)
        seen = tl.load(logits + at, mask=at < columns, other=float("-inf"))
        where = tl.where(seen > best, at, where)  # of equals the first
        best = tl.maximum(best, seen)
    chosen = tl.min(tl.where(best == tl.max(best, 0), where, columns - 1), 0)
    if NAMED:
        chosen = tl.load(ids + chosen)
    fields += row
    tl.store(fields + tokens * ID, chosen.to(tl.int32))
    for field in tl.static_range(POSITION, PLACE + 1):
        tl.store(fields + tokens * field, tl.load(fields + tokens * field) + 1)


def choose(logits: Tensor, fields: Tensor, tokens: Tensor | None) -> None:
    rows, columns = logits.shape
    _choose[(rows,)](
        logits,
        logits.stride(0),
        columns,
        fields,
        fields.shape[1],
        fields if tokens is None else tokens,
        NAMED=tokens is not None,
        COLUMNS=CHOICES,
        num_warps=16,
        launch_pdl=OVERLAPS.value,
    )
