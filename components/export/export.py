"""The exported document: an engine's own settings, how to start it with them, and what could not be said."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from components.export import llama_cpp, sglang, transformers_config, vllm
from components.export.speculation import Speculation, Weights, speculation_of
from serving.errors import DraftwellError
from serving.runtime.strategies import find_strategy

Settings = dict[str, Any]
Writer = Callable[[Speculation, Weights], tuple[Settings, str, list[str]]]
"""Settings by the engine's keys, how to use them, and notes."""
ENGINES: dict[str, Writer] = {"vllm": vllm.write, "sglang": sglang.write, "llama.cpp": llama_cpp.write,
                              "transformers": transformers_config.write}


@cache
def schema(engine: str) -> dict[str, Any]:
    """Documented keys, types and ranges of an engine, as a JSON schema with `version` and `source`."""
    found: dict[str, Any] = json.loads((Path(__file__).parent / "engines" / f"{engine}.json").read_text(encoding="utf-8"))
    return found


def problems(engine: str, settings: Mapping[str, Any]) -> list[str]:
    """What an engine's documentation says against settings, one line each; empty if nothing."""
    from jsonschema import Draft202012Validator

    return [f"{'.'.join(map(str, error.path)) or 'settings'}: {error.message}"
            for error in Draft202012Validator(schema(engine)).iter_errors(dict(settings))]


def export_config(engine: str, strategy: str, parameters: Mapping[str, Any], weights: Weights, *,
           draft_tokens: int | None = None) -> dict[str, Any]:
    """A decoding config in the words of an engine, as plain JSON.

    Args:
        strategy: name of the strategy; `parameters` its settings, defaults left out or not.
        weights: the models, as the engine shall read them.
        draft_tokens: as in `speculation_of`.
    Raises:
        DraftwellError: an unknown engine or strategy, no draft where one is needed, or nothing sensible that the engine could be told.
    """
    if engine not in ENGINES:
        raise DraftwellError(f"there is no export to {engine!r}: choose from {', '.join(ENGINES)}")
    speculation = speculation_of(strategy, parameters, draft_tokens)
    if speculation.source == "draft" and weights.draft is None:
        raise DraftwellError(f"{strategy} needs a draft that {engine} can read, and this pair names none: name one with "
                             "--draft-model, or write a distilled one with --save-draft")
    settings, usage, notes = ENGINES[engine](speculation, weights)
    wrong = problems(engine, settings)
    if wrong:
        raise DraftwellError(f"{engine} cannot be told this config ({wrong[0]}): tune within what it documents")
    known = schema(engine)
    return {"engine": engine, "engine_version": known["version"], "read_from": known["source"],
            "strategy": strategy, "parameters": dict(parameters), "lossless": find_strategy(strategy).lossless,
            "settings": settings, "usage": usage, "notes": [*speculation.notes, *notes]}
