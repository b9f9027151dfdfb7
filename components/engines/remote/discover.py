"""Which API a server speaks, found out by asking it."""

from __future__ import annotations

from draftwell.components.engines.remote.client import EngineClient
from draftwell.components.engines.remote.dialect import Dialect
from draftwell.components.engines.remote.dialects.draftwell import OFFER, DraftwellDialect
from draftwell.components.engines.remote.dialects.llama_cpp import PROPS, LlamaCppDialect
from draftwell.components.engines.remote.dialects.openai import OpenAIDialect, served_models
from draftwell.components.engines.remote.dialects.sglang import SERVER_INFO, SGLangDialect
from draftwell.components.engines.remote.dialects.vllm import VllmDialect
from draftwell.serving.errors import DraftwellError


def find_dialect(client: EngineClient) -> Dialect:
    """The dialect of a server.

    Raises:
        DraftwellError: none is known (`not_an_engine`), or what the client raises.
    """
    props = client.find(PROPS) or {}
    if "default_generation_settings" in props:
        return LlamaCppDialect(props)
    for path in SERVER_INFO:
        info = client.find(path) or {}
        if "model_path" in info and "tp_size" in info:
            return SGLangDialect(info)
    if "tuned" in (client.find(OFFER) or {}):
        return DraftwellDialect()
    if "version" in (client.find("/version") or {}):
        return VllmDialect()
    if served_models(client):
        return OpenAIDialect()
    raise DraftwellError(
        f"{client.url} answers, but not as vLLM, SGLang, llama.cpp's server, ours or OpenAI's API: "
        "check the address, without /v1",
        code="not_an_engine",
    )
