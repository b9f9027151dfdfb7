"""The exported document: an engine's own settings, how to start it with them, and notes on what it
cannot express."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from draftwell.components.export.settings import (
    Written,
    for_llama_cpp,
    for_sglang,
    for_transformers,
    for_vllm,
)
from draftwell.components.export.speculation import Speculation, Weights, speculation_of
from draftwell.serving.errors import DraftwellError
from draftwell.serving.runtime.strategies import build_strategy, find_strategy

ENGINES: dict[str, Callable[[Speculation, Weights], Written]] = {
    "vllm": for_vllm,
    "sglang": for_sglang,
    "llama.cpp": for_llama_cpp,
    "transformers": for_transformers,
}

HEADS = ("vllm", "sglang")
"""Engines that load EAGLE-3 heads."""


@cache
def schema(engine: str) -> dict[str, Any]:
    """Documented keys, types and ranges of an engine, as a JSON schema with `version` and
    `source`."""
    found: dict[str, Any] = json.loads(
        (Path(__file__).parent / "engines" / f"{engine}.json").read_text(encoding="utf-8")
    )
    return found


def problems(engine: str, settings: Mapping[str, Any]) -> list[str]:
    """Where settings differ from an engine's documentation, one line each; empty where they
    conform."""
    from jsonschema import Draft202012Validator

    return [
        f"{'.'.join(map(str, error.path)) or 'settings'}: {error.message}"
        for error in Draft202012Validator(schema(engine)).iter_errors(dict(settings))
    ]


def export_config(
    engine: str,
    strategy: str,
    parameters: Mapping[str, Any],
    weights: Weights,
    *,
    draft_tokens: int | None = None,
    draft_length_by_batch: Mapping[int, int] | None = None,
) -> dict[str, Any]:
    """A decoding config as settings of an engine, as plain JSON.

    Args:
        strategy: name of the strategy.
        parameters: its settings, with or without defaults.
        weights: the models, as the engine reads them.
        draft_tokens: as in `speculation_of`.
        draft_length_by_batch: as in `DecodingConfig`; left out where the engine has no such table,
            or drafts something else than what was measured (a tree, a length by another rule).
    Raises:
        DraftwellError: an unknown engine or strategy, no draft where one is needed, or a strategy
            that the engine cannot express.
    """
    if engine not in ENGINES:
        raise DraftwellError(
            f"there is no export to {engine!r}: choose from {', '.join(ENGINES)}",
            code="unknown_engine",
        )
    speculation = speculation_of(
        strategy, parameters, draft_tokens, head=engine in HEADS and weights.head is not None
    )
    check_models(engine, strategy, speculation, weights)
    longest = build_strategy(strategy, dict(parameters)).longest_draft
    # lengths of a tree, or of a rule that is left out, are not those of a chain
    if draft_tokens is None and speculation.length == longest:
        speculation = replace(speculation, by_batch=draft_length_by_batch or {})
    settings, usage, notes = ENGINES[engine](speculation, weights)
    wrong = problems(engine, settings)
    if wrong:
        raise DraftwellError(
            f"{engine} does not support this config ({wrong[0]}): tune within what it documents",
            code="not_supported_by_engine",
        )
    known = schema(engine)
    return {
        "engine": engine,
        "engine_version": known["version"],
        "read_from": known["source"],
        "strategy": strategy,
        "parameters": dict(parameters),
        "lossless": find_strategy(strategy).lossless,
        "settings": settings,
        "usage": usage,
        "notes": [*speculation.notes, *notes],
    }


def check_models(engine: str, strategy: str, speculation: Speculation, weights: Weights) -> None:
    """Refuse a speculation whose draft or head is not there in a form that the engine reads."""
    if speculation.source == "draft" and weights.draft is None:
        raise DraftwellError(
            f"{strategy} needs a draft that {engine} can read, and this pair names none: "
            "name one with "
            "--set draft_model=…, or write a distilled one with --set save_draft=…",
            code="no_draft_to_export",
        )
    if speculation.source == "eagle3" and engine not in HEADS:
        raise DraftwellError(
            f"{engine} runs no EAGLE-3 heads: export to {' or '.join(HEADS)}", code="not_exportable"
        )
    if speculation.source == "eagle3" and weights.head is None:
        raise DraftwellError(
            (
                f"{strategy} needs a head in a folder that {engine} can read: write it with "
                "--set save_head=…"
            ),
            code="no_head_to_export",
        )
