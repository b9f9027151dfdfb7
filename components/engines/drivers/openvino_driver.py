"""OpenVINO GenAI's pipeline with continuous batching: plain decoding, its prompt lookup, a draft
model, an EAGLE-3 head.

Settings: `model` (a folder of OpenVINO's files), `dtype`, `weights` (None, int8 or int4),
`threads`, `slots`, and `speculation`: None, or `tokens` (of a draft) with `ngram` (longest n-gram
that is looked up) or `draft` (a folder).
"""

from __future__ import annotations

from typing import Any

from peer_protocol import Decode, Request, Settings, Tokens, serve

PRECISION = {"float32": "f32", "float16": "f16", "bfloat16": "bf16"}


def start(settings: Settings) -> tuple[Decode, dict[str, Any]]:
    """Load the model."""
    import numpy as np
    import openvino
    import openvino_genai as genai

    speculation = settings["speculation"] or {}
    properties = properties_of(settings)
    extra: dict[str, Any] = {}
    if "ngram" in speculation:
        extra["prompt_lookup"] = True
    if "draft" in speculation:
        extra["draft_model"] = genai.draft_model(speculation["draft"], "CPU", **properties)
    scheduler = genai.SchedulerConfig()
    scheduler.max_num_seqs = settings["slots"]
    scheduler.enable_prefix_caching = False
    folder = settings["model"]
    model = genai.ContinuousBatchingPipeline(
        folder, genai.Tokenizer(folder), scheduler, "CPU", **properties, **extra
    )
    count = 0

    def decode(request: Request, found: list[Tokens]) -> None:
        nonlocal count
        asked = []
        for i, (ids, tokens) in enumerate(zip(request["prompts"], found, strict=True)):
            config = genai.GenerationConfig(**options_of(request, i, speculation))
            config.set_eos_token_id(min(request["stop_token_ids"], default=-1))
            prompt = openvino.Tensor(np.array([ids], dtype=np.int64))
            asked.append((model.add_request(count, prompt, config), tokens))
            count += 1
        while model.has_non_finished_requests():
            model.step()
            for handle, tokens in asked:
                while handle.can_read():
                    for output in handle.read().values():
                        tokens.add(*output.generated_ids)

    shown = ", ".join(f"{key} {value}" for key, value in properties.items())
    return decode, {
        "version": f"openvino-genai {genai.__version__.partition('-')[0]}",
        "notes": [f"openvino: continuous batching, without prefix cache; {shown}"],
    }


def properties_of(settings: Settings) -> dict[str, Any]:
    """How it computes. With whole weights the dtype alone rounds; with rounded ones its own
    defaults stay, which also round keys, values and what enters a product."""
    exact = (
        {}
        if settings["weights"]
        else {
            "KV_CACHE_PRECISION": PRECISION[settings["dtype"]],
            "DYNAMIC_QUANTIZATION_GROUP_SIZE": 0,
        }
    )
    return {
        "INFERENCE_PRECISION_HINT": PRECISION[settings["dtype"]],
        "INFERENCE_NUM_THREADS": settings["threads"],
        **exact,
    }


def options_of(request: Request, place: int, speculation: dict[str, Any]) -> dict[str, Any]:
    """Fields of its generation config for the prompt at a place of a group."""
    options: dict[str, Any] = {
        "max_new_tokens": request["max_tokens"],
        "stop_token_ids": set(request["stop_token_ids"]),
    }
    if request["temperature"] > 0:
        options |= {
            "do_sample": True,
            "temperature": request["temperature"],
            "top_p": request["top_p"],
            "rng_seed": request["seed"] + place,
        }
        if request["top_k"] > 0:
            options["top_k"] = request["top_k"]
    if speculation:
        options["num_assistant_tokens"] = speculation["tokens"]
    if "ngram" in speculation:
        options["max_ngram_size"] = speculation["ngram"]
    return options


if __name__ == "__main__":
    serve(start)
