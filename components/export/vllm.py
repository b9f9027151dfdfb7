"""vLLM: the JSON of `--speculative-config`."""

from __future__ import annotations

import json
import shlex
from typing import Any

from draftwell.components.export.speculation import Speculation, Weights


def write(speculation: Speculation, weights: Weights) -> tuple[dict[str, Any], str, list[str]]:
    """Settings, command and notes."""
    settings: dict[str, Any] = {}
    notes: list[str] = []
    if speculation.source == "draft":
        settings = {
            "method": "draft_model",
            "model": weights.draft,
            "num_speculative_tokens": speculation.constant("vllm"),
        }
        if weights.draft_revision:
            settings["revision"] = weights.draft_revision
        notes.append(
            "vLLM's draft is greedy at any temperature (draft_sample_method), Draftwell's "
            "samples as the request does: acceptance "
            "differs, outputs do not."
        )
    elif speculation.source == "eagle3":
        settings = {
            "method": "eagle3",
            "model": weights.head,
            "num_speculative_tokens": speculation.length,
        }
        notes.append(
            "vLLM drafts a chain of constant length; a stop rule that was tuned is left out."
        )
    elif speculation.suffix is not None:
        settings = {
            "method": "suffix",
            "num_speculative_tokens": speculation.length,
            "suffix_decoding_max_spec_factor": speculation.suffix.factor,
            "suffix_decoding_min_token_prob": speculation.suffix.least,
        }
        notes.append("vLLM's method suffix needs the package arctic-inference.")
    elif speculation.source == "ngram":
        settings = {
            "method": "ngram",
            "num_speculative_tokens": speculation.length,
            "prompt_lookup_max": speculation.ngram,
            "prompt_lookup_min": 1,
        }
    command = [
        "vllm",
        "serve",
        weights.target,
        *(["--revision", weights.target_revision] if weights.target_revision else []),
        *(["--speculative-config", json.dumps(settings)] if settings else []),
    ]
    return settings, shlex.join(command), notes
