"""transformers: fields of `GenerationConfig`.

Assisted generation reads them from the assistant's generation config, prompt lookup from the call's
own; a test runs both.
"""

from __future__ import annotations

from typing import Any

from draftwell.components.export.speculation import Speculation, Weights

FIRST_HEURISTIC_LENGTH = 5
"""First draft length of Draftwell's and transformers' heuristic."""


def write(speculation: Speculation, weights: Weights) -> tuple[dict[str, Any], str, list[str]]:
    """Settings, lines of Python and notes."""
    load = "AutoModelForCausalLM.from_pretrained"
    lines = [
        "from transformers import AutoModelForCausalLM",
        f"model = {load}({weights.target!r}{_revision(weights.target_revision)})",
    ]
    if speculation.source == "none":
        return {}, "\n".join([*lines, "model.generate(**inputs)"]), []
    if speculation.source == "ngram":
        found = {
            "prompt_lookup_num_tokens": speculation.length,
            "max_matching_ngram_size": speculation.ngram,
        }
        alone = ["One request at a time: transformers refuses batches."]
        return found, "\n".join([*lines, f"model.generate(**inputs, **{found!r})"]), alone
    notes = [
        "One request at a time: transformers refuses batches. The settings go on the "
        "assistant: generate() ignores those of a "
        "generation config that it is given."
    ]
    settings: dict[str, Any] = {
        "num_assistant_tokens": speculation.length,
        "num_assistant_tokens_schedule": "constant",
        "assistant_confidence_threshold": speculation.threshold or 0.0,
    }  # its default is 0.4
    if speculation.length is None:
        settings["num_assistant_tokens"] = speculation.constant("transformers")
    if speculation.heuristic:
        settings |= {
            "num_assistant_tokens": FIRST_HEURISTIC_LENGTH,
            "num_assistant_tokens_schedule": "heuristic",
        }
        notes.append(
            "The heuristic length has no limit in transformers; the tuned one is "
            f"{speculation.length}."
        )
    if speculation.threshold:
        notes.append(
            "Where scikit-learn is installed transformers moves the confidence threshold "
            "as it goes."
        )
    lines += [
        f"assistant = {load}({weights.draft!r}{_revision(weights.draft_revision)})",
        f"assistant.generation_config.update(**{settings!r})",
        "model.generate(**inputs, assistant_model=assistant)",
    ]
    return settings, "\n".join(lines), notes


def _revision(pinned: str | None) -> str:
    """A further argument of `from_pretrained`."""
    return f", revision={pinned!r}" if pinned else ""
