"""From texts and conversations to tokens: on threads, and only where they can fit into the
context."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, TypeVar

from draftwell.serving.errors import DraftwellError
from draftwell.serving.server.http.errors import APIError, without_paths
from draftwell.serving.server.model.served_model import ServedModel

T = TypeVar("T")

ENCODERS = ThreadPoolExecutor(4, thread_name_prefix="encode")
LONG_ENCODERS = ThreadPoolExecutor(1, thread_name_prefix="encode-long")
LONG_TEXT = 32_768
"""Characters: longer texts, which take tens of milliseconds, have a thread of their own."""


async def on_thread(
    pool: ThreadPoolExecutor, work: Callable[..., T], *given: Any, **options: Any
) -> T:
    """What `work` returns, on a thread of a pool."""
    loop = asyncio.get_running_loop()
    return await loop.run_in_executor(pool, partial(work, *given, **options))


def encoders_for(characters: int) -> ThreadPoolExecutor:
    """Who encodes a text of that length: long ones hold up no short one."""
    return LONG_ENCODERS if characters > LONG_TEXT else ENCODERS


@dataclass(frozen=True)
class Prompt:
    """What to continue.

    Args:
        field: the request field that it comes from.
        echoed: its text if the answer is to begin with it.
        body: as the client sent it, for recording; None for token ids.
    """

    ids: list[int]
    field: str
    echoed: str = ""
    body: Mapping[str, Any] | None = None


class Prompts:
    """Makes the prompts of requests for one served model."""

    def __init__(self, served: ServedModel):
        self.served = served

    async def chat(
        self,
        messages: list[dict[str, Any]],
        options: Mapping[str, Any] | None = None,
        field: str = "messages",
        least: int = 0,
    ) -> Prompt:
        """A conversation as the prompt that the model's chat template makes of it.

        Args:
            options: as in `LoadedPair.encode_chat`.
            field: of the request, for errors.
            least: characters up to which it is encoded though it cannot fit.
        """
        try:
            pool = encoders_for(sum(len(message["content"]) for message in messages))
            ids = await on_thread(pool, self._encode_chat, messages, options or {}, field, least)
        except DraftwellError as error:
            param = "chat_template_kwargs" if error.code == "template_value_refused" else field
            raise APIError(400, without_paths(error), param=param) from error
        unlike = options or any(message.keys() != {"role", "content"} for message in messages)
        return Prompt(ids, field, body=None if unlike else {"messages": messages})

    async def completion(self, prompt: str | list[int], echo: bool) -> Prompt:
        """A text, or tokens, to go on from.

        Args:
            echo: the answer begins with it.
        """
        if isinstance(prompt, str):
            ids = await on_thread(encoders_for(len(prompt)), self.encode, prompt)
            return Prompt(ids, "prompt", prompt if echo else "", {"prompt": prompt})
        if len(prompt) >= self.served.max_context:
            raise self.too_long(f"{len(prompt)} in the prompt", "prompt")
        self.check_tokens(prompt, "prompt")
        return Prompt(
            prompt, "prompt", await on_thread(ENCODERS, self.served.decode, prompt) if echo else ""
        )

    async def prediction(self, text: str) -> tuple[int, ...]:
        """Tokens of a predicted answer, as far as they can be part of one."""
        ids = await on_thread(encoders_for(len(text)), self._encode_prediction, text)
        return tuple(ids[: self.served.max_context])

    def encode(self, prompt: str, **options: Any) -> list[int]:
        """Ids of a text that can fit into the context; options as in `LoadedPair.encode`."""
        self._check_length(len(prompt), "prompt")
        return self.served.encode(prompt, **options)

    def _encode_prediction(self, text: str) -> list[int]:
        return self.served.encode(text[: self._most_characters], special=False)

    def _encode_chat(
        self, messages: list[dict[str, Any]], options: Mapping[str, Any], field: str, least: int
    ) -> list[int]:
        calls = [call for message in messages for call in message.get("tool_calls", ())]
        further = sum(
            len(json.dumps(one))
            for one in (*calls, *options.get("tools", ()), options.get("values") or {})
        )
        # not all of it becomes tokens
        length = sum(len(message["content"]) for message in messages) + further // 2
        if length > least:
            self._check_length(length, field)
        return self.served.encode_chat(messages, **options)

    def check_tokens(self, tokens: Sequence[int], field: str) -> None:
        """Refuse ids that are not in the vocabulary."""
        if any(not 0 <= token < self.served.vocab_size for token in tokens):
            raise APIError(
                400, f"token ids must be from 0 to {self.served.vocab_size - 1}", param=field
            )

    def _check_length(self, characters: int, field: str) -> None:
        """Refuse a text that cannot fit, before tokenizing it: long texts take seconds."""
        if characters > self._most_characters:
            raise self.too_long(f"{characters} characters in the {field}", field)

    @cached_property
    def _most_characters(self) -> int:
        """Length of the longest text that can fit into the context: all of its tokens are the
        longest one."""
        return self.served.max_context * max(map(len, self.served.pair.tokenizer.get_vocab()))

    def too_long(self, wanted: str, field: str) -> APIError:
        """The error of a request that asks for more tokens than the context holds."""
        return APIError(
            400,
            f"this model's maximum context length is {self.served.max_context} tokens, and "
            "you asked for more "
            f"({wanted}): shorten the {field} or the completion",
            param=field,
            code="context_length_exceeded",
        )
