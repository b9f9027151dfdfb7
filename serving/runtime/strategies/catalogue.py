"""All strategies by name, and how they describe themselves."""

from __future__ import annotations

import difflib
import inspect
import math
from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from draftwell.serving.errors import DraftwellError
from draftwell.serving.plugins import Extended
from draftwell.serving.runtime.strategies.base import Strategy, StrategyResources
from draftwell.serving.runtime.strategies.lossless.autoregressive import Autoregressive
from draftwell.serving.runtime.strategies.lossless.double import Double
from draftwell.serving.runtime.strategies.lossless.draft_lengths import (
    SVIP,
    AdaEDL,
    DraftVerify,
    HFDynamic,
    SpecDecPP,
    VanillaSD,
)
from draftwell.serving.runtime.strategies.lossless.duo_decoding import DuoDecoding
from draftwell.serving.runtime.strategies.lossless.eagle3 import Eagle3
from draftwell.serving.runtime.strategies.lossless.hybrid import Hybrid
from draftwell.serving.runtime.strategies.lossless.lookahead import LookaheadDecoding
from draftwell.serving.runtime.strategies.lossless.medusa import MedusaDecoding
from draftwell.serving.runtime.strategies.lossless.pearl import Pearl
from draftwell.serving.runtime.strategies.lossless.prompt_lookup import PromptLookup
from draftwell.serving.runtime.strategies.lossless.rest import Rest
from draftwell.serving.runtime.strategies.lossless.spide import Spide
from draftwell.serving.runtime.strategies.lossless.suffix import SuffixDecoding
from draftwell.serving.runtime.strategies.lossless.swift import Swift
from draftwell.serving.runtime.strategies.lossy.asd import ASD
from draftwell.serving.runtime.strategies.lossy.csd import CSD
from draftwell.serving.runtime.strategies.lossy.fly import FLy
from draftwell.serving.runtime.strategies.lossy.fuzzy_sd import FuzzySD
from draftwell.serving.runtime.strategies.lossy.lossy_sd import LossySD
from draftwell.serving.runtime.strategies.lossy.mentored import Mentored
from draftwell.serving.runtime.strategies.lossy.pyramid import PyramidAssisted, PyramidFuzzy
from draftwell.serving.runtime.strategies.lossy.sprinter import Sprinter

GROUP = "draftwell.strategies"
"""Of the entry points by which other distributions add strategies."""
OUR_STRATEGIES: dict[str, type[Strategy]] = {
    "autoregressive": Autoregressive,
    "vanilla_sd": VanillaSD,
    "svip": SVIP,
    "draft_verify": DraftVerify,
    "adaedl": AdaEDL,
    "hf_dynamic": HFDynamic,
    "spide": Spide,
    "pearl": Pearl,
    "double": Double,
    "specdec_pp": SpecDecPP,
    "prompt_lookup": PromptLookup,
    "suffix": SuffixDecoding,
    "rest": Rest,
    "eagle3": Eagle3,
    "hybrid": Hybrid,
    "lookahead": LookaheadDecoding,
    "swift": Swift,
    "medusa": MedusaDecoding,
    "sprinter": Sprinter,
    "duo_decoding": DuoDecoding,
    "csd": CSD,
    "fuzzy_sd": FuzzySD,
    "mentored": Mentored,
    "lossy_sd": LossySD,
    "fly": FLy,
    "asd": ASD,
    "pyramid_assisted": PyramidAssisted,
    "pyramid_fuzzy": PyramidFuzzy,
}
"""In the order of listings and of the tuner's search."""


def _problem(name: str, cls: Any) -> str:
    """Why an entry point's object is no strategy; "" where it is one."""
    if not (inspect.isclass(cls) and issubclass(cls, Strategy)) or inspect.isabstract(cls):
        return "it is no complete subclass of Strategy"
    lacking = [one for one in ("name", "lossless", "paper", "Config") if not hasattr(cls, one)]
    if lacking:
        return f"the class lacks {' and '.join(lacking)}"
    return "" if cls.name == name else f"the class calls itself {cls.name}"


STRATEGIES: Mapping[str, type[Strategy]] = Extended(OUR_STRATEGIES, GROUP, _problem)
"""Our own, and those of installed plug-ins (docs/plugins.md)."""


def find_strategy(name: str) -> type[Strategy]:
    """The strategy class of a name; an unknown name is a user's mistake."""
    if name not in STRATEGIES:
        close = difflib.get_close_matches(name, STRATEGIES, n=1)
        hint = f"did you mean {close[0]}?" if close else f"choose from {', '.join(STRATEGIES)}"
        raise DraftwellError(f"unknown strategy {name!r}: {hint}", code="unknown_strategy")
    return STRATEGIES[name]


def build_strategy(
    name: str, parameters: dict[str, Any] | None = None, resources: StrategyResources | None = None
) -> Strategy:
    """A strategy from its name and parameters (strings are converted as pydantic does).

    Raises:
        DraftwellError: unknown name or parameter, a setting without default left out, or a value
            out of bounds; the line says which.
    """
    cls = find_strategy(name)
    try:
        config = cls.Config.model_validate(parameters or {})
    except ValidationError as error:
        # a misspelt name explains the missing one
        first = min(error.errors(), key=lambda e: e["type"] == "missing")
        key = ".".join(map(str, first["loc"])) or "its parameters together"
        if first["type"] == "extra_forbidden":
            known = ", ".join(cls.Config.model_fields) or "none"
            raise DraftwellError(
                f"strategy {name} has no parameter {key!r}: it has {known}",
                code="unknown_parameter",
            ) from error
        if first["type"] == "missing":
            missing = [str(e["loc"][0]) for e in error.errors()]
            raise DraftwellError(
                f"strategy {name} has no default for {' and '.join(missing)}: give a value "
                "with --set, for example "
                f"--set {name}.{key}=VALUE",
                code="parameter_missing",
            ) from error
        raise DraftwellError(
            f"strategy {name}, parameter {key}: {first['msg']} (got {first['input']!r})",
            code="bad_parameter",
        ) from error
    return cls(config, resources or StrategyResources())


def describe(cls: type[Strategy]) -> dict[str, Any]:
    """Name, lossless, parameters with default (or required), bounds or choices and description,
    artifacts, models, paper: plain JSON."""
    complete = cls.Config.model_json_schema()
    schema = complete.get("properties", {})
    parameters = {}
    for name, info in schema.items():
        kinds = info.get("anyOf", [info])
        bounds: dict[str, Any] = next(
            (k for k in kinds if "minimum" in k or "exclusiveMinimum" in k or "maximum" in k), {}
        )
        default = info.get("default")
        parameters[name] = {
            "type": next(k["type"] for k in kinds if k.get("type") != "null"),
            "required": name in complete.get("required", ()),
            "default": None
            if isinstance(default, float) and not math.isfinite(default)
            else default,
            "minimum": bounds.get("minimum", bounds.get("exclusiveMinimum")),
            "exclusive_minimum": "exclusiveMinimum" in bounds,
            "maximum": bounds.get("maximum"),
            "choices": next((k["enum"] for k in kinds if "enum" in k), None),
            "description": info.get("description", ""),
        }
    return {
        "name": cls.name,
        "lossless": cls.lossless,
        "parameters": parameters,
        "artifacts": list(cls.artifacts),
        "optional_artifacts": list(cls.optional_artifacts),
        "models": list(cls.roles),
        "paper": cls.paper,
    }
