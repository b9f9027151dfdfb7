"""Text behind a prompt where the tokenizer's decoder drops the space that a text begins with, as
those of SentencePiece do."""

from __future__ import annotations

from functools import cache
from typing import Any

import httpx
import pytest
from hypothesis import assume, given, strategies as st

from draftwell.serving.runtime.logits import Rating
from draftwell.serving.runtime.strategies import build_strategy
from draftwell.serving.server.http.rendering import plain_logprobs
from draftwell.serving.server.model.served_model import ServedModel
from draftwell.serving.server.scheduling.detokenize import HALF, Detokenizer
from tests.support.server.served_pair import (
    TunedModel,
    served_pair,
    spaced_tokenizer,
    tiny_pair,
)

PROMPT = "The capital of France is"
tokenizer = cache(spaced_tokenizer)


def decode(ids: Any) -> str:
    return str(tokenizer().decode(list(ids), skip_special_tokens=True))


def token(text: str) -> int:
    return int(tokenizer().convert_tokens_to_ids(text))


@pytest.fixture(scope="module")
def served() -> ServedModel:
    return TunedModel("tiny", tiny_pair(2, tokenizer()), build_strategy("vanilla_sd"), 2)


def paris(http: httpx.Client, path: str = "/v1/completions", **body: Any) -> dict[str, Any]:
    """The choice of an answer that can only be two times this word."""
    bias = {"logit_bias": {str(token("▁Paris")): 100}}
    response = http.post(
        path, json={"model": "tiny", "max_tokens": 2, "temperature": 0} | bias | body
    )
    assert response.status_code == 200, response.text
    return response.json()["choices"][0]


def test_the_decoder_drops_a_first_space() -> None:
    assert decode([token("▁Paris")]) == "Paris"
    assert decode(tokenizer()(PROMPT)["input_ids"]) == PROMPT


@pytest.mark.parametrize("as_ids", [False, True])
def test_a_completion_keeps_the_space_behind_the_prompt(http: httpx.Client, as_ids: bool) -> None:
    prompt = tokenizer()(PROMPT)["input_ids"] if as_ids else PROMPT
    assert paris(http, prompt=prompt)["text"] == " Paris Paris"
    assert paris(http, prompt=prompt, echo=True)["text"] == f"{PROMPT} Paris Paris"
    assert paris(http, prompt=[token("<s>")])["text"] == "Paris Paris", "a text begins here"


def test_a_chats_answer_continues_its_prompt_too(http: httpx.Client) -> None:
    """As in vLLM and TGI."""
    answer = paris(http, "/v1/chat/completions", messages=[{"role": "user", "content": PROMPT}])
    assert answer["message"]["content"] == " Paris Paris"


def test_tokens_of_logprobs_make_up_the_text(http: httpx.Client) -> None:
    choice = paris(http, prompt=PROMPT, logprobs=2)
    assert choice["logprobs"]["tokens"] == [" Paris", " Paris"]
    assert choice["logprobs"]["text_offset"] == [0, 6]


def test_a_token_is_spelt_as_it_is_within_a_text(served: ServedModel) -> None:
    words = {
        "▁Paris": " Paris",
        "▁a": " a",
        "a": "a",
        "▁": " ",
        "<0x0A>": "\n",
        "<0xE2>": HALF,
        "</s>": "</s>",
        "<s>": "<s>",
    }
    assert {word: served.token_text(token(word)) for word in words} == words


def test_words_with_and_without_a_space_are_two_at_the_top(served: ServedModel) -> None:
    top = ((token("▁a"), -1.0), (token("a"), -2.0))
    logprobs = plain_logprobs([(token("▁a"), Rating(-1.0, top))], served.token_text)
    assert logprobs["top_logprobs"] == [{" a": -1.0, "a": -2.0}]


def test_byte_level_tokens_are_spelt_as_alone() -> None:
    served = served_pair()
    alone = [served.pair.tokenizer.decode([i]) for i in range(served.vocab_size)]
    assert [served.token_text(i) for i in range(served.vocab_size)] == alone


@given(st.text("ab 1é€😀", min_size=1, max_size=12), st.data())
def test_prompt_and_pieces_make_up_the_whole_text(text: str, data: st.DataObject) -> None:
    """Wherever the prompt ends between two characters, those that are spread over tokens
    included."""
    ids = tokenizer()(text)["input_ids"]
    cut = data.draw(st.integers(2, len(ids)))
    before = decode(ids[:cut])
    assume(before and HALF not in before)
    detokenizer = Detokenizer(decode, ids[:cut])
    assert before + "".join(map(detokenizer.push, ids[cut:])) + detokenizer.flush() == text


@given(st.binary(max_size=12), st.binary(max_size=12))
def test_a_prompt_changes_nothing_where_tokens_are_bytes(prompt: bytes, answer: bytes) -> None:
    def from_bytes(ids: Any) -> str:
        return bytes(ids).decode(errors="replace")

    behind, alone = Detokenizer(from_bytes, prompt), Detokenizer(from_bytes)
    assert [behind.push(byte) for byte in answer] == [alone.push(byte) for byte in answer]
    assert behind.flush() == alone.flush()
