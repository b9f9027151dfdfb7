"""Compiled layers less the compiler: what libraries compute, by torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial

import torch

from draftwell.serving.runtime.models.compiled_layer import CompiledLayer, OneRow, packed_layer
from draftwell.serving.runtime.models.compiled_step import FORMS, CompiledStep, Form
from draftwell.serving.runtime.models.lean_layer import layer_weights
from draftwell.serving.runtime.models.lean_llama import LeanLlama


class Uncompiled:
    """What a library computes, by torch; says when it is called."""

    def __init__(self, module: CompiledLayer, called: Callable[[], None]):
        self.module, self.called = module, called

    def run(self, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
        self.called()
        end = 7 if isinstance(self.module, OneRow) else 8
        return [
            self.module(
                (inputs[0], inputs[1], inputs[2]),
                (inputs[3], inputs[4]),
                tuple(inputs[5:end]),
                inputs[end:],
            )
        ]


def with_step(
    model: LeanLlama, forms: Sequence[Form] = tuple(FORMS), most: int | None = None
) -> Counter[Form]:
    """Give a model the step of compiled layers, less the compiler; returns the calls of layers, by
    form."""
    called: Counter[Form] = Counter()
    whole = [
        packed_layer(layer_weights(*pair))
        for pair in zip(model.layers, model.module.model.layers, strict=True)
    ]

    def runner(form: Form, number: int) -> Uncompiled:
        window = model.shape.windows[number] if form in ("token", "rows") else None
        return Uncompiled(
            FORMS[form](model.layers[number], list(whole[number]), window),
            partial(called.update, [form]),
        )

    calls = {
        form: [(runner(form, number), list(one.values())) for number, one in enumerate(whole)]
        for form in forms
    }
    model.step = CompiledStep(calls, model.shape.windows, model.slots, most)
    return called
