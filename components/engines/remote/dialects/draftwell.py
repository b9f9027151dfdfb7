"""Our own server: vLLM's completions and metrics, with a request's speculation in its answer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from draftwell.components.engines.port import About, Acceptance
from draftwell.components.engines.remote.client import EngineClient
from draftwell.components.engines.remote.dialect import DialectName
from draftwell.components.engines.remote.dialects.vllm import NAMES, VllmDialect

OFFER = "/v1/speculation"


class DraftwellDialect(VllmDialect):
    """Our server (a `Dialect`)."""

    name: DialectName = "draftwell"
    switches_off = True
    # hits are counted when a request ends, and so are these: else shares of few requests are noise
    names = replace(
        NAMES,
        sums={
            **NAMES.sums,
            "prompt_tokens": ("vllm:request_prompt_tokens_sum", *NAMES.sums["prompt_tokens"]),
        },
    )

    def about(self, client: EngineClient) -> About:
        offer = client.find(OFFER) or {}
        note = f"decodes by {offer.get('default', 'a strategy')} as tuned"
        return About(version=f"draftwell {self.version(client)}", notes=(note,))

    def acceptance_of(self, extras: Mapping[str, Any]) -> Acceptance:
        said = extras.get("speculation") or {}
        return Acceptance(
            rounds=int(said.get("rounds") or 0),
            drafted=int(said.get("drafted") or 0),
            accepted=int(said.get("accepted") or 0),
            accepted_at=tuple(said.get("accepted_at") or ()),
        )
