"""The bench of families: what one token reads, and the rate over the first model's."""

from __future__ import annotations

from typing import Any

import pytest

from draftwell.components.bench import families
from draftwell.components.bench.families import bytes_read, random_model, table
from draftwell.serving.runtime.models.lean_llama import LeanLlama

TINY = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "vocab_size": 40,
}


@pytest.mark.parametrize("kind", list(families.SHAPES))
def test_every_family_runs_on_the_lean_module(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    shape: dict[str, Any] = {**families.SHAPES[kind], **TINY, "head_dim": 16}
    monkeypatch.setitem(families.SHAPES, kind, shape)
    model = random_model(kind, "float32", "off", slots=1, max_context=16)
    assert isinstance(model, LeanLlama)
    embeddings = model.module.model.embed_tokens.weight.numel()
    others = (
        sum(weight.numel() for weight in model.module.parameters())
        - embeddings
        - model.module.model.norm.weight.numel()
    )
    tied = model.module.get_output_embeddings().weight is model.module.model.embed_tokens.weight
    assert bytes_read(model) == 4 * (others + (embeddings if tied else 0))


def test_rates_are_by_bytes() -> None:
    text = table(
        {families.ONE_TOKEN: {"llama": [10.0, 11.0, 9.0], "qwen3": [20.0]}},
        {"llama": 100_000_000, "qwen3": 100_000_000},
    )
    assert "| llama | 100 | 10.0 | 10.00 | 1.00 |" in text
    assert "| qwen3 | 100 | 20.0 | 5.00 | 0.50 |" in text
