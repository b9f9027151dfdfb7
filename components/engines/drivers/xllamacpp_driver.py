"""llama.cpp's server in this process, through xllamacpp: plain decoding, n-grams, a draft model, an
EAGLE-3 head.

Settings: `model` (a GGUF file with a vocabulary), `context` (positions of a request), `slots`,
`threads`, and `speculation`: None, or `tokens` (of a draft) with `ngram` (length of the n-gram that
is looked up) or `draft` (a GGUF file) and `eagle3` (whether it is a head).
"""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from peer_protocol import Decode, Request, Settings, Tokens, serve


def start(settings: Settings) -> tuple[Decode, dict[str, Any]]:
    """Load the model."""
    import xllamacpp

    server = xllamacpp.Server(params_of(xllamacpp, settings))
    address = f"{server.listening_address}/completion"

    def decode(request: Request, found: list[Tokens]) -> None:
        def ask(place: int) -> None:
            body = json.dumps(body_of(request, place)).encode()
            asked = urllib.request.Request(address, body, {"Content-Type": "application/json"})
            with urllib.request.urlopen(asked) as answer:
                read(answer, request, found[place])

        with ThreadPoolExecutor(len(found)) as pool:
            list(pool.map(ask, range(len(found))))

    decode.server = server  # type: ignore[attr-defined]  # which ends with its last reference
    features = xllamacpp.get_system_info().strip(" |")
    return decode, {
        "version": f"xllamacpp {xllamacpp.__version__}",
        "notes": [f"xllamacpp: llama.cpp's server, keys and values in float16; {features}"],
    }


def params_of(library: Any, settings: Settings) -> Any:
    """The server's parameters."""
    params = library.CommonParams()
    params.model.path, params.verbosity = settings["model"], 0
    params.n_parallel = settings["slots"]
    params.n_ctx = settings["slots"] * settings["context"]
    params.cache_prompt, params.cache_ram_mib, params.fit_params = False, 0, False
    threads = [params.cpuparams, params.cpuparams_batch]
    if speculation := settings["speculation"]:
        kinds, given = library.common_speculative_type, params.speculative
        if "ngram" in speculation:
            given.types = [kinds.COMMON_SPECULATIVE_TYPE_NGRAM_SIMPLE]
            given.ngram_simple.size_n = speculation["ngram"]
            given.ngram_simple.size_m = speculation["tokens"]
        else:
            eagle3 = speculation["eagle3"]
            given.types = [
                kinds.COMMON_SPECULATIVE_TYPE_DRAFT_EAGLE3
                if eagle3
                else kinds.COMMON_SPECULATIVE_TYPE_DRAFT_SIMPLE
            ]
            given.draft.mparams.path = speculation["draft"]
            given.draft.n_max = speculation["tokens"]
            threads += [given.draft.cpuparams, given.draft.cpuparams_batch]
    for one in threads:
        one.n_threads = settings["threads"]
    return params


def body_of(request: Request, place: int) -> dict[str, Any]:
    """What the server is asked for the prompt at a place of a group."""
    return {
        "prompt": request["prompts"][place],
        "n_predict": request["max_tokens"],
        "temperature": request["temperature"],
        "top_k": request["top_k"],
        "top_p": request["top_p"],
        "min_p": 0.0,
        "seed": request["seed"] + place,
        "stream": True,
        "return_tokens": True,
        "cache_prompt": False,
    }


def read(answer: Iterable[bytes], request: Request, tokens: Tokens) -> None:
    """Add the tokens of a streamed answer; the server leaves out the one that ends a text."""
    for line in answer:
        if not line.startswith(b"data: {"):
            continue
        part = json.loads(line[6:])
        tokens.add(*part.get("tokens", []))
        if part.get("stop_type") == "eos":
            tokens.add(min(request["stop_token_ids"], default=0))


if __name__ == "__main__":
    serve(start)
