"""Our own server: vLLM's completions and metrics, with a request's speculation in its answer."""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from typing import Any

from draftwell.components.engines.port import About, Acceptance, Answer
from draftwell.components.engines.remote.client import EngineClient
from draftwell.components.engines.remote.dialect import DialectName
from draftwell.components.engines.remote.dialects.openai import complete, completion_request
from draftwell.components.engines.remote.dialects.vllm import VllmDialect
from draftwell.serving.runtime.requests import Sampling

OFFER = "/v1/speculation"


class DraftwellDialect(VllmDialect):
    """Our server (a `Dialect`)."""

    name: DialectName = "draftwell"
    switches_off = True

    def about(self, client: EngineClient) -> About:
        offer = client.find(OFFER) or {}
        note = f"decodes by {offer.get('default', 'a strategy')} as tuned"
        return About(version=f"draftwell {self.version(client)}", notes=(note,))

    def decode_one(
        self,
        client: EngineClient,
        ids: Sequence[int],
        sampling: Sampling,
        *,
        speculate: bool = True,
    ) -> Answer:
        body = completion_request(
            client,
            ids,
            sampling,
            cache_salt=uuid.uuid4().hex,
            repetition_penalty=1.0,
            min_p=sampling.min_p,
        )
        if not speculate:
            body["speculation"] = {"enabled": False}
        found = complete(client, body, sampling)
        found.acceptance = acceptance_of(found.extras.get("speculation") or {})
        return found.answer(client, sampling)


def acceptance_of(said: Mapping[str, Any]) -> Acceptance:
    """What our server says of a request's drafts."""
    return Acceptance(
        rounds=int(said.get("rounds") or 0),
        drafted=int(said.get("drafted") or 0),
        accepted=int(said.get("accepted") or 0),
        accepted_at=tuple(said.get("accepted_at") or ()),
    )
