"""Encoding on several threads: nobody waits for a long text, and the ids are transformers'."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from hypothesis import given, strategies as st

from draftwell.serving.server.http.prompts import LONG_TEXT, Prompts
from tests.support.server.served_pair import roomy_pair, served_pair

SERVED = roomy_pair()


@given(text=st.text(max_size=60), special=st.booleans())
def test_ids_are_those_of_transformers(text: str, special: bool) -> None:
    pair = SERVED.pair
    wanted = pair.tokenizer(text, add_special_tokens=special)["input_ids"]
    assert pair.encode(text, special=special) == wanted


def test_a_conversations_ids_are_those_of_transformers() -> None:
    pair = served_pair("autoregressive").pair
    messages = [{"role": "user", "content": "hello there"}]
    wanted = pair.tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, return_dict=False
    )
    assert pair.encode_chat(messages) == list(wanted)


def test_threads_encode_at_once() -> None:
    pair = SERVED.pair
    texts = [f"hello {'there ' * (i % 9)}" for i in range(400)]
    wanted = [pair.encode(text) for text in texts]
    with ThreadPoolExecutor(6) as threads:
        assert list(threads.map(pair.encode, texts)) == wanted


def test_a_short_text_does_not_wait_for_a_long_one(monkeypatch: pytest.MonkeyPatch) -> None:
    let_go, begun = threading.Event(), threading.Event()
    encode = SERVED.pair.encode

    def slowly(text: str, **options: Any) -> list[int]:
        if len(text) > LONG_TEXT:
            begun.set()
            assert let_go.wait(60)
        return encode(text[:100], **options)

    monkeypatch.setattr(SERVED.pair, "encode", slowly)
    prompts = Prompts(SERVED)
    monkeypatch.setattr(Prompts, "_check_length", lambda *given: None)

    async def ask() -> None:
        # more long ones than there are threads for short ones
        long = [
            asyncio.create_task(prompts.completion("a" * (LONG_TEXT + 1), False)) for _ in range(6)
        ]
        await asyncio.to_thread(begun.wait, 60)
        try:
            found = await asyncio.wait_for(prompts.completion("hello", False), 30)
            assert found.ids == encode("hello")
            assert not any(task.done() for task in long)
        finally:
            let_go.set()
            await asyncio.gather(*long)

    asyncio.run(ask())
