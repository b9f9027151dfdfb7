"""Products of a few tokens with a weight in a layout of our own (`kernels/packed_matmul.cpp`).

SmolLM2-135M's products take 6.4 ms for one token and as much for eight, where oneDNN takes 10 and
11 (docs/log.md, "A kernel for a few tokens"): a draft of seven tokens is verified in the time of
one. Without AVX-512 up to six tokens take the time of one. Libraries of compiled layers contain the
kernel.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from draftwell.serving.device import cpu_flags

SOURCE = Path(__file__).parent / "kernels" / "packed_matmul.cpp"
LANES = 16 if "avx512f" in cpu_flags().split() else 8
"""Outputs of a vector of this machine; a library whose compiler sees it otherwise is not made."""
OUTPUTS = 2 * LANES
"""Outputs of a block."""
SHIM = """
AOTITorchError aoti_torch_cpu_packed_matmul(AtenTensorHandle x, AtenTensorHandle weight, AtenTensorHandle* out) {
    int64_t tokens, blocks, pairs, numbers;
    int32_t dtype;
    void *from, *by, *into;
    aoti_torch_get_size(x, 0, &tokens);
    aoti_torch_get_size(weight, 0, &blocks);
    aoti_torch_get_size(weight, 1, &pairs);
    aoti_torch_get_dtype(weight, &dtype);
    aoti_torch_get_numel(weight, &numbers);
    if (numbers != blocks * pairs * draftwell::VECTORS * draftwell::LANES * 2) return AOTI_TORCH_FAILURE;  // of another machine
    const int64_t sizes[] = {tokens, blocks * draftwell::VECTORS * draftwell::LANES}, strides[] = {sizes[1], 1};
    AOTITorchError error = aoti_torch_empty_strided(2, sizes, strides, aoti_torch_dtype_float32(), aoti_torch_device_type_cpu(), 0, out);
    if (error != AOTI_TORCH_SUCCESS) return error;
    aoti_torch_get_data_ptr(x, &from);
    aoti_torch_get_data_ptr(weight, &by);
    aoti_torch_get_data_ptr(*out, &into);
    if (dtype == aoti_torch_dtype_int8())
        draftwell::matmul((const uint16_t*)from, (const int8_t*)by, (float*)into, tokens, pairs, sizes[1]);
    else
        draftwell::matmul((const uint16_t*)from, (const uint16_t*)by, (float*)into, tokens, pairs, sizes[1]);
    return AOTI_TORCH_SUCCESS;
}
"""  # noqa: E501
"""How torch's ahead-of-time compiler calls the kernel (`compiled_library.shims`)."""


def packed(weight: Tensor) -> Tensor:
    """`[out, in]`, bfloat16 or int8 → `[out / OUTPUTS, in / 2, 2, …]` as the kernel reads it, or
    the weight as it is where that comes out uneven."""
    outputs, inputs = weight.shape
    if outputs % OUTPUTS or inputs % 2:
        return weight
    blocks = weight.view(-1, 2, LANES, inputs // 2, 2)
    return blocks.permute(
        (0, 3, 1, 4, 2) if weight.dtype == torch.int8 else (0, 3, 1, 2, 4)
    ).contiguous()


def unpacked(weight: Tensor) -> Tensor:
    """The weight `[out, in]` that was `packed`."""
    blocks = weight.permute((0, 2, 4, 1, 3) if weight.dtype == torch.int8 else (0, 2, 3, 1, 4))
    return blocks.reshape(weight.shape[0] * OUTPUTS, weight.shape[1] * 2)


@torch.library.custom_op("draftwell::packed_matmul", mutates_args=())
def packed_matmul(x: Tensor, weight: Tensor) -> Tensor:
    """x `[tokens, in]`, bfloat16 for the kernel, a `packed` weight → `[tokens, out]` float32; by
    torch, what libraries compute by the kernel."""
    return x.float() @ unpacked(weight).float().T


@packed_matmul.register_fake
def _(x: Tensor, weight: Tensor) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[0] * OUTPUTS, dtype=torch.float32)
