"""The machine class that a loaded pair's times are valid for: the machine's own, and which models
decode by compiled layers on it."""

from __future__ import annotations

from draftwell.serving.device import device_class
from draftwell.serving.runtime.commands import Role
from draftwell.serving.runtime.pair import LoadedPair

COMPILED = "+compiled-"
"""Stands between the machine's own class and the roles whose single tokens compiled layers decode
(models/compiled_step.py)."""


MEASURED: tuple[Role, ...] = ("draft", "target")


def machine_class(pair: LoadedPair) -> str:
    """Such as `cpu-x86_64-2c-avx512_bf16`, or the same with `+compiled-target`: a token then takes
    about half the time."""
    roles = compiled_roles(pair)
    return device_class(pair.device) + (COMPILED + "-".join(roles) if roles else "")


def compiled_roles(pair: LoadedPair) -> list[str]:
    """Of the models that a hardware profile measures, the roles that decode by compiled layers.

    Others (a qualifier) are loaded by some commands and left out by others, and the class must not
    depend on that.
    """
    return [role for role in MEASURED if getattr(pair.models.get(role), "step", None) is not None]


def without_layers(name: str) -> str:
    """The machine's own part of a machine class.

    >>> without_layers("cpu-x86_64-2c-avx512_bf16+compiled-target")
    'cpu-x86_64-2c-avx512_bf16'
    """
    return name.partition(COMPILED)[0]
