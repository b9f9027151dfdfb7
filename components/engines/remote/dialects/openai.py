"""OpenAI's completions API with token ids, as vLLM extended it; and servers that speak nothing
more: they have no metrics, and mostly no token ids."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from draftwell.components.engines.port import About, Answer, TokenProb
from draftwell.components.engines.remote.client import EngineClient, Json
from draftwell.components.engines.remote.counters import Counters
from draftwell.components.engines.remote.dialect import DialectName
from draftwell.components.engines.remote.dialects.collected import Collected
from draftwell.serving.errors import DraftwellError
from draftwell.serving.runtime.requests import Sampling

COMPLETIONS, MODELS = "/v1/completions", "/v1/models"
ID_PREFIX = "token_id:"
"""Of a token that is named by its id."""


class OpenAIDialect:
    """A server of which nothing more is known (a `Dialect`)."""

    name: DialectName = "openai"
    switches_off = False

    def about(self, client: EngineClient) -> About:
        served_model(client)
        return About(version="unknown", notes=("no metrics, so no acceptance",))

    def tokens_of(self, client: EngineClient, text: str) -> list[int] | None:
        return None

    def decode_one(
        self,
        client: EngineClient,
        ids: Sequence[int],
        sampling: Sampling,
        *,
        speculate: bool = True,
    ) -> Answer:
        return complete(client, completion_request(client, ids, sampling), sampling).answer(
            client, sampling
        )

    def counters(self, client: EngineClient) -> Counters:
        return Counters(at=time.time())


def served_models(client: EngineClient) -> list[Json]:
    """The models that a server lists; none where it has no such list."""
    found = (client.find(MODELS) or {}).get("data")
    models = found if isinstance(found, list) else []
    return [model for model in models if isinstance(model, dict) and "id" in model]


def served_model(client: EngineClient) -> Json:
    """The model that requests go to: that of the address, else the first that is no adapter.

    Raises:
        DraftwellError: it is not served (`engine_model`).
    """
    models, wanted = served_models(client), client.address.model
    names = [str(model["id"]) for model in models]
    if wanted is None and models:
        own = [model for model in models if not model.get("parent")]
        if len(own) == 1:
            return own[0]
    elif wanted is not None:
        for model in models:
            if model["id"] == wanted:
                return model
        if not models:
            return {"id": wanted}
    if not models:
        raise DraftwellError(
            f"{client.url} lists no model at {MODELS}: name one with --set engine_model=…",
            code="engine_model",
        )
    raise DraftwellError(
        f"{client.url} serves {', '.join(names[:8])}: name one of them with --set engine_model=…"
        + (f", not {wanted}" if wanted else ""),
        code="engine_model",
    )


def completion_request(
    client: EngineClient, ids: Sequence[int], sampling: Sampling, **more: Any
) -> Json:
    """A request for a streamed completion of token ids; what the model's own defaults would set is
    set to nothing."""
    body: Json = {
        "model": served_model_name(client),
        "prompt": list(ids),
        "max_tokens": sampling.max_tokens,
        "temperature": sampling.temperature,
        "stop_token_ids": sorted(sampling.stop_token_ids),
        "stream": True,
        "stream_options": {"include_usage": True},
        "return_token_ids": True,
        **more,
    }
    if not sampling.greedy:
        body |= {"top_p": sampling.top_p, "top_k": sampling.top_k, "seed": sampling.seed}
    if sampling.logprobs is not None:
        body |= {"logprobs": sampling.logprobs, "return_tokens_as_token_ids": True}
    return body


def served_model_name(client: EngineClient) -> str:
    """The name that requests give; asked for once."""
    if client.model_name is None:
        client.model_name = str(served_model(client)["id"])
    return client.model_name


def complete(client: EngineClient, body: Mapping[str, Any], sampling: Sampling) -> Collected:
    """What a request for a completion is answered with."""
    found = Collected()
    for at, event in client.events(COMPLETIONS, body):
        for choice in event.get("choices") or ():
            found.add(at, choice.get("token_ids") or ())
            if sampling.logprobs is not None and choice.get("logprobs"):
                found.top += top_of(choice["logprobs"], sampling.logprobs)
            found.finish = choice.get("finish_reason") or found.finish
        if usage := event.get("usage"):
            found.claimed = usage.get("completion_tokens")
        found.extras = {name: event[name] for name in EXTRAS if event.get(name)} or found.extras
    return found


EXTRAS = ("metrics", "speculation")
"""What an engine says besides, mostly in its last event."""


def top_of(logprobs: Mapping[str, Any], count: int) -> list[list[TokenProb]]:
    """The likeliest tokens at each position, the likeliest first, from tokens that are named by
    ids."""
    rows = logprobs.get("top_logprobs") or []
    ranked = [sorted(row.items(), key=lambda item: -item[1]) for row in rows if row]
    return [
        [(id_of(token), float(value)) for token, value in row[: max(1, count)]] for row in ranked
    ]


def id_of(token: str) -> int:
    """The id in `token_id:5`."""
    digits = token.removeprefix(ID_PREFIX)
    if token == digits or not digits.isdecimal():
        raise DraftwellError(
            "the engine names tokens by their texts, not by their ids: leave logprobs out",
            code="engine_no_logprobs",
        )
    return int(digits)
