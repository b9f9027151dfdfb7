"""Settings of each engine, how to use them, and notes on what it cannot express.

- vLLM: the JSON of `--speculative-config`.
- SGLang: arguments of its server; the settings are also its `--config` YAML.
- llama.cpp: arguments of llama-server.
- transformers: fields of `GenerationConfig`. Assisted generation reads them from the assistant's
  generation config, prompt lookup from the call's own; a test runs both.
"""

from __future__ import annotations

import json
import shlex
from typing import Any

from draftwell.components.engines.vllm_methods import schedule_of
from draftwell.components.export.schedules import sglang_adaptive
from draftwell.components.export.speculation import Speculation, Weights

Written = tuple[dict[str, Any], str, list[str]]
"""Settings by the engine's keys, a command or lines of Python, and notes."""
LENGTHS_NOTE = (
    "Lengths by requests at once are those of Draftwell's own engine: measure them on the one that "
    "serves (draftwell step choose --engine vllm)."
)
FIRST_HEURISTIC_LENGTH = 5
"""First draft length of Draftwell's and transformers' heuristic."""


def flags(settings: dict[str, Any]) -> list[str]:
    """Settings as arguments of a command."""
    return [part for key, value in settings.items() for part in (f"--{key}", str(value))]


def for_vllm(speculation: Speculation, weights: Weights) -> Written:
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
            "samples as the request does: acceptance differs, outputs do not."
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
    if speculation.by_batch and settings and speculation.suffix is None:
        longest = settings["num_speculative_tokens"]
        table = {size: min(k, longest) for size, k in speculation.by_batch.items()}
        settings["num_speculative_tokens_per_batch_size"] = [
            list(part) for part in schedule_of(table)
        ]
        notes.append(LENGTHS_NOTE)
    command = ["vllm", "serve", weights.target]
    if weights.target_revision:
        command += ["--revision", weights.target_revision]
    if settings:
        command += ["--speculative-config", json.dumps(settings)]
    return settings, shlex.join(command), notes


def for_sglang(speculation: Speculation, weights: Weights) -> Written:
    """Settings, command and notes."""
    settings: dict[str, Any] = {}
    notes: list[str] = []
    if speculation.source in ("draft", "eagle3"):
        draft = speculation.source == "draft"
        length = speculation.constant("sglang") if draft else speculation.length or 0
        # a chain: one candidate a step; SGLang counts the token before the draft among those
        # verified
        settings = {
            "speculative-algorithm": "STANDALONE" if draft else "EAGLE3",
            "speculative-draft-model-path": weights.draft if draft else weights.head,
            "speculative-num-steps": length,
            "speculative-eagle-topk": 1,
            "speculative-num-draft-tokens": length + 1,
        }
        if not draft and speculation.by_batch:
            table = {size: min(k, length) for size, k in speculation.by_batch.items()}
            adaptive = json.dumps(sglang_adaptive([(size, (k,)) for size, k in table.items()]))
            notes.append(
                f"{LENGTHS_NOTE} Save {adaptive} as adaptive.json and add --speculative-adaptive "
                "--speculative-adaptive-config adaptive.json."
            )
        if not draft:
            notes.append(
                "SGLang drafts a chain of constant length here; its trees "
                "(speculative-eagle-topk) were not tuned."
            )
        elif weights.draft_revision:
            settings["speculative-draft-model-revision"] = weights.draft_revision
    elif speculation.source == "ngram":
        settings = {
            "speculative-algorithm": "NGRAM",
            "speculative-num-draft-tokens": (speculation.length or 0) + 1,
            "speculative-ngram-min-bfs-breadth": 1,
            "speculative-ngram-max-bfs-breadth": 1,
            "speculative-ngram-match-type": "BFS",
        }
        notes.append(
            "SGLang's n-grams come from a cache that all requests share, and the longest "
            f"n-gram ({speculation.ngram}) cannot be set in all its versions: it is left out. "
            "NGRAM runs on CUDA only."
        )
    command = ["python3", "-m", "sglang.launch_server", "--model-path", weights.target]
    if weights.target_revision:
        command += ["--revision", weights.target_revision]
    return settings, shlex.join([*command, *flags(settings)]), notes


def for_llama_cpp(speculation: Speculation, weights: Weights) -> Written:
    """Settings, command and notes."""
    settings: dict[str, Any] = {"spec-type": "none"}
    notes: list[str] = []
    if speculation.source == "draft":
        assert weights.draft is not None
        threshold, length = speculation.threshold, speculation.length
        # always given: the defaults of both have changed from build to build
        settings = {
            "spec-type": "draft-simple",
            "spec-draft-model": gguf(weights.draft, notes),
            "spec-draft-n-max": speculation.constant("llama.cpp") if length is None else length,
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
            "Draftwell tries shorter ones too and takes the earliest."
        )
    if weights.target_revision:
        notes.append(
            f"The target was tuned at revision {weights.target_revision}: convert that one."
        )
    command = ["llama-server", "--model", gguf(weights.target, notes), *flags(settings)]
    return settings, shlex.join(command), notes


def gguf(name: str, notes: list[str]) -> str:
    """The GGUF file of a model: its own name, or that after a conversion, for which a note is
    added."""
    if name.endswith(".gguf"):
        return name
    file = f"{name.rstrip('/').rpartition('/')[2]}.gguf"
    notes.append(f"llama.cpp reads GGUF: make {file} of {name} with its convert_hf_to_gguf.py.")
    return file


def for_transformers(speculation: Speculation, weights: Weights) -> Written:
    """Settings, lines of Python and notes."""
    settings: dict[str, Any] = {}
    lines = [
        "from transformers import AutoModelForCausalLM",
        f"model = {loaded(weights.target, weights.target_revision)}",
    ]
    if speculation.source == "none":
        return settings, "\n".join([*lines, "model.generate(**inputs)"]), []
    alone = "One request at a time: transformers refuses batches."
    if speculation.source == "ngram":
        settings = {
            "prompt_lookup_num_tokens": speculation.length,
            "max_matching_ngram_size": speculation.ngram,
        }
        return settings, "\n".join([*lines, f"model.generate(**inputs, **{settings!r})"]), [alone]
    notes = [
        f"{alone} The settings go on the assistant: generate() ignores those of a generation "
        "config that it is given."
    ]
    length, schedule = speculation.length, "constant"
    if speculation.heuristic:
        length, schedule = FIRST_HEURISTIC_LENGTH, "heuristic"
        notes.append(
            "The heuristic length has no limit in transformers; the tuned one is "
            f"{speculation.length}."
        )
    settings = {
        "num_assistant_tokens": speculation.constant("transformers") if length is None else length,
        "num_assistant_tokens_schedule": schedule,
        "assistant_confidence_threshold": speculation.threshold or 0.0,  # its default is 0.4
    }
    if speculation.threshold:
        notes.append(
            "Where scikit-learn is installed transformers moves the confidence threshold "
            "as it goes."
        )
    lines += [
        f"assistant = {loaded(weights.draft, weights.draft_revision)}",
        f"assistant.generation_config.update(**{settings!r})",
        "model.generate(**inputs, assistant_model=assistant)",
    ]
    return settings, "\n".join(lines), notes


def loaded(name: str | None, revision: str | None) -> str:
    """The call of transformers that loads a model."""
    pinned = f", revision={revision!r}" if revision else ""
    return f"AutoModelForCausalLM.from_pretrained({name!r}{pinned})"
