"""Random Llamas of many shapes over 61 tokens, and ragged texts for them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import transformers as tf

from draftwell.serving.runtime.commands import Forward

SIZES = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}

SHAPES = {
    "grouped": {},
    "one key head": {"num_key_value_heads": 1},
    "all key heads": {"num_key_value_heads": 4},
    "wide heads": {"head_dim": 16},
    "tied": {"tie_word_embeddings": True},
    "llama3 rope": {"rope_parameters": LLAMA3},
}


def llama(dtype: torch.dtype = torch.float32, **changes):
    torch.manual_seed(0)
    return tf.LlamaForCausalLM(tf.LlamaConfig(**SIZES | changes)).to(dtype).eval()


def ragged(model, texts: list[list[int]]) -> list[torch.Tensor]:
    """Logits of every token from the third on, with a rejected draft of four on the way."""
    slots = [model.open() for _ in texts]
    model.forward([Forward("target", s, tuple(t[:3])) for s, t in zip(slots, texts, strict=True)])
    model.forward([Forward("target", slots[1], (7, 7, 7, 7), 1)])
    model.rollback(slots[1], 3)
    one = model.forward([Forward("target", s, (t[3],)) for s, t in zip(slots, texts, strict=True)])
    rest = model.forward(
        [Forward("target", s, tuple(t[4:]), len(t) - 4) for s, t in zip(slots, texts, strict=True)]
    )
    return [torch.cat([a.logits, b.logits]) for a, b in zip(one, rest, strict=True)]


TEXTS = [
    torch.randint(0, 61, (n,), generator=torch.Generator().manual_seed(n)).tolist()
    for n in (9, 14, 6)
]


def plain_logits(module, text: Sequence[int]) -> torch.Tensor:
    """Of every token, as transformers computes them, whatever attention an adapter has put in."""
    attention = module.config._attn_implementation
    module.set_attn_implementation("eager")
    with torch.no_grad():
        logits = module(torch.tensor([list(text)])).logits[0]
    module.set_attn_implementation(attention)
    return logits


def check_ragged(adapter, module, atol: float = 2e-5) -> None:
    """Ragged rows through an adapter equal the plain module's, text by text."""
    expected = [plain_logits(module, text)[3:] for text in TEXTS]
    for logits, want in zip(ragged(adapter(module, slots=3), TEXTS), expected, strict=True):
        torch.testing.assert_close(logits, want, atol=atol, rtol=0)


def read_starts(model, texts: Sequence[Sequence[int]], counts: Sequence[int]) -> list[int]:
    """Slots that hold texts but for the last `count` tokens of each."""
    slots = [model.open() for _ in texts]
    for slot, text, count in zip(slots, texts, counts, strict=True):
        model.forward([Forward("target", slot, tuple(text[:-count]))])
    return slots


def check_ends(
    model,
    module,
    slots: Sequence[int],
    texts: Sequence[Sequence[int]],
    counts: Sequence[int],
    keeps: Sequence[int] | None = None,
) -> None:
    """The last `count` tokens of each text, in one pass, equal the plain module's.

    Args:
        keeps: of how many tokens of each row outputs are wanted; of all of them by default.
    """
    rows = [
        Forward("target", slot, tuple(text[-count:]), keep)
        for slot, text, count, keep in zip(slots, texts, counts, keeps or counts, strict=True)
    ]
    for output, row, text in zip(model.forward(rows), rows, texts, strict=True):
        wanted = plain_logits(module, text)[-row.keep :]
        torch.testing.assert_close(output.logits, wanted, atol=1e-4, rtol=0)


def random_tokens(n: int, seed: int = 0) -> tuple[int, ...]:
    return tuple(torch.randint(0, 61, (n,), generator=torch.Generator().manual_seed(seed)).tolist())


def noisy(noise: float):
    """The target's weights with noise, so that drafts are accepted in part."""
    module = llama()
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter += noise * parameter.std() * torch.randn_like(parameter)
    return module


MODULES = {"target": llama(), "draft": noisy(0.3)}
