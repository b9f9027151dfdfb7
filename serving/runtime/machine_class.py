"""The machine class that a loaded pair's times are valid for: the machine's own, and which models decode by compiled layers on it."""

from __future__ import annotations

from serving.device import device_class
from serving.runtime.pair import LoadedPair

COMPILED = "+compiled-"
"""Stands between the machine's own class and the roles whose single tokens compiled layers decode (models/compiled_step.py)."""


def machine_class(pair: LoadedPair) -> str:
    """Such as `cpu-x86_64-2c-avx512_bf16`, or the same with `+compiled-target`: a token then takes about half the time."""
    roles = compiled_roles(pair)
    return device_class(pair.device) + (COMPILED + "-".join(roles) if roles else "")


def compiled_roles(pair: LoadedPair) -> list[str]:
    """Roles of the models that decode single tokens by compiled layers, sorted."""
    return sorted(role for role, model in pair.models.items() if getattr(model, "step", None) is not None)


def without_layers(name: str) -> str:
    """The machine's own part of a machine class.

    >>> without_layers("cpu-x86_64-2c-avx512_bf16+compiled-target")
    'cpu-x86_64-2c-avx512_bf16'
    """
    return name.partition(COMPILED)[0]
