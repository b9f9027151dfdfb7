"""OpenAI's predicted outputs: the answer is that of plain decoding, whole and streamed, and usage
counts what the prediction brought."""

from __future__ import annotations

from typing import Any

import openai
import pytest

from draftwell.serving.server.model.served_model import ServedModel
from tests.support.server.served_pair import served_pair

USER = [{"role": "user", "content": "Say something"}]


@pytest.fixture(scope="module")
def served() -> ServedModel:
    return served_pair("vanilla_sd", slots=3, num_speculative_tokens=2)


@pytest.fixture(scope="module")
def plain(client: openai.OpenAI) -> Any:
    return ask(client, extra_body={"speculation": {"enabled": False}})


def ask(client: openai.OpenAI, **more: Any) -> Any:
    return client.chat.completions.create(
        model="tiny", messages=USER, **{"temperature": 0, "max_tokens": 40, **more}
    )  # type: ignore[call-overload]


def predicted(client: openai.OpenAI, text: Any, **more: Any) -> Any:
    return ask(client, prediction={"type": "content", "content": text}, **more)


def details(answer: Any) -> tuple[int, int]:
    found = answer.usage.completion_tokens_details
    return found.accepted_prediction_tokens, found.rejected_prediction_tokens


def readable_start(served: ServedModel, text: str) -> str:
    """The longest beginning of an answer that is encoded as it was decoded."""
    end = text.find("\ufffd")
    return text if end < 0 else text[:end]


@pytest.mark.parametrize("edited", ["as it is", "in the middle", "something else", "empty"])
def test_the_answer_is_that_of_plain_decoding(
    client: openai.OpenAI, plain: Any, edited: str
) -> None:
    text = plain.choices[0].message.content
    expectation = {
        "as it is": text,
        "in the middle": text[:6] + "zzz" + text[9:],
        "something else": "the cat " * 20,
        "empty": "",
    }[edited]
    answer = predicted(client, expectation)
    assert answer.choices[0].message.content == text
    assert answer.usage.completion_tokens == plain.usage.completion_tokens
    accepted, rejected = details(answer)
    assert 0 <= accepted <= answer.usage.completion_tokens
    assert rejected >= 0
    if edited == "empty":
        assert (accepted, rejected) == (0, 0)


def test_usage_counts_the_prediction_alone(
    client: openai.OpenAI, served: ServedModel, plain: Any
) -> None:
    start = readable_start(served, plain.choices[0].message.content)
    answer = predicted(
        client, [{"type": "text", "text": start[:3]}, {"type": "text", "text": start[3:]}]
    )
    speculation = answer.model_extra["speculation"]
    accepted, rejected = details(answer)
    assert accepted + rejected == speculation["predicted"]
    assert speculation["accepted"] <= speculation["judged"] <= speculation["drafted"]
    if len(start) >= 4:
        assert accepted > 0
        both = {"prediction": accepted, "vanilla_sd": speculation["accepted"]}
        assert speculation["accepted_by"] == {name: count for name, count in both.items() if count}


def test_the_strategys_own_numbers_leave_it_out(
    client: openai.OpenAI, served: ServedModel, plain: Any
) -> None:
    """A server that decodes plainly drafts nothing but the prediction."""
    text = plain.choices[0].message.content
    found = predicted(
        client, text, extra_body={"speculation": {"strategy": "autoregressive"}}
    ).model_extra["speculation"]
    assert found["predicted"] > 0
    assert (found["drafted"], found["judged"], found["accepted"], found["acceptance_rate"]) == (
        0,
        0,
        0,
        None,
    )
    assert found["mean_acceptance_length"] == 1.0


def test_plain_decoding_takes_no_prediction(client: openai.OpenAI, plain: Any) -> None:
    answer = predicted(
        client, plain.choices[0].message.content, extra_body={"speculation": {"enabled": False}}
    )
    assert answer.choices[0].message.content == plain.choices[0].message.content
    assert answer.model_extra["speculation"]["predicted"] == 0
    assert details(answer) == (0, 0)


def test_a_stream_says_the_same(client: openai.OpenAI, plain: Any) -> None:
    text = plain.choices[0].message.content
    whole = predicted(client, text[:20])
    chunks = list(predicted(client, text[:20], stream=True, stream_options={"include_usage": True}))
    assert (
        "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == text
    )
    assert details(chunks[-1]) == details(whole)


def test_several_answers_have_one_each(client: openai.OpenAI, plain: Any) -> None:
    text = plain.choices[0].message.content
    answer = predicted(client, text, n=2)
    assert [choice.message.content for choice in answer.choices] == [text, text]


def test_a_sampled_answer_with_a_seed_is_repeated(client: openai.OpenAI, plain: Any) -> None:
    text = plain.choices[0].message.content
    first, second = (predicted(client, text, temperature=1, seed=5) for _ in range(2))
    assert first.choices[0].message.content == second.choices[0].message.content
