"""Llama-shaped models without the layers between them and their matrices: the engine's fast path.

The adapter of `transformers_model` runs the library's own module; at one token a forward pass, a third of its time goes into
calls rather than arithmetic, and every matrix product first brings its weights into the layout of the processor's matrix
unit. Here queries, keys and values are one product, gate and up another; rotary tables and attention masks are made once a
forward pass, not once a layer; and on CPUs bfloat16 weights are kept in oneDNN's own layout. Slots, packing of ragged rows and
heads are inherited. Parity with transformers: tests/serving/runtime/models/test_lean_llama.py.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from serving.artifacts.distilled_draft import quantise
from serving.device import lacks_bfloat16
from serving.runtime.models.module_model import Placed
from serving.runtime.models.padding import feed_forwards
from serving.runtime.models.transformers_model import TransformersModel

Linear = Callable[[Tensor], Tensor]
SHAPED_LIKE_LLAMA = frozenset({"llama"})
ROPE_TYPES = frozenset({"default", "linear", "llama3"})
"""Rotary embeddings that depend on the position alone, so that a table holds them."""
ATTENTION_PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj")
MLP_PROJECTIONS = ("gate_proj", "up_proj", "down_proj")
INT8_ROWS = 2
"""Rows up to which 8-bit weights win: 203 against 312 µs for one row of 3072 × 576, 274 against 310 for four (one core)."""
PACKED_FOR_ROWS = 8
"""Rows that oneDNN's weight layout is chosen for; layouts chosen for 1 to 64 rows were measured within 3 %."""


def fits(module: Any) -> bool:
    """Whether this file can run a module: Llama's layers, no biases, a static rotary embedding, SiLU."""
    config = module.config.get_text_config()
    rope = getattr(config, "rope_parameters", None) or {}
    return (config.model_type in SHAPED_LIKE_LLAMA and not config.attention_bias and not config.mlp_bias
            and config.hidden_act == "silu" and rope.get("rope_type", "default") in ROPE_TYPES)


