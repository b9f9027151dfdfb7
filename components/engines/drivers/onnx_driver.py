"""ONNX Runtime GenAI: plain decoding, one prompt after the other.

Settings: `model` (a folder of its model builder), `weights` (None, int8 or int4), `threads`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from peer_protocol import Decode, Request, Settings, Tokens, one_by_one, serve


def start(settings: Settings) -> tuple[Decode, dict[str, Any]]:
    """Load the model."""
    import json

    import onnxruntime_genai as genai

    config = genai.Config(settings["model"])
    threads = {"intra_op_num_threads": settings["threads"]}
    config.overlay(json.dumps({"model": {"decoder": {"session_options": threads}}}))
    model = genai.Model(config)

    def decode(ids: Sequence[int], request: Request, tokens: Tokens) -> None:
        params = genai.GeneratorParams(model)
        params.set_search_options(**options_of(len(ids), request))
        generator = genai.Generator(model, params)
        generator.append_tokens(list(ids))
        while len(tokens.ids) < request["max_tokens"]:
            generator.generate_next_token()
            tokens.add(int(generator.get_next_tokens()[0]))
            if tokens.ids[-1] in request["stop_token_ids"]:
                return

    computes = "float32" if settings["weights"] is None else f"{settings['weights']} weights"
    return one_by_one(decode), {
        "version": f"onnxruntime-genai {genai.__version__}",
        "notes": [f"onnxruntime: {computes}, on CPUs; one request after the other"],
    }


def options_of(prompt_tokens: int, request: Request) -> dict[str, Any]:
    """Its search options for a prompt of so many tokens."""
    options: dict[str, Any] = {
        "max_length": prompt_tokens + request["max_tokens"],
        "do_sample": request["temperature"] > 0,
    }
    if request["temperature"] > 0:
        drawn = {name: request[name] for name in ("temperature", "top_k", "top_p")}
        options |= {**drawn, "random_seed": request["seed"]}
    return options


if __name__ == "__main__":
    serve(start)
