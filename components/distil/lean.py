"""A minimal batched Llama for generating a target's own outputs fast on a CPU.

Purpose: distillation needs about a million tokens of the target's own text. `generate` of
transformers copies the cache at every step; this keeps one static cache, fuses the projections (as
`draftwell.serving.runtime.models.lean_llama` does) and folds the query groups of grouped-query
attention into the sequence axis, so that keys are never repeated. It writes training data only; the
engine under `serving/` has its own models.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from draftwell.serving.runtime.engine.thread_governor import ThreadGovernor
from draftwell.serving.runtime.models.architecture import architecture_of
from draftwell.serving.runtime.models.lean_layer import Layer

LIKELIEST = 64
"""Sampled tokens come from this many of the likeliest."""
LONGEST = 4096
"""Tokens of prompt and output at most."""


def rope_tables(theta: float, head_dim: int, length: int) -> tuple[Tensor, Tensor]:
    """Cosine and sine tables, each `[length, head_dim]` float32, in the half-split layout of
    Llama."""
    inverse = 1.0 / theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    angles = torch.outer(torch.arange(length, dtype=torch.float32), inverse)
    angles = torch.cat([angles, angles], dim=-1)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary position embedding of `x` `[batch, heads, tokens, head_dim]` by tables broadcastable
    to it."""
    half = x.shape[-1] // 2
    return x * cos + torch.cat([-x[..., half:], x[..., :half]], dim=-1) * sin


class BatchedLlama:
    """Llama weights in a static left-padded batch.

    Args:
        module: a `LlamaForCausalLM` with tied embeddings.
        dtype: dtype of weights and cache.
        features: numbers of layers whose input states are wanted as well, as an EAGLE-3 head reads
            them.
    """

    def __init__(
        self, module: Any, dtype: torch.dtype = torch.bfloat16, features: tuple[int, ...] = ()
    ):
        config, shape = module.config, architecture_of(module.config)
        assert shape is not None, config.model_type
        self.dtype, self.eps, self.features = dtype, config.rms_norm_eps, features
        self.heads, self.kv_heads, self.head_dim = (
            config.num_attention_heads,
            config.num_key_value_heads,
            shape.head_dim,
        )
        with torch.no_grad():
            self.embed, self.final_norm = (
                weight.to(dtype)
                for weight in (module.model.embed_tokens.weight, module.model.norm.weight)
            )
            self.layers = [
                Layer(
                    layer,
                    lambda weight, bias: partial(
                        F.linear,
                        weight=weight.to(dtype),
                        bias=None if bias is None else bias.to(dtype),
                    ),
                    shape,
                )
                for layer in module.model.layers
            ]
            if config.rope_parameters.get("rope_type", "default") == "default":
                tables = rope_tables(config.rope_parameters["rope_theta"], self.head_dim, LONGEST)
            else:  # scaled, as Llama 3's: the module knows how
                cos, sin = module.model.rotary_emb(
                    module.model.norm.weight.float(), torch.arange(LONGEST)[None]
                )
                tables = cos[0], sin[0]
        self.cos, self.sin = (t.to(dtype) for t in tables)
        self.cache: list[tuple[Tensor, Tensor]] = []

    def start(self, batch: int, length: int) -> None:
        """Allocate the cache for `batch` rows of at most `length` tokens."""
        shape = (batch, self.kv_heads, length, self.head_dim)
        self.cache = [
            (torch.zeros(shape, dtype=self.dtype), torch.zeros(shape, dtype=self.dtype))
            for _ in self.layers
        ]

    def norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(x, (x.shape[-1],), weight.to(self.dtype), self.eps)

    def forward(self, ids: Tensor, at: int, positions: Tensor, visible: Tensor) -> Tensor:
        """Run `ids` `[batch, k]`, stored at cache columns `at..at+k`.

        Args:
            positions: `[batch, k]` rotary positions (padding may hold anything).
            visible: `[batch, k, at + k]` bool, which columns each query may read.
        Returns:
            for each layer of `features` the states that enter it, and the normalised last states,
            side by side: `[batch, k, (features + 1) * hidden]`.
        """
        batch, k = ids.shape
        groups = self.heads // self.kv_heads
        x = self.embed[ids]
        cos, sin = self.cos[positions][:, None], self.sin[positions][:, None]
        mask = visible[:, None].repeat(1, 1, groups, 1)  # [batch, 1, groups * k, columns]
        captured = []
        for number, (layer, (keys, values)) in enumerate(zip(self.layers, self.cache, strict=True)):
            if number in self.features:
                captured.append(x)
            y = (
                layer.qkv(self.norm(x, layer.attention_norm))
                .view(batch, k, self.heads + 2 * self.kv_heads, self.head_dim)
                .transpose(1, 2)
            )
            q, key, value = y.split([self.heads, self.kv_heads, self.kv_heads], dim=1)
            q, key = rotate(q, cos, sin), rotate(key, cos, sin)
            keys[:, :, at : at + k], values[:, :, at : at + k] = key, value
            q = q.reshape(batch, self.kv_heads, groups * k, self.head_dim)
            a = F.scaled_dot_product_attention(
                q, keys[:, :, : at + k], values[:, :, : at + k], attn_mask=mask
            )
            a = a.view(batch, self.heads, k, self.head_dim).transpose(1, 2).reshape(batch, k, -1)
            x = x + layer.out(a)
            normed = self.norm(x, layer.mlp_norm)
            for gate_up, down in layer.feed_forwards:
                gate, up = gate_up(normed).chunk(2, dim=-1)
                x = x + down(F.silu(gate) * up)
        return torch.cat([*captured, self.norm(x, self.final_norm)], dim=-1)


