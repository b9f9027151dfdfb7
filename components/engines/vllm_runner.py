"""vLLM's model runners: only the first one has a place for the proposers of our plug-in."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from draftwell.components.engines.environments import peers_root
from draftwell.components.engines.vllm_methods import CASCADE, CUSTOM

VARIABLE = "VLLM_USE_V2_MODEL_RUNNER"
"""0: the first, 1: the second; not set: the second where it can do what is asked."""
PLACE = "lib/python*/site-packages/vllm/v1/spec_decode"
"""Of ways to draft in the first runner, within vLLM's environment."""
PROPOSERS = "custom_class_proposer.py"


def proposer_objection(speculation: Mapping[str, Any] | None) -> str | None:
    """Why the vLLM that is installed cannot run a way to speculate that is a class of our plug-in;
    None where it can, and of all other ways.

    Args:
        speculation: vLLM's speculative config.
    """
    if (speculation or {}).get("method") != CUSTOM:
        return None
    what = f"{CASCADE} is a class of our plug-in, for which"
    if os.environ.get(VARIABLE, "").strip().lower() in ("1", "true"):
        return (
            f"{what} vLLM's second model runner has no place, and {VARIABLE} asks for it: unset "
            "the variable, or leave the method out"
        )
    places = list((peers_root() / "vllm").glob(PLACE))
    if places and not any((place / PROPOSERS).is_file() for place in places):
        return f"{what} this vLLM has no place: leave the method out, ngram is its nearest"
    return None
