"""Milliseconds of single forward passes of one model, for each of the ways in which it can be run.

Shapes are those of decoding: one row of 1 to 16 tokens (plain decoding, and drafts to verify),
eight rows of one token (eight requests), and a prompt. Ways are measured in turn, round by round,
so that what else the machine does meets all of them alike. Run as `python -m
draftwell.components.bench.forward --model FOLDER`.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from draftwell.components.report.tables import markdown

if TYPE_CHECKING:
    from draftwell.serving.runtime.models.compiled_step import Compile
    from draftwell.serving.runtime.models.module_model import ModuleModel

SEED = 3


@dataclass(frozen=True)
class Shape:
    """A forward pass: so many rows of so many tokens, each after `context` tokens; `repeats` of
    them are timed as one."""

    name: str
    rows: int
    tokens: int
    context: int
    repeats: int


def shapes(context: int, prompt: int) -> list[Shape]:
    """What is measured.

    Args:
        context: tokens before a step of decoding.
        prompt: tokens of the prompt.
    """
    steps = [Shape(f"1 row × {n}", 1, n, context, 8) for n in (1, 2, 4, 8, 16)]
    return [
        *steps,
        Shape("8 rows × 1", 8, 1, context, 8),
        Shape(f"prompt of {prompt}", 1, prompt, 0, 1),
    ]


def timed(model: ModuleModel, shape: Shape) -> float:
    """Milliseconds of a forward pass that keeps the logits of every token (of a prompt the
    last)."""
    import torch

    from draftwell.serving.runtime.commands import Forward

    ids = torch.randint(
        0,
        model.vocab_size,
        (shape.context + shape.tokens,),
        generator=torch.Generator().manual_seed(SEED),
    ).tolist()
    slots = [model.open() for _ in range(shape.rows)]
    try:
        if shape.context:
            for slot in slots:
                model.forward([Forward("target", slot, tuple(ids[: shape.context]))])
        rows = [
            Forward(
                "target", slot, tuple(ids[shape.context :]), shape.tokens if shape.context else 1
            )
            for slot in slots
        ]

        def run() -> None:
            model.forward(rows)
            for slot in slots:
                model.rollback(slot, shape.context)

        run()
        start = time.perf_counter()
        for _ in range(shape.repeats):
            run()
        return 1000 * (time.perf_counter() - start) / shape.repeats
    finally:
        for slot in slots:
            model.close(slot)


def compare(
    models: Mapping[str, ModuleModel],
    wanted: list[Shape],
    rounds: int,
    timer: Callable[[Any, Shape], float] = timed,
) -> dict[str, dict[str, list[float]]]:
    """Shape → way → milliseconds of every round; the order of the ways rotates."""
    names = list(models)
    found: dict[str, dict[str, list[float]]] = {
        shape.name: {name: [] for name in names} for shape in wanted
    }
    for turn in range(rounds):
        for shape in wanted:
            for name in names[turn % len(names) :] + names[: turn % len(names)]:
                found[shape.name][name].append(timer(models[name], shape))
    return found


def table(found: Mapping[str, Mapping[str, list[float]]]) -> str:
    """A Markdown table: for each shape and way the median and, in brackets, the least."""
    names = list(next(iter(found.values())))
    rows = [
        [shape, *(f"{statistics.median(ways[name]):.2f} ({min(ways[name]):.2f})" for name in names)]
        for shape, ways in found.items()
    ]
    return markdown(["ms: median (least)", *names], rows)


def ways(
    folder: Path, dtype: str, wanted: Compile, *, slots: int, max_context: int
) -> dict[str, ModuleModel]:
    """The same weights through transformers' own layers, the lean module, and that with compiled
    layers where it has any.

    Args:
        folder: of a model that the lean module runs.
        wanted: as `LoadSettings.compile`.
    """
    import torch

    from draftwell.serving.runtime.model_files import load_module
    from draftwell.serving.runtime.models.lean_llama import LeanLlama
    from draftwell.serving.runtime.models.transformers_model import TransformersModel

    settings: dict[str, Any] = {"slots": slots, "max_context": max_context}
    module = load_module(folder, getattr(torch, dtype), "cpu")
    found: dict[str, ModuleModel] = {
        "transformers": TransformersModel(module, **settings),
        "eager": LeanLlama(module, **settings),
    }
    compiled = LeanLlama(module, compiled=wanted, **settings)
    return found | ({} if compiled.step is None else {"compiled": compiled})


def main(
    model: Annotated[Path, typer.Option(help="Folder of a model.")],
    dtype: Annotated[str, typer.Option(help="bfloat16 or float32.")] = "bfloat16",
    threads: Annotated[
        int | None, typer.Option(min=1, help="CPU threads; default: all cores.")
    ] = None,
    rounds: Annotated[
        int, typer.Option(min=1, help="Times that everything is measured, in turn.")
    ] = 5,
    context: Annotated[int, typer.Option(min=1, help="Tokens before a step of decoding.")] = 200,
    prompt: Annotated[int, typer.Option(min=1, help="Tokens of the prompt.")] = 1000,
    compiled: Annotated[
        str, typer.Option("--compile", help="Compiled layers: auto, on or off.")
    ] = "on",
) -> None:
    """Time single forward passes (one parameter for each flag)."""
    import torch

    torch.set_num_threads(threads or torch.get_num_threads())
    models = ways(
        model, dtype, cast("Compile", compiled), slots=8, max_context=max(context + 16, prompt)
    )
    found = compare(models, shapes(context, prompt), rounds)
    typer.echo(
        f"{model.name}, {dtype}, {torch.get_num_threads()} threads, {rounds} rounds, "
        f"{context} tokens of context\n\n{table(found)}"
    )


if __name__ == "__main__":
    typer.run(main)
