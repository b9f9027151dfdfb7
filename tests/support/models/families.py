"""Tiny random targets of every family that is distilled, four layers each, all ending texts with
token 2."""

from __future__ import annotations

from typing import Any

import torch

from draftwell.components.distil.distil import Source
from draftwell.components.distil.writers import Writer
from draftwell.serving.runtime.pair import LoadedPair, over_slots
from tests.support.models.tiny import EOS, Letters

VOCAB, LAYERS, CONTEXT = 61, 4, 96
FAMILIES = ("llama", "qwen2", "qwen3", "gemma", "gemma2", "gemma3", "gpt_neox", "gpt2")
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
    "initializer_range": 0.3,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": EOS,
}
GROUPED = {**SIZES, "num_key_value_heads": 2}
WINDOWS = {
    "head_dim": 8,
    "sliding_window": 6,
    "query_pre_attn_scalar": 8,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
}


def tiny_target(name: str) -> Any:
    """A float32 model; the same weights every time."""
    import transformers as tf

    torch.manual_seed(0)
    config: Any = {
        "llama": lambda: tf.LlamaConfig(**GROUPED, tie_word_embeddings=True),
        "qwen2": lambda: tf.Qwen2Config(**GROUPED),
        "qwen3": lambda: tf.Qwen3Config(**GROUPED, head_dim=8),
        "gemma": lambda: tf.GemmaConfig(**GROUPED, head_dim=8),
        "gemma2": lambda: tf.Gemma2Config(**GROUPED, **WINDOWS, final_logit_softcapping=5.0),
        "gemma3": lambda: tf.Gemma3TextConfig(**GROUPED, **WINDOWS),
        "gpt_neox": lambda: tf.GPTNeoXConfig(**SIZES),
        "gpt2": lambda: tf.GPT2Config(
            vocab_size=VOCAB,
            n_embd=32,
            n_layer=LAYERS,
            n_head=4,
            n_positions=128,
            initializer_range=0.3,
            bos_token_id=1,
            eos_token_id=EOS,
        ),
    }[name]()
    return tf.AutoModelForCausalLM.from_config(config).float().eval()


def target_pair(module: Any) -> LoadedPair:
    """A pair that has its target only, over eight slots."""
    models: Any = {"target": over_slots(module, slots=8, max_context=CONTEXT)}
    return LoadedPair("tiny", "float32", "cpu", models, {"target": module}, Letters(), "f" * 64)


def some_prompts(count: int, seed: int = 0) -> list[list[int]]:
    """Random prompts of two to eight tokens."""
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.randint(3, VOCAB, (2 + i % 7,), generator=generator).tolist() for i in range(count)
    ]


def tiny_source(name: str, *, prompts: int = 48, new_tokens: int = 16) -> Source:
    """What is distilled of a tiny target."""
    pair = target_pair(tiny_target(name))
    untouched = [("a", ids) for ids in some_prompts(4, seed=9)]
    return Source(
        pair,
        "d" * 64,
        Writer(pair, 8),
        some_prompts(prompts),
        untouched,
        new_tokens,
        batch=16,
        data="a test",
    )
