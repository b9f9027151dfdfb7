"""U+FFFD is what decoders write for bytes that are no character, and a character like any other:
an answer that is made of it arrives whole, beside others that are spread over tokens."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import cache
from typing import Any

import httpx
import pytest
from hypothesis import assume, given, strategies as st

from draftwell.serving.runtime.strategies import build_strategy
from draftwell.serving.server.scheduling.detokenize import Detokenizer, StopStrings
from tests.support.server.served_pair import (
    TunedModel,
    served_pair,
    serving,
    spaced_tokenizer,
    tiny_pair,
    tiny_tokenizer,
)

CHAT = "/v1/chat/completions"
WHOLE = [
    "ok \ufffd",
    "\ufffd\ufffd",
    "\ufffd",
    "\ufffda",
    "\U0001f469\u200d\U0001f469\u200d\U0001f467\ufffd",
    "e\u0301\ufffd\u0301",
    "\ufffd\U0001f600\ufffd",
]
TOKENIZERS = {"byte-level": cache(tiny_tokenizer), "byte fallback": cache(spaced_tokenizer)}


@pytest.fixture(scope="module", params=TOKENIZERS)
def both(request: pytest.FixtureRequest) -> Iterator[httpx.Client]:
    """Clients of a server whose characters are spelt in letters that stand for bytes, and of one
    that spells them byte by byte."""
    served = (
        served_pair("vanilla_sd", slots=3, num_speculative_tokens=4)
        if request.param == "byte-level"
        else TunedModel("tiny", tiny_pair(3, spaced_tokenizer()), build_strategy("vanilla_sd"), 3)
    )
    with serving(served) as (url, _), httpx.Client(base_url=url, timeout=100) as client:
        yield client


def answer(http: httpx.Client, **asked: Any) -> dict[str, Any]:
    body = {"model": "tiny", "prompt": "Say it:", "max_tokens": 90, "temperature": 0}
    response = http.post("/v1/completions", json=body | asked)
    assert response.status_code == 200, response.text
    choice: dict[str, Any] = response.json()["choices"][0]
    assert choice["finish_reason"] == "stop"
    return choice


@pytest.mark.parametrize("text", WHOLE, ids=ascii)
def test_a_choice_is_written_as_it_is(both: httpx.Client, text: str) -> None:
    asked: dict[str, Any] = {"structured_outputs": {"choice": [text]}}
    assert answer(both, **asked)["text"] == text
    assert answer(both, **asked, speculation={"enabled": False})["text"] == text
    body = {"model": "tiny", "messages": [{"role": "user", "content": text}], "stream": True}
    streamed = both.post(CHAT, json=body | asked | {"max_tokens": 90}).text.splitlines()
    chunks = [json.loads(line[6:]) for line in streamed if line.startswith("data: {")]
    assert "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks) == text


def test_other_formats(both: httpx.Client) -> None:
    assert answer(both, guided_regex="(a\ufffd){2}")["text"] == "a\ufffd" * 2
    schema = {"properties": {"\ufffd": {"enum": ["\ufffdx"]}}, "required": ["\ufffd"]}
    text = answer(both, guided_json={"type": "object", **schema})["text"]
    assert json.loads(text) == {"\ufffd": "\ufffdx"}


def test_stop_strings_and_an_echo(both: httpx.Client) -> None:
    asked: dict[str, Any] = {"structured_outputs": {"choice": ["ab\ufffdc"]}}
    assert answer(both, **asked, stop=["b\ufffd"])["text"] == "a"
    assert answer(both, **asked, stop=["\ufffd"])["text"] == "ab"
    assert (
        answer(both, **asked, prompt="\ufffd:\ufffd", echo=True)["text"] == "\ufffd:\ufffdab\ufffdc"
    )


@pytest.mark.parametrize("name", TOKENIZERS)
@given(
    prompt=st.text("a \ufffd\u20ac", max_size=3),
    text=st.text("ab \ufffde\u0301\u20ac\U0001f600\u200d", max_size=12),
)
def test_pieces_make_up_every_text(name: str, prompt: str, text: str) -> None:
    tokenizer, prompt = TOKENIZERS[name](), f"b{prompt}"
    ids, before = (tokenizer(one)["input_ids"] for one in (prompt + text, prompt))
    assume(ids[: len(before)] == before)
    pieces = Detokenizer(decoder(name), before, tokenizer.convert_ids_to_tokens)
    assert "".join(map(pieces.push, ids[len(before) :])) == text
    assert pieces.flush() == ""


def decoder(name: str) -> Any:
    """Without the token that begins a text."""
    return lambda ids: TOKENIZERS[name]().decode(ids, skip_special_tokens=True)


def test_bytes_that_are_no_character_are_still_waited_for_and_left_out_at_the_end() -> None:
    tokenizer = tiny_tokenizer()
    spelt = tokenizer.convert_tokens_to_ids([*"ï¿½", *"ï¿"])
    pieces = Detokenizer(tokenizer.decode, (), tokenizer.convert_ids_to_tokens)
    assert [*map(pieces.push, spelt), pieces.flush()] == ["", "", "\ufffd", "", "", ""]


def test_log_probs_have_the_bytes_of_the_character_where_a_token_is_one() -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.add_tokens(["\ufffd"])
    served = TunedModel("tiny", tiny_pair(1, tokenizer), build_strategy("vanilla_sd"), 1)
    whole, part = tokenizer.convert_tokens_to_ids(["\ufffd", "ï"])
    assert served.token_text(whole) == served.token_text(part) == "\ufffd"
    assert served.token_bytes(whole) == [0xEF, 0xBF, 0xBD]
    assert served.token_bytes(part) is None
    with pytest.MonkeyPatch.context() as patch:  # no name is looked up where the text says it all
        patch.setattr(served, "token_name", None)
        assert served.token_bytes(tokenizer.convert_tokens_to_ids("a")) == [ord("a")]
    assert StopStrings(["\ufffd"]).push("a\ufffd") == "a"
