"""llama.cpp's server: its own completions, which take and return token ids, and its metrics where
it was started with `--metrics`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from draftwell.components.engines.port import About, Acceptance, Answer, TokenProb
from draftwell.components.engines.remote.client import EngineClient, Json
from draftwell.components.engines.remote.counters import Counters
from draftwell.components.engines.remote.dialect import DialectName
from draftwell.components.engines.remote.dialects.collected import Collected, token_list
from draftwell.components.engines.remote.metrics import Names, read_counters
from draftwell.serving.runtime.requests import Sampling

PROPS, COMPLETION = "/props", "/completion"
LONGEST_DRAFT = "speculative.n_max"
"""A field of requests in builds that let them name it; 0 drafts nothing. Newer ones ignore it, and
leave it out of their properties."""
LARGEST_SEED = 2**32 - 1
ENDS = {"eos": "stop", "word": "stop", "limit": "length"}
PLAIN_SAMPLERS: Json = {
    "repeat_penalty": 1.0,
    "dry_multiplier": 0.0,
    "xtc_probability": 0.0,
    "typical_p": 1.0,
    "mirostat": 0,
}
"""What the server's own defaults could set otherwise."""
NAMES = Names(
    sums={
        "prompt_tokens": ("llamacpp:prompt_tokens_total",),
        "cached_prompt_tokens": ("llamacpp:prompt_tokens_cached_total",),
        "new_tokens": ("llamacpp:tokens_predicted_total",),
        "rounds": ("llamacpp:spec_decode_num_drafts_total",),
        "drafted": ("llamacpp:spec_decode_num_draft_tokens_total",),
        "accepted": ("llamacpp:spec_decode_num_accepted_tokens_total",),
        "running": ("llamacpp:requests_processing",),
        "waiting": ("llamacpp:requests_deferred",),
        "decode_seconds": ("llamacpp:tokens_predicted_seconds_total",),
        "decode_steps": ("llamacpp:tokens_predicted_total",),
    },
    accepted_at="llamacpp:spec_decode_num_accepted_tokens_per_pos_total",
)


class LlamaCppDialect:
    """llama.cpp's server (a `Dialect`).

    Args:
        props: what it answers to `GET /props`.
    """

    name: DialectName = "llama.cpp"

    def __init__(self, props: Mapping[str, Any]):
        self.build = str(props.get("build_info", "unknown"))
        self.metrics = bool(props.get("endpoint_metrics", True))
        settings = props.get("default_generation_settings") or {}
        self.switches_off = LONGEST_DRAFT in (settings.get("params") or {})

    def about(self, client: EngineClient) -> About:
        counted = self.metrics and client.find_text("/metrics") is not None
        note = "started without --metrics: acceptance by position is not known"
        return About(version=f"llama.cpp {self.build}", notes=() if counted else (note,))

    def tokens_of(self, client: EngineClient, text: str) -> list[int] | None:
        found = client.try_to_ask("/tokenize", {"content": text, "add_special": False})
        return None if found is None else token_list(found.get("tokens"))

    def decode_one(
        self,
        client: EngineClient,
        ids: Sequence[int],
        sampling: Sampling,
        *,
        speculate: bool = True,
    ) -> Answer:
        body: Json = {
            "prompt": list(ids),
            "n_predict": sampling.max_tokens,
            "temperature": sampling.temperature,
            "stream": True,
            "return_tokens": True,
            "cache_prompt": False,  # else a prompt that was read before is faster
            **PLAIN_SAMPLERS,
        }
        if not sampling.greedy:
            body |= {name: getattr(sampling, name) for name in ("top_p", "top_k", "min_p")}
            body["seed"] = sampling.seed % LARGEST_SEED
        if sampling.logprobs is not None:
            body["n_probs"] = max(1, sampling.logprobs)
        if not speculate:
            body[LONGEST_DRAFT] = 0
        found = Collected()
        for at, event in client.events(COMPLETION, body):
            read(event, at, found, sampling)
        return found.answer(client, sampling)

    def counters(self, client: EngineClient) -> Counters:
        text = client.find_text("/metrics") or ""
        found = read_counters(text, NAMES, version=f"llama.cpp {self.build}")
        # its counter of prompt tokens leaves out those of the cache
        read, cached = found.prompt_tokens, found.cached_prompt_tokens or 0
        whole = None if read is None else read + cached
        return found.model_copy(update={"prompt_tokens": whole})


def read(event: Mapping[str, Any], at: float, found: Collected, sampling: Sampling) -> None:
    """Add what an event says; a token that ends the text here, but not for the server, ends the
    answer."""
    if found.finish is None:
        tokens = event.get("tokens") or []
        found.add(at, tokens)
        if sampling.logprobs is not None:
            rated = event.get("completion_probabilities") or []
            rows = [top_of(row, sampling.logprobs) for row in rated]
            # the server rates no token that it accepted from a draft
            found.top += rows + [[] for _ in range(len(tokens) - len(rows))]
        ends = [i for i, token in enumerate(found.tokens) if token in sampling.stop_token_ids]
        if ends:
            found.cut(ends[0] + 1)
    if event.get("stop"):
        if found.finish is None:
            found.finish = ENDS.get(str(event.get("stop_type")))
            found.claimed = event.get("tokens_predicted")
        timings = event.get("timings") or {}
        found.acceptance = Acceptance(
            drafted=int(timings.get("draft_n") or 0),
            accepted=int(timings.get("draft_n_accepted") or 0),
        )


def top_of(row: Mapping[str, Any], count: int) -> list[TokenProb]:
    """The likeliest tokens at a position, the likeliest first."""
    top = [(int(one["id"]), float(one["logprob"])) for one in row["top_logprobs"]]
    return sorted(top, key=lambda pair: -pair[1])[: max(1, count)]
