"""How well families of models use the machine: one token's forward pass of models with random
weights, by the bytes that it reads.

A forward pass over one token reads all weights but the embeddings once, so bytes per second compare
models of different sizes. Run as `python -m draftwell.components.bench.families`.
"""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from draftwell.components.bench.forward import Shape, compare, shapes
from draftwell.components.report.tables import markdown

if TYPE_CHECKING:
    from draftwell.serving.runtime.models.compiled_step import Compile
    from draftwell.serving.runtime.models.module_model import ModuleModel

SHAPES: dict[str, dict[str, Any]] = {
    "llama": {
        "hidden_size": 960,
        "intermediate_size": 2560,
        "num_hidden_layers": 32,
        "num_attention_heads": 15,
        "num_key_value_heads": 5,
        "vocab_size": 49152,
        "tie_word_embeddings": True,
    },
    "gemma3_text": {
        "hidden_size": 640,
        "intermediate_size": 2048,
        "num_hidden_layers": 18,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "head_dim": 256,
        "query_pre_attn_scalar": 256,
        "sliding_window": 512,
        "vocab_size": 262144,
    },
    "qwen3": {
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 151936,
        "tie_word_embeddings": True,
    },
}
"""Model type → what differs from transformers' default: SmolLM2 360M, Gemma 3 270M, Qwen 3 0.6B.
The first is compared with."""
ONE_TOKEN = "1 row × 1"


def random_model(
    kind: str, dtype: str, compiled: Compile, *, slots: int, max_context: int
) -> ModuleModel:
    """The lean module of such a shape, with random weights."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from draftwell.serving.runtime.models.lean_llama import LeanLlama

    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **SHAPES[kind])
    module = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype)).eval()
    return LeanLlama(module, compiled=compiled, slots=slots, max_context=max_context)


def bytes_read(model: ModuleModel) -> int:
    """Bytes of weights that a forward pass over one token reads: layers and head."""
    weights = [weight for layer in model.module.model.layers for weight in layer.parameters()] + [
        model.head_weight
    ]
    return sum(weight.numel() * weight.element_size() for weight in weights)


def table(found: dict[str, dict[str, list[float]]], sizes: dict[str, int]) -> str:
    """A Markdown table: of each model what it reads, its median time by shape, and its rate at one
    token, also over the first's."""
    rates = {name: sizes[name] / 1e6 / statistics.median(found[ONE_TOKEN][name]) for name in sizes}
    first = next(iter(rates.values()))
    return markdown(
        [
            "model",
            "MB read",
            *(f"{shape}, ms" for shape in found),
            "GB/s at one token",
            "over the first",
        ],
        [
            [
                name,
                f"{sizes[name] / 1e6:.0f}",
                *(f"{statistics.median(ways[name]):.1f}" for ways in found.values()),
                f"{rates[name]:.2f}",
                f"{rates[name] / first:.2f}",
            ]
            for name in sizes
        ],
    )


def main(
    dtype: Annotated[str, typer.Option(help="bfloat16 or float32.")] = "bfloat16",
    threads: Annotated[
        int | None, typer.Option(min=1, help="CPU threads; default: all cores.")
    ] = None,
    rounds: Annotated[
        int, typer.Option(min=1, help="Times that everything is measured, in turn.")
    ] = 5,
    context: Annotated[int, typer.Option(min=1, help="Tokens before a step of decoding.")] = 200,
    compiled: Annotated[
        str, typer.Option("--compile", help="Compiled layers: auto, on or off.")
    ] = "on",
) -> None:
    """Time models of several families with random weights in turn."""
    import torch

    torch.set_num_threads(threads or torch.get_num_threads())
    wanted: list[Shape] = [shape for shape in shapes(context, 1) if shape.context]
    models = {
        name: random_model(
            name, dtype, cast("Compile", compiled), slots=8, max_context=context + 16
        )
        for name in SHAPES
    }
    found = compare(models, wanted, rounds)
    typer.echo(
        (
            f"random weights, {dtype}, {torch.get_num_threads()} threads, {rounds} rounds, "
            f"{context} tokens of context\n\n"
        )
        + table(found, {name: bytes_read(model) for name, model in models.items()})
    )


if __name__ == "__main__":
    typer.run(main)
