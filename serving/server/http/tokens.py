"""`/tokenize`, `/detokenize` and `/tokenizer_info`, in vLLM's shape: what a text or a conversation
is in tokens, the other way round, and what a client needs to do so itself."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Annotated, Any

from fastapi import APIRouter, Request
from pydantic import BaseModel, Discriminator, Field, Tag

from draftwell.serving.server.http.bodies import JsonRoute
from draftwell.serving.server.http.conversation import Deadline
from draftwell.serving.server.http.prompts import ENCODERS, encoders_for, on_thread
from draftwell.serving.server.http.requests import Messages, Name, OpenAIFields, Text, Tokens, Tools
from draftwell.serving.server.http.service import Service

PLACE = re.compile("_file$|^name_or_path$|local|^token$")
"""Names of a tokenizer's settings that tell of this machine."""


class TokenizeText(OpenAIFields):
    """Body of `POST /tokenize` for a text."""

    model: Name | None = None
    prompt: Text
    add_special_tokens: bool = Field(
        True, description="with the special tokens that the tokenizer puts around a text"
    )
    return_token_strs: bool | None = Field(
        None, description="also return each token's name in the vocabulary"
    )


class TokenizeMessages(Messages):
    """Body of `POST /tokenize` for a conversation."""

    model: Name | None = None
    return_token_strs: bool | None = Field(
        None, description="also return each token's name in the vocabulary"
    )

    tools: Tools | None = Field(
        None,
        description="functions that the answer may call, which the template writes into the prompt",
    )

    OFF = {"add_special_tokens": [False], "chat_template": []}  # declared by the base class  # noqa: RUF012

    @property
    def template_options(self) -> dict[str, Any]:
        tools = [tool.function.plain() for tool in self.tools or ()]
        return super().template_options | ({"tools": tools} if tools else {})


class DetokenizeRequest(OpenAIFields):
    """Body of `POST /detokenize`."""

    model: Name | None = None
    tokens: Tokens


class TokenizeAnswer(BaseModel):
    """Tokens of a text or a conversation."""

    count: int
    max_model_len: int = Field(description="most tokens of prompt and answer together")
    tokens: list[int]
    token_strs: list[str] | None = None


class DetokenizeAnswer(BaseModel):
    """Text of tokens, special ones included."""

    prompt: str


def kind_of(body: Any) -> str:
    """Which body it is; a tag has a bracket, so that `field_path` leaves it out."""
    return "[messages]" if isinstance(body, dict) and "messages" in body else "[text]"


TokenizeRequest = Annotated[
    Annotated[TokenizeText, Tag("[text]")] | Annotated[TokenizeMessages, Tag("[messages]")],
    Discriminator(kind_of),
]


def tokens_router(current: Callable[[], Service]) -> APIRouter:
    """`POST /tokenize`, `POST /detokenize` and `GET /tokenizer_info`.

    Args:
        current: gives the service that answers now.
    """
    router = APIRouter(route_class=JsonRoute)

    @router.post("/tokenize", response_model_exclude_none=True)
    async def tokenize(body: TokenizeRequest, request: Request) -> TokenizeAnswer:
        """Tokens of a text, or of the prompt that the chat template makes of a conversation."""
        service = current()
        service.check_model(body.model)
        async with Deadline.of(None, request.app.state.request_timeout).enforced():
            if isinstance(body, TokenizeMessages):
                messages = [message.plain() for message in body.messages]
                ids = (await service.prompts.chat(messages, body.template_options)).ids
            else:
                ids = await on_thread(
                    encoders_for(len(body.prompt)),
                    service.prompts.encode,
                    body.prompt,
                    special=body.add_special_tokens,
                )
            spell = service.served.pair.tokenizer.convert_ids_to_tokens
            names = await on_thread(ENCODERS, spell, ids) if body.return_token_strs else None
        return TokenizeAnswer(
            count=len(ids), max_model_len=service.served.max_context, tokens=ids, token_strs=names
        )

    @router.post("/detokenize")
    async def detokenize(body: DetokenizeRequest, request: Request) -> DetokenizeAnswer:
        """Text of tokens."""
        service = current()
        service.check_model(body.model)
        service.prompts.check_tokens(body.tokens, "tokens")
        decode = service.served.pair.tokenizer.decode
        async with Deadline.of(None, request.app.state.request_timeout).enforced():
            return DetokenizeAnswer(prompt=await on_thread(ENCODERS, decode, body.tokens))

    @router.get("/tokenizer_info")
    async def tokenizer_info() -> dict[str, Any]:
        """What `tokenizer_config.json` says, with class, special tokens and chat template of the
        tokenizer; no places of this machine."""
        served = current().served
        tokenizer = served.pair.tokenizer
        special = tokenizer.special_tokens_map
        own = {key: one for key, one in tokenizer.init_kwargs.items() if not PLACE.search(key)}
        return {
            **json.loads(json.dumps(own, default=str)),
            "tokenizer_class": type(tokenizer).__name__,
            **{name: special.get(name) for name in ("bos_token", "eos_token", "unk_token")},
            **special,
            "model_max_length": served.max_context,
            "clean_up_tokenization_spaces": bool(tokenizer.clean_up_tokenization_spaces),
            "chat_template": tokenizer.chat_template,
        }

    return router
