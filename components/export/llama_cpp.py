"""llama.cpp: arguments of llama-server."""

from __future__ import annotations

import shlex
from typing import Any

from draftwell.components.export.speculation import Speculation, Weights


def write(speculation: Speculation, weights: Weights) -> tuple[dict[str, Any], str, list[str]]:
    """Settings, command and notes."""
    settings: dict[str, Any] = {"spec-type": "none"}
    notes: list[str] = []
    if speculation.source == "draft":
        assert weights.draft is not None
        threshold, length = speculation.threshold, speculation.length
        if length is None:
            length = speculation.constant("llama.cpp")
        # always given: the defaults of both have changed from build to build
        settings = {
            "spec-type": "draft-simple",
            "spec-draft-model": gguf(weights.draft, notes),
            "spec-draft-n-max": length,
            "spec-draft-n-min": 0,
            "spec-draft-p-min": threshold or 0.0,
        }
        if threshold:
            notes.append(
                "llama.cpp ends a draft before a token below spec-draft-p-min, Draftwell after it."
            )
        if speculation.heuristic:
            notes.append(
                "The length limit that moves with acceptance is left out: it stays at the "
                "longest draft."
            )
        if weights.draft_revision:
            notes.append(
                f"The draft was tuned at revision {weights.draft_revision}: convert that one."
            )
    elif speculation.source == "ngram":
        settings = {
            "spec-type": "ngram-simple",
            "spec-ngram-simple-size-n": speculation.ngram,
            "spec-ngram-simple-size-m": speculation.length,
            "spec-ngram-simple-min-hits": 1,
        }
        notes.append(
            "llama.cpp looks for n-grams of this length alone and takes the latest match; "
            "Draftwell tries shorter ones too and "
            "takes the earliest."
        )
    if weights.target_revision:
        notes.append(
            f"The target was tuned at revision {weights.target_revision}: convert that one."
        )
    flags = [part for key, value in settings.items() for part in (f"--{key}", str(value))]
    return (
        settings,
        shlex.join(["llama-server", "--model", gguf(weights.target, notes), *flags]),
        notes,
    )


def gguf(name: str, notes: list[str]) -> str:
    """The GGUF file of a model: its own name, or that after a conversion, for which a note is
    added."""
    if name.endswith(".gguf"):
        return name
    file = f"{name.rstrip('/').rpartition('/')[2]}.gguf"
    notes.append(f"llama.cpp reads GGUF: make {file} of {name} with its convert_hf_to_gguf.py.")
    return file