@torch.inference_mode()
def generate_batch(
    model: BatchedLlama,
    prompts: list[list[int]],
    new_tokens: int,
    stops: frozenset[int],
    temperature: float = 0.0,
    generator: torch.Generator | None = None,
    *,
    governor: ThreadGovernor | None = None,
) -> list[tuple[list[int], Tensor]]:
    """Continue every prompt by up to `new_tokens` tokens.

    Args:
        governor: asked before every step; None: the threads stay as they are.
    Returns:
        for each prompt its output tokens (with the one of `stops` that ended it, where one came)
        and the states, as `forward` returns them, that predict tokens 1.. of prompt + output,
        `[prompt + output - 1, …]`.
    """
    batch, width = len(prompts), max(map(len, prompts))
    ids = torch.zeros(batch, width, dtype=torch.long)
    real = torch.zeros(batch, width + new_tokens, dtype=torch.bool)
    for row, p in enumerate(prompts):
        ids[row, width - len(p) :] = torch.tensor(p)
        real[row, width - len(p) :] = True
    offset = torch.tensor([width - len(p) for p in prompts])
    model.start(batch, width + new_tokens)
    columns, ends = torch.arange(width), torch.tensor(sorted(stops), dtype=torch.long)
    visible = real[:, None, :width] & (columns[None, :, None] >= columns[None, None, :])
    # padding reads itself: no empty softmax row
    visible = visible | torch.eye(width, dtype=torch.bool)[None]
    states = [model.forward(ids, 0, (columns[None] - offset[:, None]).clamp(min=0), visible)]
    tokens: list[Tensor] = []
    done = torch.zeros(batch, dtype=torch.bool)
    for step in range(new_tokens):
        if governor:
            governor.check()
        logits = F.linear(states[-1][:, -1, -model.embed.shape[1] :], model.embed).float()
        if temperature == 0:
            token = logits.argmax(-1)
        else:
            # drawing from the whole vocabulary takes longer than the forward pass
            best = logits.topk(LIKELIEST)
            drawn = torch.multinomial(
                (best.values / temperature).softmax(-1), 1, generator=generator
            )
            token = best.indices.gather(1, drawn).squeeze(1)
        tokens.append(token)
        done |= torch.isin(token, ends)
        if bool(done.all()) or step == new_tokens - 1:
            break
        at = width + step
        states.append(
            model.forward(token[:, None], at, (at - offset)[:, None], real[:, None, : at + 1])
        )
    text, hidden = torch.stack(tokens, 1), torch.cat(states, 1)
    return [
        without_padding(text[row].tolist(), hidden[row, width - len(p) :], len(p), stops)
        for row, p in enumerate(prompts)
    ]


def without_padding(
    out: list[int], states: Tensor, prompt: int, stops: frozenset[int]
) -> tuple[list[int], Tensor]:
    """A text up to and with the first stop token, and its states from the first one on."""
    end = next((i for i, token in enumerate(out) if token in stops), len(out) - 1)
    return out[: end + 1], states[: prompt + end].clone()
