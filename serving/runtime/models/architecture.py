"""What distinguishes the decoders that one module can run: read from a configuration of
transformers, once, into plain numbers.

All of them are Llama's plan: norm, attention with rotary positions, norm, gated feed-forward,
residuals around both. What is left open is listed here; weights that some families have and others
lack (biases, norms of queries and keys) are found on the layers themselves.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from draftwell.serving.errors import DraftwellError

FAMILIES = frozenset({"llama", "mistral", "qwen2", "qwen3", "phi3", "gemma2", "gemma3_text"})
"""Model types, as transformers names them, that `models/lean_llama.py` is compared with in its
tests."""
GEMMA = frozenset({"gemma2", "gemma3_text"})
ROPE_TYPES = frozenset({"default", "linear", "llama3", "yarn", "dynamic", "longrope"})
"""Rotary embeddings that depend on the position alone, so that a table holds them: the last two as
far as `settled_length`."""
ACTIVATIONS = frozenset({"silu", "gelu_pytorch_tanh"})


@dataclass(frozen=True)
class Architecture:
    """The shape of a decoder.

    Args:
        scale: factor of attention scores before the softmax.
        eps: of every norm.
        activation: of the gate, one of `ACTIVATIONS`.
        windows: for each layer how many positions a token sees, its own included; None: all.
        ropes: for each layer the name of its rotary table; None where one table serves all.
        attention_softcap: scores are bent to ± this; None: not at all.
        norm_offset: what is added to a stored norm weight (1 in Gemma).
        sandwich: attention and feed-forward have a norm after them too, before the residual is
            added.
        embedding_scale: factor of token embeddings.
    """

    heads: int
    kv_heads: int
    head_dim: int
    scale: float
    eps: float
    activation: str
    windows: tuple[int | None, ...]
    ropes: tuple[str | None, ...]
    attention_softcap: float | None = None
    norm_offset: float = 0.0
    sandwich: bool = False
    embedding_scale: float | None = None

    @property
    def groups(self) -> int:
        """Query heads that share a key head."""
        return self.heads // self.kv_heads


def settled_length(config: Any) -> int | None:
    """Tokens of the longest text whose rotary factors depend on the position alone; None: of any.

    Behind it LongRoPE (2402.13753) takes other factors for all of the text, and dynamic NTK changes
    them with every token.

    Args:
        config: a `PretrainedConfig`, of the text part where a model has several.
    """
    rope = getattr(config, "rope_parameters", None) or {}
    used = (
        [rope] if "rope_type" in rope else [one for one in rope.values() if isinstance(one, dict)]
    )
    borders = {
        "longrope": "original_max_position_embeddings",
        "dynamic": "max_position_embeddings",
    }
    lengths = [
        int(one.get(name) or getattr(config, name))
        for one in used
        if (name := borders.get(one.get("rope_type", ""))) is not None
    ]
    return min(lengths, default=None)


def context_of(config: Any, wanted: int | None) -> int:
    """Positions of a slot: as many as wanted, or as the model was trained on, at most 4096; never
    more than its rotary factors are settled for.

    Raises:
        DraftwellError: more are wanted (`unsupported_architecture`).
    """
    settled = settled_length(config)
    if wanted is None:
        longest: int = min(4096, config.max_position_embeddings)
        return longest if settled is None else min(longest, settled)
    if settled is not None and wanted > settled:
        raise DraftwellError(
            f"{config.model_type} models with these rotary positions change them behind {settled} "
            f"tokens, for the tokens before too: take a context of at most {settled}, not {wanted}",
            code="unsupported_architecture",
        )
    return wanted


def architecture_of(config: Any) -> Architecture | None:
    """The architecture of a text model's configuration, or None where it is not one of these.

    Args:
        config: a `PretrainedConfig`, of the text part where a model has several.
    """
    activation = getattr(config, "hidden_activation", None) or getattr(config, "hidden_act", None)
    if (
        config.model_type not in FAMILIES
        or activation not in ACTIVATIONS
        or getattr(config, "use_bidirectional_attention", None)
    ):
        return None
    layers = config.num_hidden_layers
    kinds: list[str | None] = list(getattr(config, "layer_types", None) or [None] * layers)
    rope = config.rope_parameters
    by_kind = "rope_type" not in rope
    used = [rope[kind] for kind in set(kinds)] if by_kind else [rope]
    if any(
        one["rope_type"] not in ROPE_TYPES or one.get("partial_rotary_factor", 1.0) != 1.0
        for one in used
    ):
        return None
    gemma = config.model_type in GEMMA
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return Architecture(
        heads=config.num_attention_heads,
        kv_heads=config.num_key_value_heads,
        head_dim=head_dim,
        eps=config.rms_norm_eps,
        scale=(config.query_pre_attn_scalar if gemma else head_dim) ** -0.5,
        activation=activation,
        windows=tuple(
            None if kind == "full_attention" else getattr(config, "sliding_window", None)
            for kind in kinds
        ),
        ropes=tuple(kind if by_kind else None for kind in kinds),
        attention_softcap=config.attn_logit_softcapping if config.model_type == "gemma2" else None,
        norm_offset=float(gemma),
        sandwich=gemma,
        embedding_scale=config.hidden_size**0.5 if gemma else None,
    )
