"""Tiny random models of the families that have attention code of their own."""

from __future__ import annotations

from typing import Any

import torch

from tests.support.models.tiny import VOCAB

HIDDEN = 32

LIMIT = 128

WINDOW = 6


def config(name: str, vocab: int = VOCAB) -> Any:
    """Two layers, logits sharp enough that a wrong key or position shows."""
    import transformers as tf

    ids = {
        "vocab_size": vocab,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
        "initializer_range": 0.3,
    }
    gpt = ids | {"n_embd": HIDDEN, "n_layer": 2, "n_head": 4, "n_positions": LIMIT}
    plain = ids | {"hidden_size": HIDDEN, "num_hidden_layers": 2, "num_attention_heads": 4}
    return {
        "gpt_neo": lambda: tf.GPTNeoConfig(
            **ids,
            hidden_size=HIDDEN,
            num_layers=2,
            num_heads=4,
            window_size=WINDOW,
            attention_types=[[["global", "local"], 1]],
            max_position_embeddings=LIMIT,
        ),
        "gptj": lambda: tf.GPTJConfig(**gpt, rotary_dim=4),
        "codegen": lambda: tf.CodeGenConfig(**gpt, rotary_dim=4),
        "bloom": lambda: tf.BloomConfig(**ids, hidden_size=HIDDEN, n_layer=2, n_head=4),
        "mpt": lambda: tf.MptConfig(
            **ids, d_model=HIDDEN, n_layers=2, n_heads=4, max_seq_len=LIMIT
        ),
        "ctrl": lambda: tf.CTRLConfig(**gpt, dff=48),
        "falcon": lambda: tf.FalconConfig(**plain),
        "falcon_alibi": lambda: tf.FalconConfig(**plain, alibi=True),
        "falcon_grouped": lambda: tf.FalconConfig(
            **plain, new_decoder_architecture=True, num_kv_heads=2
        ),
        "gpt_neox_japanese": lambda: tf.GPTNeoXJapaneseConfig(
            **plain, intermediate_multiple_size=2, max_position_embeddings=LIMIT
        ),
        "xglm": lambda: tf.XGLMConfig(
            **ids,
            d_model=HIDDEN,
            num_layers=2,
            attention_heads=4,
            ffn_dim=48,
            init_std=0.3,
            max_position_embeddings=LIMIT,
        ),
    }[name]()


FAMILIES = [
    "gpt_neo",
    "gptj",
    "codegen",
    "bloom",
    "mpt",
    "ctrl",
    "falcon",
    "falcon_grouped",
    "gpt_neox_japanese",
    "xglm",
]


def module_of(name: str, **settings: Any) -> Any:
    """A tiny random model, float32; its biases are drawn too, which a new model has at zero."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    module = AutoModelForCausalLM.from_config(config(name), **settings).float().eval()
    with torch.no_grad():
        for key, parameter in module.named_parameters():
            if key.endswith("bias"):
                parameter.normal_(std=0.3)
    return module
