"""Attention of a few tokens over one slot by a kernel of our own (`kernels/row_attention.cpp`):
keys and values are read once for all.

With it a forward pass over eight tokens of SmolLM2-135M after 200 others takes .8 times as long on
a processor without AVX-512 (docs/log.md, "Without AVX-512"). Libraries of compiled layers contain
the kernel.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from draftwell.serving.runtime.models import packed_matmul

SOURCE = Path(__file__).parent / "kernels" / "row_attention.cpp"
SHIM = """
AOTITorchError aoti_torch_cpu_row_attention(AtenTensorHandle query, AtenTensorHandle keys, AtenTensorHandle values, AtenTensorHandle mask,
                                            double scale, double softcap, AtenTensorHandle* out) {
    draftwell::Row row;
    int64_t between, positions, others[2];
    void *pointers[4], *into;
    AtenTensorHandle tensors[] = {query, keys, values, mask};
    for (int i = 0; i < 4; i++) aoti_torch_get_data_ptr(tensors[i], &pointers[i]);
    aoti_torch_get_size(query, 0, &row.tokens);
    aoti_torch_get_size(query, 1, &row.heads);
    aoti_torch_get_size(query, 2, &row.dim);
    aoti_torch_get_size(keys, 0, &row.kv_heads);
    aoti_torch_get_size(mask, 1, &row.end);
    aoti_torch_get_stride(keys, 0, &row.head_stride);
    aoti_torch_get_stride(keys, 1, &between);
    aoti_torch_get_size(keys, 1, &positions);
    for (int i = 0; i < 2; i++) aoti_torch_get_stride(values, i, &others[i]);
    if (between != row.dim || others[0] != row.head_stride || others[1] != between || row.dim % draftwell::WIDTH
        || row.heads % row.kv_heads || row.end > positions) return AOTI_TORCH_FAILURE;
    row.query = (const float*)pointers[0], row.keys = (const uint16_t*)pointers[1], row.values = (const uint16_t*)pointers[2];
    row.mask = (const uint16_t*)pointers[3], row.scale = scale, row.softcap = softcap;
    const int64_t sizes[] = {row.tokens, row.heads * row.dim}, strides[] = {sizes[1], 1};
    AOTITorchError error = aoti_torch_empty_strided(2, sizes, strides, aoti_torch_dtype_float32(), aoti_torch_device_type_cpu(), 0, out);
    if (error != AOTI_TORCH_SUCCESS) return error;
    aoti_torch_get_data_ptr(*out, &into);
    draftwell::row_attention(row, (float*)into);
    return AOTI_TORCH_SUCCESS;
}
"""  # noqa: E501
"""How torch's ahead-of-time compiler calls the kernel (`compiled_library.shims`)."""


def fits(head_dim: int) -> bool:
    """Whether the kernel computes heads of this size."""
    return head_dim % packed_matmul.OUTPUTS == 0


@torch.library.custom_op("draftwell::row_attention", mutates_args=())
def row_attention(
    query: Tensor, keys: Tensor, values: Tensor, mask: Tensor, scale: float, softcap: float
) -> Tensor:
    """Attention of the tokens of one row; by torch, what libraries compute by the kernel.

    Args:
        query: `[n, heads, head_dim]` float32, contiguous for the kernel.
        keys, values: `[kv_heads, positions, head_dim]` bfloat16, of one slot: each head's positions
            side by side.
        mask: additive, `[n, end]` bfloat16, contiguous for the kernel; each token sees one position
            at least.
        softcap: bound of the scores, by tanh; 0: none.
    Returns:
        `[n, heads * head_dim]` float32.
    """
    groups, end = query.shape[1] // keys.shape[0], mask.shape[1]
    keys, values = (one[:, :end].float().repeat_interleave(groups, 0) for one in (keys, values))
    scores = query.float().transpose(0, 1) @ keys.transpose(1, 2) * scale
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    return (
        ((scores + mask.float()).softmax(-1) @ values).transpose(0, 1).reshape(query.shape[0], -1)
    )


@row_attention.register_fake
def _(
    query: Tensor, keys: Tensor, values: Tensor, mask: Tensor, scale: float, softcap: float
) -> Tensor:
    return query.new_empty(query.shape[0], query.shape[1] * query.shape[2], dtype=torch.float32)
