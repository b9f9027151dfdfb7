"""A pair that a test can make in a blink: two random Llamas over 24 tokens, with a tokenizer of
single letters."""

from __future__ import annotations

import functools
from types import SimpleNamespace
from typing import Any

import torch

from draftwell.serving.runtime.commands import Role
from draftwell.serving.runtime.model import Model
from draftwell.serving.runtime.models.transformers_model import TransformersModel
from draftwell.serving.runtime.pair import LoadedPair
from tests.support.models.table_model import TableModel

VOCAB = 24
EOS = 2


class Letters:
    """One token a character; special ids lie below 3."""

    all_special_ids = (0, 1, EOS)
    eos_token_id = EOS
    chat_template = None

    def __call__(self, text: str, add_special_tokens: bool = True) -> dict[str, list[int]]:
        return {"input_ids": [3 + ord(letter) % (VOCAB - 3) for letter in text]}

    def decode(self, ids: list[int], skip_special_tokens: bool = False) -> str:
        return "".join(chr(ord("a") + i) for i in ids if i > EOS)


@functools.cache
def llama(
    layers: int = 1,
    *,
    seed: int = 0,
    kv_heads: int = 2,
    dtype: torch.dtype = torch.float32,
    **settings: Any,
) -> Any:
    """A random Llama whose logits are sharp enough to differ from those of another seed only now
    and then."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=kv_heads,
        max_position_embeddings=256,
        tie_word_embeddings=True,
        initializer_range=0.3,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=EOS,
        **settings,
    )
    return LlamaForCausalLM(config).to(dtype).eval()


def near(module: Any, noise: float, seed: int = 1) -> Any:
    """A copy with noise on its layers' weights: a draft that agrees with the module often, not
    always."""
    import copy

    other = copy.deepcopy(module)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in other.model.layers.parameters():
            parameter += torch.randn(parameter.shape, generator=generator) * noise
    return other


def pair_of(target: Any, draft: Any | None, modules: dict[Any, Any] | None = None) -> LoadedPair:
    models: dict[Role, Model] = {"target": target} | ({"draft": draft} if draft is not None else {})
    from transformers import GenerationConfig

    known = modules or {
        "target": SimpleNamespace(generation_config=GenerationConfig(eos_token_id=EOS))
    }
    return LoadedPair("tiny", "float32", "cpu", models, known, Letters(), "f" * 64)


def llama_pair(*, slots: int = 4, noise: float = 0.06) -> LoadedPair:
    """Two layers as target, and a noisy copy as draft."""
    target = llama(2)
    draft = near(target, noise)
    return pair_of(
        TransformersModel(target, slots=slots),
        TransformersModel(draft, slots=slots),
        {"target": target, "draft": draft},
    )


def table_pair(*, slots: int = 4, vocab: int = VOCAB) -> LoadedPair:
    """Two tables: no hidden states of a transformer, no attention."""
    target = TableModel.random(vocab, 0, order=1, slots=slots)
    target.table[..., EOS] += 0.5  # some texts end by themselves
    draft = TableModel(
        target.table + torch.randn(target.table.shape, generator=torch.Generator().manual_seed(5)),
        slots=slots,
    )
    return pair_of(target, draft)
