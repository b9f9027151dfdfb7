"""vLLM's server: its completions with token ids, its metrics, and of each request how its drafts
fared where it was started with `--per-request-spec-decode-metrics`."""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from typing import Any

from draftwell.components.engines.port import About, Acceptance, Answer
from draftwell.components.engines.remote.client import EngineClient
from draftwell.components.engines.remote.counters import Counters
from draftwell.components.engines.remote.dialect import DialectName
from draftwell.components.engines.remote.dialects.collected import token_list
from draftwell.components.engines.remote.dialects.openai import (
    complete,
    completion_request,
    served_model,
    served_model_name,
)
from draftwell.components.engines.remote.metrics import Names, read_counters
from draftwell.serving.runtime.requests import Sampling

NAMES = Names(
    sums={
        "requests": ("vllm:request_success_total",),
        "prompt_tokens": ("vllm:prompt_tokens_total",),
        "cached_prompt_tokens": ("vllm:prompt_tokens_cached_total", "vllm:prefix_cache_hits_total"),
        "new_tokens": ("vllm:generation_tokens_total",),
        "rounds": ("vllm:spec_decode_num_drafts_total",),
        "drafted": ("vllm:spec_decode_num_draft_tokens_total",),
        "accepted": ("vllm:spec_decode_num_accepted_tokens_total",),
        "running": ("vllm:num_requests_running",),
        "waiting": ("vllm:num_requests_waiting",),
        "decode_seconds": ("vllm:request_time_per_output_token_seconds_sum",),
        "decode_steps": ("vllm:request_time_per_output_token_seconds_count",),
    },
    accepted_at="vllm:spec_decode_num_accepted_tokens_per_pos_total",
)


class VllmDialect:
    """vLLM's server (a `Dialect`). No request of it can switch speculation off."""

    name: DialectName = "vllm"
    switches_off = False
    names = NAMES

    def about(self, client: EngineClient) -> About:
        served_model(client)
        return About(version=f"vllm {self.version(client)}")

    def version(self, client: EngineClient) -> str:
        """Of the server."""
        return str((client.find("/version") or {}).get("version", "unknown"))

    def tokens_of(self, client: EngineClient, text: str) -> list[int] | None:
        body = {"model": served_model_name(client), "prompt": text, "add_special_tokens": False}
        found = client.try_to_ask("/tokenize", body)
        return None if found is None else token_list(found.get("tokens"))

    def decode_one(
        self,
        client: EngineClient,
        ids: Sequence[int],
        sampling: Sampling,
        *,
        speculate: bool = True,
    ) -> Answer:
        # the salt keeps prompts that were read before from being faster; the rest undoes what the
        # model's generation_config.json would set
        body = completion_request(
            client,
            ids,
            sampling,
            cache_salt=uuid.uuid4().hex,
            repetition_penalty=1.0,
            min_p=sampling.min_p,
        )
        if not speculate:
            body["speculation"] = {"enabled": False}  # of our server; vLLM is never asked
        found = complete(client, body, sampling)
        found.acceptance = self.acceptance_of(found.extras)
        return found.answer(client, sampling)

    def acceptance_of(self, extras: Mapping[str, Any]) -> Acceptance:
        """How a request's drafts fared, by what its answer has besides the text."""
        said = (extras.get("metrics") or {}).get("speculative_decoding")
        if said is None:
            return Acceptance()
        return Acceptance.of_histogram(said["acceptance_histogram"], int(said["num_draft_tokens"]))

    def counters(self, client: EngineClient) -> Counters:
        text = client.find_text("/metrics") or ""
        return read_counters(
            text, self.names, version=self.version(client), model=served_model_name(client)
        )
