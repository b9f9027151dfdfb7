"""Which API a server speaks, found out by asking it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from draftwell.components.engines.remote.client import EngineClient
from draftwell.components.engines.remote.dialect import Dialect
from draftwell.components.engines.remote.dialects.draftwell import OFFER, DraftwellDialect
from draftwell.components.engines.remote.dialects.llama_cpp import PROPS, LlamaCppDialect
from draftwell.components.engines.remote.dialects.openai import OpenAIDialect, served_models
from draftwell.components.engines.remote.dialects.sglang import SERVER_INFO, SGLangDialect
from draftwell.components.engines.remote.dialects.vllm import VllmDialect
from draftwell.serving.errors import DraftwellError
from draftwell.serving.plugins import Extended

GROUP = "draftwell.engines"
"""Of the entry points by which other distributions add engines."""
Recognise = Callable[[EngineClient], Dialect | None]
"""The dialect of a server of its kind; None for any other."""


def _problem(name: str, found: Any) -> str:
    return "" if callable(found) else "it is no function that takes a client"


PLUGINS = Extended[Recognise]({}, GROUP, _problem)
"""How engines of installed plug-ins are recognised (docs/plugins.md)."""


def find_dialect(client: EngineClient) -> Dialect:
    """The dialect of a server; those of plug-ins are asked first.

    Raises:
        DraftwellError: none is known (`not_an_engine`), or what the client raises.
    """
    for recognise in PLUGINS.values():
        if (dialect := recognise(client)) is not None:
            return dialect
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
