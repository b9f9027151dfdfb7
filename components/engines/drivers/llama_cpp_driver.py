"""llama.cpp through llama-cpp-python: plain decoding, and its prompt lookup.

Settings: `model` (a GGUF file), `dtype`, `context` (positions), `threads`, and `speculation`: None,
or `lookup_tokens` and `lookup_ngram`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from peer_protocol import Decode, Request, Settings, Tokens, one_by_one, serve

KEYS_IN = {"float32": 0, "float16": 1, "bfloat16": 1}
"""dtype → ggml's number of the cache's format; bfloat16 keys are slow there, so llama.cpp's
default, float16, stays."""


def start(settings: Settings) -> tuple[Decode, dict[str, Any]]:
    """Load the model."""
    import llama_cpp
    from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

    drafter, notes = (
        None,
        [
            (
                f"llama.cpp: weights in {settings['dtype']} (GGUF written from the pair's), "
                "keys and values in "
            )
            + ("float32" if settings["dtype"] == "float32" else "float16")
        ],
    )
    if lookup := settings["speculation"]:
        drafter = LlamaPromptLookupDecoding(
            max_ngram_size=lookup["lookup_ngram"], num_pred_tokens=lookup["lookup_tokens"]
        )
        notes.append(
            f"llama.cpp prompt_lookup: {lookup['lookup_tokens']} tokens, n-grams of at "
            f"most {lookup['lookup_ngram']}"
        )
    keys = KEYS_IN[settings["dtype"]]
    # logits_all: with a drafter the library writes all rows, but makes room for one batch of them
    # only, unless it is set.
    model = llama_cpp.Llama(
        settings["model"],
        n_ctx=settings["context"],
        n_threads=settings["threads"],
        n_threads_batch=settings["threads"],
        draft_model=drafter,
        logits_all=drafter is not None,
        type_k=keys,
        type_v=keys,
        verbose=False,
    )

    def decode(ids: Sequence[int], request: Request, tokens: Tokens) -> None:
        model.reset()  # else it would reuse the prefix of the prompt before
        model.set_seed(request["seed"])
        drawn = {name: request[name] for name in ("top_k", "top_p")}
        for token in model.generate(ids, temp=request["temperature"], min_p=0.0, **drawn):
            tokens.add(int(token))
            if token in request["stop_token_ids"] or len(tokens.ids) == request["max_tokens"]:
                return

    return one_by_one(decode), {
        "version": f"llama-cpp-python {llama_cpp.__version__}",
        "notes": notes,
    }


if __name__ == "__main__":
    serve(start)
