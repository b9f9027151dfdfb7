"""The machine class that a loaded pair's times are valid for: the machine's own, and whether torch
computes layers there that the library would."""

from __future__ import annotations

from draftwell.serving.device import device_class
from draftwell.serving.runtime.commands import Role
from draftwell.serving.runtime.pair import LoadedPair

TORCH = "+torch-"
"""Stands between the machine's own class and the roles whose layers torch computes for want of a
library (`models/native`)."""


MEASURED: tuple[Role, ...] = ("draft", "target")


def machine_class(pair: LoadedPair) -> str:
    """Such as `cpu-x86_64-2c-avx512_bf16`, or the same with `+torch-draft-target` where there is no
    library: a token then takes about twice the time."""
    roles = without_library(pair) if pair.device == "cpu" else []
    return device_class(pair.device) + (TORCH + "-".join(roles) if roles else "")


def without_library(pair: LoadedPair) -> list[str]:
    """Of the models that a hardware profile measures, the roles that the library would compute and
    does not.

    Others (a qualifier) are loaded by some commands and left out by others, and the class must not
    depend on that.
    """
    models = {role: pair.models[role] for role in MEASURED if role in pair.models}
    return [
        role
        for role, model in models.items()
        if model.device.type == "cpu" and getattr(model, "native", False) is None
    ]


def without_layers(name: str) -> str:
    """The machine's own part of a machine class.

    >>> without_layers("cpu-x86_64-2c-avx512_bf16+torch-target")
    'cpu-x86_64-2c-avx512_bf16'
    """
    return name.partition(TORCH)[0]
