"""All strategies by name, and how they describe themselves."""

from __future__ import annotations

import difflib
import math
from typing import Any

from pydantic import ValidationError

from serving.runtime.strategies.autoregressive import Autoregressive
from serving.runtime.strategies.base import Kit, Strategy
from serving.runtime.strategies.csd import CSD
from serving.runtime.strategies.prompt_lookup import PromptLookup
from serving.runtime.strategies.spide import Spide
from serving.runtime.strategies.sprinter import Sprinter
from serving.runtime.strategies.vanilla_sd import VanillaSD
from serving.runtime.types import DraftwellError

STRATEGIES: dict[str, type[Strategy]] = {
    "autoregressive": Autoregressive,
    "vanilla_sd": VanillaSD,
    "prompt_lookup": PromptLookup,
    "sprinter": Sprinter,
    "csd": CSD,
    "spide": Spide,
}


def find_strategy(name: str) -> type[Strategy]:
    """The strategy class of a name; an unknown name is a user's mistake."""
    if name not in STRATEGIES:
        close = difflib.get_close_matches(name, STRATEGIES, n=1)
        hint = f"did you mean {close[0]}?" if close else f"choose from {', '.join(STRATEGIES)}"
        raise DraftwellError(f"unknown strategy {name!r}: {hint}")
    return STRATEGIES[name]


def build_strategy(name: str, parameters: dict[str, Any] | None = None, kit: Kit | None = None) -> Strategy:
    """A strategy from its name and parameters (strings are converted as pydantic does).

    Raises:
        DraftwellError: unknown name or parameter, or a value out of bounds; the line says which.
    """
    cls = find_strategy(name)
    try:
        config = cls.Config.model_validate(parameters or {})
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(map(str, first["loc"])) or "as a whole"
        if first["type"] == "extra_forbidden":
            known = ", ".join(cls.Config.model_fields) or "none"
            raise DraftwellError(f"strategy {name} has no parameter {key!r}: it has {known}") from error
        raise DraftwellError(f"strategy {name}, parameter {key}: {first['msg']} (got {first['input']!r})") from error
    return cls(config, kit or Kit())


def describe(cls: type[Strategy]) -> dict[str, Any]:
    """Name, lossless, parameters with default, bounds and description, artifacts, models, paper: plain JSON."""
    schema = cls.Config.model_json_schema().get("properties", {})
    parameters = {}
    for name, info in schema.items():
        kinds = info.get("anyOf", [info])
        bounds: dict[str, Any] = next((k for k in kinds if "minimum" in k or "exclusiveMinimum" in k or "maximum" in k), {})
        default = info.get("default")
        parameters[name] = {
            "type": next(k["type"] for k in kinds if k.get("type") != "null"),
            "default": None if isinstance(default, float) and not math.isfinite(default) else default,
            "minimum": bounds.get("minimum", bounds.get("exclusiveMinimum")),
            "exclusive_minimum": "exclusiveMinimum" in bounds,
            "maximum": bounds.get("maximum"),
            "description": info.get("description", ""),
        }
    return {"name": cls.name, "lossless": cls.lossless, "parameters": parameters, "artifacts": list(cls.artifacts),
            "models": list(cls.roles), "paper": cls.paper}