class LeanLlama(TransformersModel):
    """A `LlamaForCausalLM` over slots; arguments as for `TransformersModel`.

    Args:
        int8: forward passes of a token or two read 8-bit weights (a draft's, which are stored in 8 bits anyway).
    """

    def __init__(self, module: Any, *, int8: bool = False, **settings: Any):
        super().__init__(module, **settings)
        make = linear_int8 if int8 and self.dtype == torch.bfloat16 and self.device.type == "cpu" else linear
        config = module.config
        self.heads, self.kv_heads, self.eps = config.num_attention_heads, config.num_key_value_heads, config.rms_norm_eps
        self.embedding, self.final_norm = module.model.embed_tokens.weight, module.model.norm.weight
        with torch.inference_mode():
            self.layers = [Layer(layer, make) for layer in module.model.layers]
            self._head = linear(self.head_weight)
            cos, sin = module.model.rotary_emb(self.embedding[:1], torch.arange(self.max_context, device=self.device)[None])
            half = cos.shape[-1] // 2
            self.cos = cos[0, :, None].contiguous()  # [positions, 1, head_dim]
            self.sin = torch.cat([-sin[0, :, None, :half], sin[0, :, None, half:]], dim=-1)  # the sign of rotate_half folded in
        self.half, self.head_dim = half, cos.shape[-1]
        self.scale = self.head_dim**-0.5

    def release(self) -> None:
        """Give up the module's own projections: this model holds them in its own layout, and twice is once too often.

        The module keeps its configuration, embeddings and norms, but cannot run any more.
        """
        for layer in self.module.model.layers:
            for mlp in feed_forwards(layer.mlp):
                for holder, names in ((layer.self_attn, ATTENTION_PROJECTIONS), (mlp, MLP_PROJECTIONS)):
                    for name in names:
                        weight = getattr(holder, name).weight
                        weight.data = weight.data.new_empty(0)

    def _states(self, ids: Tensor, positions: Tensor, placed: list[Placed]) -> Tensor:
        masks = [self._mask(start, count) for _, start, count in placed]
        return self.run_layers(ids, positions, partial(self._attention, placed=placed, masks=masks))

    def run_layers(self, ids: Tensor, positions: Tensor, attend: Callable[[int, Tensor, Tensor, Tensor], Tensor]) -> Tensor:
        """Normalised last hidden states `[total, hidden]`; `attend(layer, query, key, value)` is given `[total, heads, head_dim]`."""
        total = ids.shape[0]
        x = self.embedding[ids]
        cos, sin = self.cos[positions], self.sin[positions]
        rotated = self.heads + self.kv_heads
        for number, layer in enumerate(self.layers):
            qkv = layer.qkv(F.rms_norm(x, x.shape[-1:], layer.attention_norm, self.eps)).view(total, -1, self.head_dim)
            qk = qkv[:, :rotated]
            qk = torch.addcmul(qk * cos, qk.roll(self.half, -1), sin)
            attended = attend(number, qk[:, : self.heads], qk[:, self.heads :], qkv[:, rotated:])
            x = x + layer.out(attended)
            normed = F.rms_norm(x, x.shape[-1:], layer.mlp_norm, self.eps)
            for gate_up, down in layer.feed_forwards:
                gate, up = gate_up(normed).chunk(2, dim=-1)
                x = x + down(F.silu(gate).mul_(up))
        return F.rms_norm(x, x.shape[-1:], self.final_norm, self.eps)

    def _mask(self, start: int, count: int) -> Tensor | None:
        """Additive mask `[groups * count, start + count]` of tokens that must not see those after them."""
        if count == 1:
            return None
        mask = torch.full((count, start + count), float("-inf"), dtype=self.dtype, device=self.device).triu_(start + 1)
        return mask.repeat(self.heads // self.kv_heads, 1)

    def _attention(self, layer: int, query: Tensor, key: Tensor, value: Tensor, placed: list[Placed],
                   masks: list[Tensor | None]) -> Tensor:
        """Packed rows `[total, heads, head_dim]`, each over its own slot → `[total, heads * head_dim]`.

        Query groups are folded into the query axis, so that keys are never repeated.
        """
        outputs, at = [], 0
        for (slot, start, count), mask in zip(placed, masks, strict=True):
            end = at + count
            keys, values = self.slots.write(layer, slot, start, key[at:end].transpose(0, 1), value[at:end].transpose(0, 1))
            folded = query[at:end].transpose(0, 1).reshape(self.kv_heads, -1, self.head_dim)
            out = F.scaled_dot_product_attention(folded[None], keys[None], values[None], attn_mask=mask, scale=self.scale)
            outputs.append(out.reshape(self.heads, count, self.head_dim).transpose(0, 1).reshape(count, -1))
            at = end
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)


class Layer:
    """Weights of one decoder layer."""

    def __init__(self, layer: Any, linear: Callable[[Tensor], Linear]):
        attention = layer.self_attn
        self.attention_norm, self.mlp_norm = layer.input_layernorm.weight, layer.post_attention_layernorm.weight
        self.qkv = linear(torch.cat([attention.q_proj.weight, attention.k_proj.weight, attention.v_proj.weight]))
        self.out = linear(attention.o_proj.weight)
        self.feed_forwards = [(linear(torch.cat([mlp.gate_proj.weight, mlp.up_proj.weight])), linear(mlp.down_proj.weight))
                              for mlp in feed_forwards(layer.mlp)]  # two where the target is padded


def linear(weight: Tensor) -> Linear:
    """x `[rows, in]` → `x @ weight.T` for a weight `[out, in]`; on CPUs bfloat16 weights are packed for oneDNN once.

    float32 keeps torch's own product, whose results are what `transformers.generate` is compared with.
    """
    weight = weight.detach().contiguous()
    if weight.device.type == "cpu" and weight.dtype == torch.bfloat16 and not lacks_bfloat16():
        packed = torch.ops.mkldnn._reorder_linear_weight(weight, PACKED_FOR_ROWS)
        product = torch.ops.mkldnn._linear_pointwise
        return lambda x: product(x, packed, None, "none", [], "")
    return lambda x: F.linear(x, weight)


def linear_int8(weight: Tensor) -> Linear:
    """As `linear`, with the weight rounded to int8 per output channel: at one or two rows only half the bytes are read.

    More rows multiply by the same rounded weight in bfloat16, where the matrix unit is faster than the narrower read.
    """
    whole, scale = quantise(weight)
    wide = linear((whole * scale[:, None]).to(weight.dtype))
    scale = scale.to(weight.dtype)
    return lambda x: torch._weight_int8pack_mm(x, whole, scale) if x.shape[0] <= INT8_ROWS else wide(x)
