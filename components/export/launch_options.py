"""A way to speculate as the options of the engine that is started with it, by the engine's name.

Ways are named as vLLM's speculative config names them; the other engines are told the same by
their own options, as `draftwell export` writes them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from draftwell.components.engines.port import LAUNCHED
from draftwell.components.export.settings import Written, for_llama_cpp, for_sglang
from draftwell.components.export.speculation import Speculation, Weights
from draftwell.serving.errors import DraftwellError

WRITERS: dict[str, Callable[[Speculation, Weights], Written]] = {
    "sglang": for_sglang,
    "llama.cpp": for_llama_cpp,
}


def launch_options(engine: str, speculation: Mapping[str, Any] | None) -> dict[str, Any]:
    """Options by name, without dashes; empty: plain decoding.

    Args:
        engine: one of `draftwell.components.engines.port.LAUNCHED`.
        speculation: vLLM's speculative config; None: plain decoding.
    Raises:
        DraftwellError: the engine has no such method, or no lengths by load (`engine_option`).

    >>> ngrams = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 3}
    >>> launch_options("vllm", ngrams) == {"speculative-config": ngrams}
    True
    >>> launch_options("llama.cpp", ngrams)["spec-ngram-simple-size-m"]
    4
    """
    if speculation is None:
        return {}
    if engine == "vllm":
        return {"speculative-config": dict(speculation)}
    method, model = str(speculation["method"]), speculation.get("model")
    if method not in LAUNCHED.get(engine, ()):
        raise DraftwellError(
            f"{engine} is not told here to speculate by {method}: leave it out",
            code="engine_option",
        )
    if "num_speculative_tokens_per_batch_size" in speculation:
        raise DraftwellError(
            f"{engine} has one draft length for all loads: measure one with --set levels=1",
            code="engine_option",
        )
    length = int(speculation["num_speculative_tokens"])
    if method == "ngram":
        way = Speculation("ngram", length, ngram=int(speculation["prompt_lookup_max"]))
    else:
        way = Speculation("draft" if method == "draft_model" else "eagle3", length)
    if engine == "llama.cpp" and method == "draft_model" and not str(model).endswith(".gguf"):
        raise DraftwellError(
            f"llama.cpp reads drafts as GGUF, not {model}: name the file with --set engine_draft=…",
            code="engine_option",
        )
    options, _, _ = WRITERS[engine](way, Weights("", draft=model, head=model))
    return options
