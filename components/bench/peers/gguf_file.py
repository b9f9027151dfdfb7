"""A Llama-shaped model, or an EAGLE-3 head, as a GGUF file for llama.cpp: the weights that the
other contenders compute with, in their dtype or rounded as ours are.

Prompts are token ids, but llama.cpp's server wants words for its answers: with a tokenizer the file
has them, without one no vocabulary (`tokenizer.ggml.model` is `none`).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from draftwell.serving.errors import DraftwellError, missing_package
from draftwell.serving.number_format import Weights
from draftwell.serving.runtime.models.quantised import GROUP

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
ROUNDED = {"int8": "Q8_0", "int4": "Q4_1"}
"""Formats of matrices whose embeddings and head keep their weights, as ours do."""
OF_HEAD = {"midlayer": "model.layers.0", "norm.weight": "model.norm.weight"}
"""Beginnings of names in an EAGLE-3 head → in a model with one layer."""


def write_gguf(
    module: Any, file: Path, *, weights: Weights | None = None, tokenizer: Path | None = None
) -> None:
    """Write a module's weights and shape.

    Args:
        module: a causal language model of transformers.
        file: is overwritten.
        weights: round the layers' matrices; None: they keep the module's dtype.
        tokenizer: a `tokenizer.json` of byte pairs, whose words the file gets.
    Raises:
        DraftwellError: it is not a Llama with plain rotary embeddings and without biases
            (`no_gguf`), or gguf is not installed.
    """
    config = module.config
    check_shape(config)
    writer = writer_of(file, "llama", config, config.rope_parameters["rope_theta"])
    add_vocabulary(writer, tokenizer, config)
    for name, weight in renamed(module):
        inner = weight.dim() > 1 and name.startswith("blk.") and weight.shape[1] % GROUP == 0
        add_weight(writer, name, weight, ROUNDED[weights] if inner and weights else None)
    close(writer)


def write_head_gguf(folder: Path, layers: Sequence[int], file: Path, tokenizer: Path) -> None:
    """Write an EAGLE-3 head that `Eagle3Head.write_standalone` wrote to a folder.

    Args:
        layers: numbers of the target's layers whose input states the head reads.
        file: is overwritten.
        tokenizer: the target's `tokenizer.json`.
    """
    from safetensors.torch import load_file
    from transformers import LlamaConfig

    config = LlamaConfig.from_pretrained(folder)
    state = load_file(folder / "model.safetensors")
    rope: Any = config.rope_parameters
    writer = writer_of(file, "eagle3", config, rope["rope_theta"])
    writer.add_array("eagle3.target_layers", list(layers))
    writer.add_uint32("eagle3.target_hidden_size", config.hidden_size)
    writer.add_bool("eagle3.norm_before_residual", False)
    add_vocabulary(writer, tokenizer, config)
    tokens = state.pop("d2t") + torch.arange(config.draft_vocab_size)
    writer.add_tensor("d2t", tokens.long().numpy())
    add_weight(writer, "fc.weight", state.pop("fc.weight"))
    add_weight(writer, "blk.0.attn_norm_2.weight", state.pop("midlayer.hidden_norm.weight"))
    del state["t2d"]
    for old, new in OF_HEAD.items():
        state = {
            name.replace(old, new) if name.startswith(old) else name: weight
            for name, weight in state.items()
        }
    for name, weight in renamed_weights(state, config):
        add_weight(writer, name, weight)
    close(writer)


def writer_of(file: Path, kind: str, config: Any, rope_theta: float) -> Any:
    """A writer that knows a model's shape.

    Args:
        kind: architecture, by llama.cpp's name.
    """
    try:
        import gguf
    except ImportError as error:
        raise missing_package("writing GGUF needs", "gguf", "pipeline") from error
    writer = gguf.GGUFWriter(file, kind)
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
    writer.add_rope_freq_base(rope_theta)
    writer.add_vocab_size(config.vocab_size)
    return writer


def add_vocabulary(writer: Any, tokenizer: Path | None, config: Any) -> None:
    """The words of a `tokenizer.json` of byte pairs, one for each row of the embedding; texts are
    never split here, so how it would split them is left out. None of another kind."""
    found = json.loads(tokenizer.read_text(encoding="utf-8")) if tokenizer else None
    if found is None or found["model"]["type"] != "BPE":
        writer.add_tokenizer_model("none")
        return
    import gguf

    kinds = gguf.TokenType
    words = [f"[UNUSED{number}]" for number in range(config.vocab_size)]
    types = [kinds.UNUSED] * len(words)
    for word, number in found["model"]["vocab"].items():
        words[number], types[number] = word, kinds.NORMAL
    for one in found["added_tokens"]:
        words[one["id"]], types[one["id"]] = one["content"], kinds.CONTROL
    merges = found["model"]["merges"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(words)
    writer.add_token_types(types)
    ends = config.eos_token_id
    for end in ends[:1] if isinstance(ends, list) else [] if ends is None else [ends]:
        writer.add_eos_token_id(end)
    writer.add_token_merges([one if isinstance(one, str) else " ".join(one) for one in merges])


def add_weight(writer: Any, name: str, weight: Tensor, kind: str | None = None) -> None:
    """A weight in a format of GGUF; None: in its own, vectors always in float32."""
    import gguf

    kind = kind or (FORMATS[weight.dtype] if weight.dim() > 1 else "F32")
    number = gguf.GGMLQuantizationType[kind]
    values = np.ascontiguousarray(weight.float().numpy())
    writer.add_tensor(name, gguf.quantize(values, number), raw_dtype=number)


def close(writer: Any) -> None:
    """Write all that was added."""
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
    """Name and weight `[out, in]` of every tensor of a module, as llama.cpp has them."""
    state = module.state_dict()
    if module.config.tie_word_embeddings:
        state.pop("lm_head.weight", None)
    return renamed_weights(state, module.config)


def renamed_weights(state: dict[str, Tensor], config: Any) -> Iterator[tuple[str, Tensor]]:
    """Weights by llama.cpp's names, queries and keys with their rotary halves interleaved."""
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
    for name, weight in state.items():
        if name in OUTER:
            yield OUTER[name], weight
            continue
        prefix, _, rest = name.partition("model.layers.")
        number, _, inner = rest.partition(".")
        kind, suffix = inner.rpartition(".")[::2]
        if prefix or kind not in TENSORS or suffix != "weight":
            raise DraftwellError(
                f"the target cannot be written as GGUF here, it has {name}: leave llama.cpp out of "
                "peers",
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
