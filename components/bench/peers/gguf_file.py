"""A Llama-shaped model as a GGUF file in its own dtype, for llama.cpp: the weights that the other
contenders compute with.

The file has no vocabulary (`tokenizer.ggml.model` is `none`): prompts are token ids.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from draftwell.serving.errors import DraftwellError, missing_package

TENSORS = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
"""Weights of a layer: their names in transformers → in GGUF (conversion/llama.py of llama.cpp)."""
OUTER = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
FORMATS = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}


def write_gguf(module: Any, file: Path) -> None:
    """Write a module's weights and shape.

    Args:
        module: a causal language model of transformers.
        file: is overwritten.
    Raises:
        DraftwellError: it is not a Llama with plain rotary embeddings and without biases
            (`no_gguf`), or gguf is not installed.
    """
    try:
        import gguf
    except ImportError as error:
        raise missing_package("writing GGUF needs", "gguf", "pipeline") from error
    config = module.config
    check_shape(config)
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_dimension_count(head_size(config))
    writer.add_key_length(head_size(config))
    writer.add_value_length(head_size(config))
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("none")
    for name, weight in renamed(module):
        kind = gguf.GGMLQuantizationType[FORMATS[weight.dtype] if weight.dim() > 1 else "F32"]
        writer.add_tensor(
            name, gguf.quantize(np.ascontiguousarray(weight.float().numpy()), kind), raw_dtype=kind
        )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def check_shape(config: Any) -> None:
    """Refuse what a GGUF file of this kind would not describe."""
    rope = (
        config.rope_parameters.get("rope_type", "default") if config.model_type == "llama" else None
    )
    if rope != "default":
        what = (
            f"its model type is {config.model_type}"
            if rope is None
            else f"its rotary embeddings are {rope}"
        )
        raise DraftwellError(
            f"the target cannot be written as GGUF here, {what}: leave llama.cpp out of peers",
            code="no_gguf",
        )


def head_size(config: Any) -> int:
    """Numbers per attention head."""
    return int(
        getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    )


def renamed(module: Any) -> Iterator[tuple[str, Tensor]]:
    """Name and weight `[out, in]` of every tensor, as llama.cpp has them: queries and keys with
    their rotary halves interleaved."""
    config = module.config
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
    for name, weight in module.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        if name in OUTER:
            yield OUTER[name], weight
            continue
        prefix, _, rest = name.partition("model.layers.")
        number, _, inner = rest.partition(".")
        kind, suffix = inner.rpartition(".")[::2]
        if prefix or kind not in TENSORS or suffix != "weight":
            raise DraftwellError(
                (
                    f"the target cannot be written as GGUF here, it has {name}: leave out "
                    "llama.cpp out of peers"
                ),
                code="no_gguf",
            )
        kind = TENSORS[kind]
        yield (
            f"blk.{number}.{kind}.weight",
            interleaved(weight, heads[kind]) if kind in heads else weight,
        )


def interleaved(weight: Tensor, heads: int) -> Tensor:
    """Rows of each head in the order 0, n/2, 1, n/2 + 1, …: transformers rotates halves, llama.cpp
    neighbours.

    >>> interleaved(torch.arange(8.0)[:, None], heads=2)[:, 0].tolist()
    [0.0, 2.0, 1.0, 3.0, 4.0, 6.0, 5.0, 7.0]
    """
    return (
        weight.view(heads, 2, weight.shape[0] // heads // 2, -1)
        .transpose(1, 2)
        .reshape(weight.shape)
    )
