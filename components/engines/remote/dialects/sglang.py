"""SGLang's server: its native `/generate`, which takes and returns token ids and says how each
request's drafts fared, and its metrics where it was started with `--enable-metrics`."""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from typing import Any

from draftwell.components.engines.port import About, Acceptance, Answer, TokenProb
from draftwell.components.engines.remote.client import EngineClient, Json
from draftwell.components.engines.remote.counters import Counters
from draftwell.components.engines.remote.dialect import DialectName
from draftwell.components.engines.remote.dialects.collected import (
    Collected,
    token_list,
)
from draftwell.components.engines.remote.metrics import Names, read_counters
from draftwell.serving.runtime.requests import Sampling

SERVER_INFO = ("/server_info", "/get_server_info")
"""The path, and its older name."""
HISTOGRAMS = ("spec_correct_drafts_histogram", "spec_accept_histogram")
ACCEPTED = ("spec_num_correct_drafts", "spec_accepted_drafts", "spec_accept_token_num")
DRAFTED = ("spec_num_proposed_drafts", "spec_proposed_drafts", "spec_draft_token_num")
"""Fields of `meta_info`, the newest name first."""
NAMES = Names(
    sums={
        "requests": ("sglang:num_requests_total",),
        "prompt_tokens": ("sglang:prompt_tokens_total",),
        "cached_prompt_tokens": ("sglang:cached_tokens_total",),
        "new_tokens": ("sglang:generation_tokens_total",),
        "rounds": ("sglang:spec_verify_calls_total",),
        "running": ("sglang:num_running_reqs",),
        "waiting": ("sglang:num_queue_reqs",),
        "decode_seconds": ("sglang:inter_token_latency_seconds_sum",),
        "decode_steps": ("sglang:inter_token_latency_seconds_count",),
    },
)


class SGLangDialect:
    """SGLang's server (a `Dialect`). No request of it can switch speculation off.

    Args:
        info: what it answers to `GET /server_info`.
    """

    name: DialectName = "sglang"
    switches_off = False

    def __init__(self, info: Mapping[str, Any]):
        self.version = f"sglang {info.get('version', 'unknown')}"
        self.draft_tokens = int(info.get("speculative_num_draft_tokens") or 0)
        self.adaptive = bool(info.get("speculative_adaptive"))

    def about(self, client: EngineClient) -> About:
        counted = client.find_text("/metrics") is not None
        note = "started without --enable-metrics: it has no counters"
        return About(version=self.version, notes=() if counted else (note,))

    def tokens_of(self, client: EngineClient, text: str) -> list[int] | None:
        found = client.try_to_ask("/tokenize", {"prompt": text, "add_special_tokens": False})
        return None if found is None else token_list(found.get("tokens"))

    def decode_one(
        self,
        client: EngineClient,
        ids: Sequence[int],
        sampling: Sampling,
        *,
        speculate: bool = True,
    ) -> Answer:
        params: Json = {
            "max_new_tokens": sampling.max_tokens,
            "temperature": sampling.temperature,
            "stop_token_ids": sorted(sampling.stop_token_ids),
            "repetition_penalty": 1.0,
            "top_p": 1.0 if sampling.greedy else sampling.top_p,
            "top_k": -1 if sampling.greedy or not sampling.top_k else sampling.top_k,
            "min_p": 0.0 if sampling.greedy else sampling.min_p,
        }
        if not sampling.greedy:
            params["sampling_seed"] = sampling.seed
        body: Json = {
            "input_ids": list(ids),
            "sampling_params": params,
            "stream": True,
            # else a prompt that was read before is faster
            "extra_key": uuid.uuid4().hex,
        }
        if sampling.logprobs is not None:
            body |= {"return_logprob": True, "top_logprobs_num": max(1, sampling.logprobs)}
        found = Collected()
        for at, event in client.events("/generate", body):
            read(event, at, found, sampling)
        return found.answer(client, sampling)

    def counters(self, client: EngineClient) -> Counters:
        """SGLang counts verifications and tokens, and shows acceptance as a mean of the last
        moments alone. Accepted tokens follow from the counts: each request's first token comes
        from its prompt, and each verification adds one beyond the accepted ones."""
        found = read_counters(client.find_text("/metrics") or "", NAMES, version=self.version)
        if found.rounds is None or found.new_tokens is None or found.requests is None:
            return found
        drafted = found.rounds * (self.draft_tokens - 1)
        return found.model_copy(
            update={
                "accepted": max(0, found.new_tokens - found.requests - found.rounds),
                "drafted": None if self.adaptive or not self.draft_tokens else drafted,
            }
        )


def read(event: Mapping[str, Any], at: float, found: Collected, sampling: Sampling) -> None:
    """Add what an event says: its ids are all so far, or with `--incremental-streaming-output`
    those that are new. Its count may run ahead of the ids."""
    ids, meta = event.get("output_ids") or [], event.get("meta_info") or {}
    known = len(found.tokens)
    total = int(meta.get("completion_tokens") or len(ids))
    whole = len(ids) == total or (len(ids) + known != total and ids[:known] == found.tokens)
    if whole:
        found.tokens[:] = ids[:known]
    found.add(at, ids[known:] if whole else ids)
    if sampling.logprobs is not None:
        rows = meta.get("output_top_logprobs") or []
        new = rows[len(found.top) :] if len(rows) == len(found.tokens) else rows
        found.top += [top_of(row, sampling.logprobs) for row in new if row]
    if reason := meta.get("finish_reason"):
        found.finish = str(reason.get("type") if isinstance(reason, Mapping) else reason)
        found.claimed = total
        found.acceptance = acceptance_of(meta)


def top_of(row: Sequence[Sequence[Any]], count: int) -> list[TokenProb]:
    """The likeliest tokens at a position, the likeliest first."""
    top = [(int(one[1]), float(one[0])) for one in row]
    return sorted(top, key=lambda pair: -pair[1])[: max(1, count)]


def acceptance_of(meta: Mapping[str, Any]) -> Acceptance:
    """What SGLang says of a request's drafts."""
    drafted = int(first_of(meta, DRAFTED) or 0)
    histogram = first_of(meta, HISTOGRAMS)
    if histogram:
        return Acceptance.of_histogram(histogram, drafted)
    return Acceptance(
        rounds=int(meta.get("spec_verify_ct") or 0),
        drafted=drafted,
        accepted=int(first_of(meta, ACCEPTED) or 0),
    )


def first_of(meta: Mapping[str, Any], names: Sequence[str]) -> Any:
    """The value of the first name that is there."""
    return next((meta[name] for name in names if name in meta), None)
