"""The language model within a model of images and text: what is decoded here is text alone."""

from __future__ import annotations

from typing import Any

import torch

from draftwell.serving.errors import DraftwellError

WITH_IMAGES = frozenset(
    {
        "aya_vision",
        "gemma3",
        "idefics3",
        "internvl",
        "llava",
        "llava_next",
        "llava_onevision",
        "mistral3",
        "qwen2_5_vl",
        "qwen2_vl",
        "qwen3_vl",
        "smolvlm",
    }
)
"""Models whose text part reads text as a causal language model of its own (docs/models.md)."""
SAME_AS = {"qwen2_vl_text": "qwen2", "qwen2_5_vl_text": "qwen2", "qwen3_vl_text": "qwen3"}
"""Text parts that are another type in text, where their three rotary positions are equal."""


def check_text_part(config: Any) -> None:
    """Refuse a model of more than text whose text part nobody has compared
    (`unsupported_architecture`)."""
    if config.model_type not in WITH_IMAGES:
        raise DraftwellError(
            f"the text part of {config.model_type} models has not been compared with transformers "
            "here: choose another model (docs/models.md names those that work)",
            code="unsupported_architecture",
        )


def text_part(module: Any) -> Any:
    """The module itself, or the causal language model of text that it holds, with its weights.

    Args:
        module: one whose configuration passed `check_text_part`, or of text alone.
    """
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.initialization import no_init_weights

    own = module.config.get_text_config()
    if own is module.config:
        return module
    settings = own.to_dict()
    kind = settings.pop("model_type")
    config = AutoConfig.for_model(SAME_AS.get(kind, kind), **settings)
    # every weight is taken from the module below
    with torch.device("cpu"), no_init_weights():
        text = AutoModelForCausalLM.from_config(config, dtype=module.dtype)
    weights = {f"model.{key}": value for key, value in module.get_decoder().state_dict().items()}
    text.load_state_dict(weights | {"lm_head.weight": module.lm_head.weight}, assign=True)
    text.generation_config = module.generation_config
    return text.eval()
