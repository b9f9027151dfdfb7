"""Tiny random models of every family that the lean module runs, with no weight left at its neutral
value."""

from __future__ import annotations

from typing import Any

import torch
import transformers as tf

from tests.support.models.llama_shapes import LLAMA3, SIZES

SHARP = {
    **SIZES,
    "initializer_range": 0.3,
    "num_hidden_layers": 3,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LONG = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0, 1.1, 1.2, 1.3],
    "long_factor": [1.0, 2.0, 4.0, 8.0],
}
GEMMA = {
    **SHARP,
    "num_hidden_layers": 4,
    "head_dim": 8,
    "sliding_window": 6,
    "query_pre_attn_scalar": 5,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
}
CONFIGS = {
    "llama": lambda: tf.LlamaConfig(**SHARP),
    "llama with biases": lambda: tf.LlamaConfig(**SHARP, attention_bias=True, mlp_bias=True),
    "llama 3": lambda: tf.LlamaConfig(**SHARP, rope_parameters=LLAMA3),
    "mistral": lambda: tf.MistralConfig(**SHARP, sliding_window=None),
    "mistral with a window": lambda: tf.MistralConfig(**SHARP, sliding_window=6),
    "qwen2": lambda: tf.Qwen2Config(**SHARP),
    "qwen2 with windows": lambda: tf.Qwen2Config(
        **SHARP, use_sliding_window=True, sliding_window=6, max_window_layers=1
    ),
    "qwen3": lambda: tf.Qwen3Config(**SHARP, head_dim=16),
    "phi3": lambda: tf.Phi3Config(**SHARP),
    "phi3 with LongRoPE": lambda: tf.Phi3Config(
        **SHARP, rope_parameters=dict(LONG), original_max_position_embeddings=128
    ),
    "gemma2": lambda: tf.Gemma2Config(
        **GEMMA, attn_logit_softcapping=2.0, final_logit_softcapping=3.0
    ),
    "gemma3": lambda: tf.Gemma3TextConfig(**GEMMA),
}


def lean_family(name: str, dtype: torch.dtype = torch.float32) -> Any:
    """A module whose norms and biases differ from element to element."""
    torch.manual_seed(0)
    module = tf.AutoModelForCausalLM.from_config(CONFIGS[name](), attn_implementation="eager")
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.dim() == 1:
                parameter += 0.3 * torch.randn_like(parameter)
    return module.to(dtype).eval()
