"""The EAGLE-3 head: one Llama layer over pairs of a state and the embedding of the token after it
(arXiv 2503.01840, section 3).

Parameters are named as vLLM's and SGLang's `LlamaForCausalLMEagle3` read them. Embeddings and the
rows of the output embedding are the target's, and no part of the head.

Index i pairs the target's states at token i with the embedding of token i + 1, has rotary position
i, and predicts token i + 2. A drafted index takes the head's own output at the index before as its
states.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from draftwell.serving.errors import DraftwellError

LONGEST = 4096
"""Positions that a head is trained for, at most."""


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


class Projected(NamedTuple):
    """What attention reads of some indices: `[batch, heads, indices, head_dim]`, of keys and values
    each key head repeated."""

    query: Tensor
    key: Tensor
    value: Tensor


def lowered(x: Tensor) -> Tensor:
    """x in autocast's precision, once for all the products that read it."""
    device = x.device.type
    return x.to(torch.get_autocast_dtype(device)) if torch.is_autocast_enabled(device) else x


def default_features(count: int) -> tuple[int, ...]:
    """The layers whose input states a head reads, of a target with `count` layers: vLLM's defaults.

    Raises:
        DraftwellError: the target is too shallow for three different ones.
    >>> default_features(30)
    (2, 15, 27)
    """
    layers = (2, count // 2, count - 3)
    if count < 7:
        raise DraftwellError(
            (
                f"a head reads three layers of the target, which has only {count}: choose a "
                "deeper target"
            ),
            code="too_shallow",
        )
    return layers


class Attention(nn.Module):
    """Projections of the head's attention; queries, keys and values read embedding and state side
    by side."""

    def __init__(self, hidden: int, heads: int, kv_heads: int, head_dim: int):
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = heads, kv_heads, head_dim
        self.q_proj = nn.Linear(2 * hidden, heads * head_dim, bias=False)
        self.k_proj = nn.Linear(2 * hidden, kv_heads * head_dim, bias=False)
        self.v_proj = nn.Linear(2 * hidden, kv_heads * head_dim, bias=False)
        self.o_proj = nn.Linear(heads * head_dim, hidden, bias=False)

    def split(self, x: Tensor, heads: int) -> Tensor:
        """`[batch, indices, heads * head_dim]` → `[batch, self.heads, indices, head_dim]`, fewer
        heads repeated."""
        x = x.view(*x.shape[:2], heads, self.head_dim).transpose(1, 2)
        return x if heads == self.heads else x.repeat_interleave(self.heads // heads, dim=1)


class FeedForward(nn.Module):
    """Llama's gated feed-forward."""

    def __init__(self, hidden: int, intermediate: int):
        super().__init__()
        self.gate_proj = nn.Linear(hidden, intermediate, bias=False)
        self.up_proj = nn.Linear(hidden, intermediate, bias=False)
        self.down_proj = nn.Linear(intermediate, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """`[…, hidden]` → `[…, hidden]`."""
        down: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return down


class MidLayer(nn.Module):
    """The one decoder layer."""

    def __init__(
        self, hidden: int, intermediate: int, heads: int, kv_heads: int, head_dim: int, eps: float
    ):
        super().__init__()
        self.self_attn = Attention(hidden, heads, kv_heads, head_dim)
        self.mlp = FeedForward(hidden, intermediate)
        self.input_layernorm, self.hidden_norm, self.post_attention_layernorm = (
            nn.RMSNorm(hidden, eps=eps) for _ in range(3)
        )


class Eagle3Network(nn.Module):
    """A trainable head.

    Args:
        config: `head_config`'s, or that of an artifact.
        embeddings: `[vocab, hidden]`, the target's, which training reads; no part of the head.
    """

    def __init__(self, config: Mapping[str, Any], embeddings: Tensor | None = None):
        super().__init__()
        self.config = dict(config)
        hidden, eps = config["hidden_size"], config["rms_norm_eps"]
        self.fc = nn.Linear(3 * hidden, hidden, bias=False)
        self.midlayer = MidLayer(
            hidden,
            config["intermediate_size"],
            config["num_attention_heads"],
            config["num_key_value_heads"],
            config["head_dim"],
            eps,
        )
        self.norm = nn.RMSNorm(hidden, eps=eps)
        cos, sin = rope_tables(
            config["rope_theta"],
            config["head_dim"],
            min(LONGEST, config["max_position_embeddings"]),
        )
        self.cos: Tensor
        self.sin: Tensor
        self.embeddings: Tensor
        self.register_buffer("embeddings", embeddings, persistent=False)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)

    def project(self, hidden: Tensor, embedded: Tensor, positions: Tensor) -> Projected:
        """Queries, keys and values of some indices.

        Args:
            hidden: `[batch, indices, hidden]`, `fc`'s output or the head's own at the index before.
            embedded: `[batch, indices, hidden]`, embeddings of the tokens after.
            positions: rotary positions, `[indices]` or `[batch, indices]`; those behind the last
                one that the head is trained for are padding.
        """
        layer, attention = self.midlayer, self.midlayer.self_attn
        x = lowered(torch.cat([layer.input_layernorm(embedded), layer.hidden_norm(hidden)], dim=-1))
        positions = positions.clamp(max=len(self.cos) - 1)
        cos, sin = (
            table[positions] if positions.dim() == 1 else table[positions][:, None]
            for table in (self.cos, self.sin)
        )
        query, key, value = (
            attention.split(product(x), heads)
            for product, heads in (
                (attention.q_proj, attention.heads),
                (attention.k_proj, attention.kv_heads),
                (attention.v_proj, attention.kv_heads),
            )
        )
        cos, sin = cos.to(query.dtype), sin.to(query.dtype)
        return Projected(rotate(query, cos, sin), rotate(key, cos, sin), value)

    def finish(self, attended: Tensor, hidden: Tensor) -> Tensor:
        """What comes after attention: the head's output before its norm, which the next index takes
        as its states.

        Args:
            attended: `[batch, heads, indices, head_dim]`.
            hidden: as given to `project`.
        """
        layer = self.midlayer
        residual = hidden + layer.self_attn.o_proj(attended.transpose(1, 2).flatten(2))
        output: Tensor = residual + layer.mlp(lowered(layer.post_attention_layernorm(residual)))
        return output


def head_config(target: Any, draft_vocab: int, layers: tuple[int, ...]) -> dict[str, Any]:
    """Configuration of a head for a target, as vLLM and SGLang read it from `config.json`.

    Args:
        target: the target's configuration of transformers, Llama-shaped.
        draft_vocab: tokens that the head covers.
        layers: whose input states the head reads; named in the configuration where they are not the
            default.
    """
    rope = target.rope_parameters
    found = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_size": target.hidden_size,
        "intermediate_size": target.intermediate_size,
        "num_attention_heads": target.num_attention_heads,
        "num_key_value_heads": target.num_key_value_heads,
        "head_dim": getattr(target, "head_dim", None)
        or target.hidden_size // target.num_attention_heads,
        "num_hidden_layers": 1,
        "hidden_act": "silu",
        "rms_norm_eps": target.rms_norm_eps,
        "rope_theta": rope["rope_theta"],
        "rope_scaling": None,
        "max_position_embeddings": target.max_position_embeddings,
        "vocab_size": target.vocab_size,
        "draft_vocab_size": draft_vocab,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "mlp_bias": False,
        "bos_token_id": target.bos_token_id,
        "eos_token_id": target.eos_token_id,
        "torch_dtype": "bfloat16",
    }
    if target.num_hidden_layers < 7 or layers != default_features(target.num_hidden_layers):
        # vLLM: the layer whose input it is
        found["eagle_aux_hidden_state_layer_ids"] = list(layers)
        # SGLang: the layer before
        found["eagle_config"] = {
            "eagle_aux_hidden_state_layer_ids": [layer - 1 for layer in layers]
        }
    return found
