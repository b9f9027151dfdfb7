"""SGLang: arguments of its server; the settings are also its `--config` YAML."""

from __future__ import annotations

import shlex
from typing import Any

from draftwell.components.export.speculation import Speculation, Weights


def write(speculation: Speculation, weights: Weights) -> tuple[dict[str, Any], str, list[str]]:
    """Settings, command and notes."""
    settings: dict[str, Any] = {}
    notes: list[str] = []
    if speculation.source == "draft":
        length = speculation.constant("sglang")
        # a chain: one candidate a step; SGLang counts the token before the draft among those
        # verified
        settings = {
            "speculative-algorithm": "STANDALONE",
            "speculative-draft-model-path": weights.draft,
            "speculative-num-steps": length,
            "speculative-eagle-topk": 1,
            "speculative-num-draft-tokens": length + 1,
        }
        if weights.draft_revision:
            settings["speculative-draft-model-revision"] = weights.draft_revision
    elif speculation.source == "eagle3":
        assert speculation.length is not None
        settings = {
            "speculative-algorithm": "EAGLE3",
            "speculative-draft-model-path": weights.head,
            "speculative-num-steps": speculation.length,
            "speculative-eagle-topk": 1,
            "speculative-num-draft-tokens": speculation.length + 1,
        }
        notes.append(
            "SGLang drafts a chain of constant length here; its trees "
            "(speculative-eagle-topk) were not tuned."
        )
    elif speculation.source == "ngram":
        assert speculation.length is not None
        settings = {
            "speculative-algorithm": "NGRAM",
            "speculative-num-draft-tokens": speculation.length + 1,
            "speculative-ngram-min-bfs-breadth": 1,
            "speculative-ngram-max-bfs-breadth": 1,
            "speculative-ngram-match-type": "BFS",
        }
        notes.append(
            "SGLang's n-grams come from a cache that all requests share, and the longest "
            f"n-gram ({speculation.ngram}) cannot be "
            "set in all its versions: it is left out. NGRAM runs on CUDA only."
        )
    flags = [part for key, value in settings.items() for part in (f"--{key}", str(value))]
    pinned = ["--revision", weights.target_revision] if weights.target_revision else []
    command = ["python3", "-m", "sglang.launch_server", "--model-path", weights.target]
    return settings, shlex.join([*command, *pinned, *flags]), notes
