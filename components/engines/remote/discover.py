"""Which API a server speaks, found out by asking it."""

from __future__ import annotations

from draftwell.components.engines.remote.client import EngineClient
from draftwell.components.engines.remote.dialect import Dialect
from draftwell.components.engines.remote.dialects.openai import OpenAIDialect, served_models
from draftwell.components.engines.remote.dialects.vllm import VllmDialect
from draftwell.serving.errors import DraftwellError


def find_dialect(client: EngineClient) -> Dialect:
    """The dialect of a server.

    Raises:
        DraftwellError: none is known (`not_an_engine`), or what the client raises.
    """
    if "version" in (client.find("/version") or {}):
        return VllmDialect()
    if served_models(client):
        return OpenAIDialect()
    raise DraftwellError(
        f"{client.url} answers, but not as vLLM, SGLang, llama.cpp's server, ours or OpenAI's API: "
        "check the address, without /v1",
        code="not_an_engine",
    )
