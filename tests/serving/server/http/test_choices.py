"""What one request may ask for at once: several answers, several prompts, the prompt again,
log-probs, a strategy of its own."""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any

import httpx
import openai
import pytest
import torch

from draftwell.serving.server.model.served_model import ServedModel
from tests.support.server.served_pair import served_pair, serving, tiny_module, tiny_tokenizer

PROMPTS = ["hello there", "The cat", "1 2 3"]
USER = [{"role": "user", "content": "Say hé!"}]


def complete(http: httpx.Client, prompt: Any = "hello there", **change: Any) -> dict[str, Any]:
    response = http.post(
        "/v1/completions",
        json={"model": "tiny", "prompt": prompt, "max_tokens": 12, "temperature": 0} | change,
    )
    assert response.status_code == 200, response.text
    return response.json()


def chat(http: httpx.Client, **change: Any) -> dict[str, Any]:
    body = {"model": "tiny", "messages": USER, "max_tokens": 12, "temperature": 0} | change
    response = http.post("/v1/chat/completions", json=body)
    assert response.status_code == 200, response.text
    return response.json()


def stream(http: httpx.Client, path: str, **body: Any) -> list[dict[str, Any]]:
    """Chunks of a stream that ended well."""
    with http.stream(
        "POST",
        path,
        json={"model": "tiny", "max_tokens": 12, "temperature": 0, "stream": True} | body,
    ) as response:
        assert response.status_code == 200
        events = [line.removeprefix("data: ") for line in response.iter_lines() if line]
    assert events[-1] == "[DONE]"
    return [json.loads(event) for event in events[:-1]]


def texts(answer: dict[str, Any]) -> list[str]:
    assert [choice["index"] for choice in answer["choices"]] == list(range(len(answer["choices"])))
    return [choice["text"] for choice in answer["choices"]]


def streamed_texts(chunks: list[dict[str, Any]], count: int) -> list[str]:
    result = [""] * count
    for chunk in chunks:
        for choice in chunk["choices"]:
            result[choice["index"]] += choice["text"]
    return result


def without_cached(usage: dict[str, Any]) -> dict[str, Any]:
    """What does not depend on earlier requests."""
    return {name: value for name, value in usage.items() if name != "prompt_tokens_details"}


def test_several_answers_differ_and_the_first_is_the_one_alone(http: httpx.Client) -> None:
    alone = complete(http, temperature=1, seed=5)
    several = complete(http, temperature=1, seed=5, n=4)
    assert texts(several)[0] == alone["choices"][0]["text"]
    assert len(set(texts(several))) == 4
    again = complete(http, temperature=1, seed=5, n=4)
    assert without_cached(several["usage"]) == without_cached(again["usage"])
    assert several == again | {
        key: several[key] for key in ("id", "created", "usage", "speculation")
    }, "a seed repeats all of them"
    assert texts(complete(http, n=2)) == [texts(complete(http))[0]] * 2, "greedy answers are one"


def test_a_sampled_request_with_a_seed_has_one_answer_with_and_without_drafts(
    http: httpx.Client,
) -> None:
    asked = {"temperature": 1, "seed": 5, "frequency_penalty": 0.3}
    drafted = complete(http, **asked)
    plain = complete(http, **asked, speculation={"enabled": False})
    assert drafted["speculation"]["strategy"] == "vanilla_sd"
    assert drafted["speculation"]["drafted"] > 0
    assert plain["speculation"]["strategy"] == "autoregressive"
    assert texts(drafted) == texts(plain)


def test_a_lossy_strategy_decodes_a_request_with_a_seed_too() -> None:
    """Plain decoding would draw its answer from another distribution."""
    with (
        serving(served_pair("lossy_sd")) as (url, _),
        httpx.Client(base_url=url, timeout=100) as http,
    ):
        found = complete(http, temperature=1, seed=5)["speculation"]
    assert found["strategy"] == "lossy_sd"


def test_usage_counts_a_prompt_once_and_every_answer(http: httpx.Client) -> None:
    asked: dict[str, Any] = {"n": 3, "ignore_eos": True, "speculation": {"strategy": "vanilla_sd"}}
    several = complete(http, temperature=1, seed=5, **asked)
    usage, details = several["usage"], several["usage"]["completion_tokens_details"]
    assert usage["prompt_tokens"] == complete(http)["usage"]["prompt_tokens"]
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    assert usage["completion_tokens"] == 3 * 12
    assert (
        details["accepted_prediction_tokens"] + details["rejected_prediction_tokens"]
        == several["speculation"]["drafted"]
    )


def test_a_list_of_prompts_gives_what_each_gives_alone(
    http: httpx.Client, served: ServedModel
) -> None:
    alone = [texts(complete(http, prompt))[0] for prompt in PROMPTS]
    assert texts(complete(http, PROMPTS)) == alone
    assert texts(complete(http, [served.encode(prompt) for prompt in PROMPTS])) == alone
    twice = complete(http, PROMPTS, n=2)
    assert texts(twice) == [text for text in alone for _ in range(2)]
    assert twice["usage"]["prompt_tokens"] == sum(len(served.encode(prompt)) for prompt in PROMPTS)
    assert streamed_texts(stream(http, "/v1/completions", prompt=PROMPTS, n=2), 6) == texts(twice)


def test_a_stream_of_several_answers_ends_each_of_them(http: httpx.Client) -> None:
    chunks = stream(
        http,
        "/v1/chat/completions",
        messages=USER,
        n=3,
        temperature=1,
        seed=3,
        stream_options={"include_usage": True},
    )
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    assert sorted(c["index"] for c in choices if c["finish_reason"]) == [0, 1, 2]
    assert sorted(c["index"] for c in choices if "role" in c["delta"]) == [0, 1, 2]
    assert [bool(chunk.get("speculation")) for chunk in chunks if chunk["choices"]][-1], (
        "the last end says what speculation brought"
    )
    assert sum("speculation" in chunk for chunk in chunks) == 1
    whole = chat(http, n=3, temperature=1, seed=3)
    for index in range(3):
        text = "".join(c["delta"].get("content") or "" for c in choices if c["index"] == index)
        assert text == whole["choices"][index]["message"]["content"]
    assert without_cached(chunks[-1]["usage"]) == without_cached(whole["usage"])


@pytest.mark.parametrize("strategy", ["vanilla_sd", "autoregressive"])
def test_penalties_and_biases_are_right_inside_a_draft(http: httpx.Client, strategy: str) -> None:
    settings = {
        "presence_penalty": 1.2,
        "frequency_penalty": 0.4,
        "logit_bias": {"104": 2.5, "32": -100},
        "max_tokens": 40,
    }
    plain = complete(http, **settings, speculation={"enabled": False})
    assert plain["speculation"]["strategy"] == "autoregressive"
    assert texts(complete(http, **settings, speculation={"strategy": strategy})) == texts(plain)
    assert texts(plain) != texts(complete(http, max_tokens=40)), "they change this answer"
    forced = complete(http, logit_bias={"104": 100}, max_tokens=5, logprobs=0)
    assert len(set(forced["choices"][0]["logprobs"]["tokens"])) == 1


def reference(prompt: list[int], output: list[int]) -> list[list[float]]:
    """Log-probs `[tokens][vocab]` of the target behind every prefix, by transformers alone."""
    tokenizer = tiny_tokenizer()
    with torch.no_grad():
        logits = (
            tiny_module(len(tokenizer), tokenizer.eos_token_id)(torch.tensor([prompt + output]))
            .logits[0]
            .float()
        )
    return logits.log_softmax(-1)[len(prompt) - 1 : -1].tolist()


def test_completion_logprobs_are_the_targets(http: httpx.Client, served: ServedModel) -> None:
    ids = served.encode("The cat")
    answer = complete(http, ids, max_tokens=24, logprobs=3)
    logprobs, usage = answer["choices"][0]["logprobs"], answer["usage"]
    assert answer["speculation"]["accepted"] > 2, "some of them were accepted inside a draft"
    output = (
        served.pair.engine()
        .generate(ids, served.pair.sampling(max_tokens=24), served.strategies.get("autoregressive"))
        .output
    )
    rows = reference(ids, output)
    assert logprobs["token_logprobs"] == pytest.approx(
        [row[token] for row, token in zip(rows, output, strict=True)], abs=1e-3
    )
    assert logprobs["tokens"] == [served.token_text(token) for token in output]
    assert [max(top.values()) for top in logprobs["top_logprobs"]] == pytest.approx(
        [max(row) for row in rows], abs=1e-3
    )
    assert all(3 <= len(top) <= 4 or "\ufffd" in str(top) for top in logprobs["top_logprobs"])
    assert len(logprobs["tokens"]) == usage["completion_tokens"]
    assert logprobs["text_offset"] == [
        sum(map(len, logprobs["tokens"][:i])) for i in range(len(output))
    ]


def test_streamed_logprobs_concatenate_to_the_whole(http: httpx.Client) -> None:
    whole = complete(http, "The cat", max_tokens=24, logprobs=2)["choices"][0]["logprobs"]
    chunks = stream(http, "/v1/completions", prompt="The cat", max_tokens=24, logprobs=2)
    parts = [
        choice["logprobs"] for chunk in chunks for choice in chunk["choices"] if choice["logprobs"]
    ]
    assert len(parts) > 3
    for key in whole:
        assert [entry for part in parts for entry in part[key]] == whole[key]


def test_chat_logprobs_through_openais_client(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="tiny", messages=USER, max_tokens=20, temperature=0, logprobs=True, top_logprobs=2
    )
    content = answer.choices[0].logprobs.content
    assert len(content) == answer.usage.completion_tokens
    for entry in content:
        assert entry.logprob == pytest.approx(
            max(t.logprob for t in entry.top_logprobs), abs=1e-6
        ), "greedy takes the likeliest"
        assert len(entry.top_logprobs) == 2
        assert entry.bytes is None or bytes(entry.bytes).decode() == entry.token
    without = client.chat.completions.create(
        model="tiny", messages=USER, max_tokens=20, temperature=0
    )
    assert without.choices[0].logprobs is None
    assert without.choices[0].message.content == answer.choices[0].message.content


async def chat_asynchronously(url: str) -> tuple[str, list[str], dict[str, Any]]:
    """Text, tokens of its log-probs, and the last chunk's extension, through OpenAI's asynchronous
    client."""
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        stream = await client.chat.completions.create(
            model="tiny",
            messages=USER,
            max_tokens=20,
            temperature=0,
            logprobs=True,
            presence_penalty=0.5,
            logit_bias={"104": 1},
            stream=True,
            extra_body={"speculation": {"trace": True}},
        )
        text, tokens, extension = "", [], {}
        async for chunk in stream:
            text += chunk.choices[0].delta.content or ""
            tokens += [
                entry.token
                for entry in (
                    chunk.choices[0].logprobs.content if chunk.choices[0].logprobs else []
                )
            ]
            extension = chunk.model_extra.get("speculation") or extension
        return text, tokens, extension


def test_all_of_it_streams_through_openais_asynchronous_client(http: httpx.Client) -> None:
    text, tokens, extension = asyncio.run(chat_asynchronously(str(http.base_url).rstrip("/")))
    whole = chat(http, max_tokens=20, logprobs=True, presence_penalty=0.5, logit_bias={"104": 1})[
        "choices"
    ][0]
    assert (
        text
        == whole["message"]["content"]
        != chat(http, max_tokens=20)["choices"][0]["message"]["content"]
    )
    assert tokens == [entry["token"] for entry in whole["logprobs"]["content"]]
    assert extension["accepted"] > 0


def test_an_echo_begins_with_the_prompt(http: httpx.Client, served: ServedModel) -> None:
    own = texts(complete(http))[0]
    assert texts(complete(http, echo=True)) == ["hello there" + own]
    assert texts(complete(http, served.encode("hello there"), echo=True)) == ["hello there" + own]
    assert streamed_texts(stream(http, "/v1/completions", prompt="hello there", echo=True), 1) == [
        "hello there" + own
    ]
    nothing = complete(http, echo=True, max_tokens=0)
    assert (texts(nothing), nothing["usage"]["completion_tokens"]) == (["hello there"], 0)
    assert nothing["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize("max_tokens", [0, 1])
def test_an_echo_with_logprobs_rates_the_prompt(
    http: httpx.Client, served: ServedModel, max_tokens: int
) -> None:
    ids = served.encode("the cat in the hat")
    logprobs = complete(http, [ids, ids[:4]], echo=True, max_tokens=max_tokens, logprobs=1)[
        "choices"
    ][0]["logprobs"]
    assert len(logprobs["tokens"]) == len(ids) + max_tokens
    assert (logprobs["token_logprobs"][0], logprobs["top_logprobs"][0]) == (None, None)
    rows = reference(ids[:1], ids[1:])
    expected = [row[token] for row, token in zip(rows, ids[1:], strict=True)]
    assert logprobs["token_logprobs"][1 : len(ids)] == pytest.approx(expected, abs=1e-3)
    chunks = stream(
        http, "/v1/completions", prompt=ids, echo=True, max_tokens=max_tokens, logprobs=1
    )
    parts = [
        choice["logprobs"] for chunk in chunks for choice in chunk["choices"] if choice["logprobs"]
    ]
    assert [token for part in parts for token in part["tokens"]] == logprobs["tokens"]


def test_a_request_chooses_its_strategy(http: httpx.Client) -> None:
    tuned, plain, named = (
        complete(http, speculation=asked)["speculation"]
        for asked in ({}, {"enabled": False}, {"strategy": "autoregressive", "enabled": True})
    )
    assert (tuned["strategy"], plain["strategy"], named["strategy"]) == (
        "vanilla_sd",
        "autoregressive",
        "autoregressive",
    )
    assert plain["drafted"] == plain["accepted"] == 0
    assert tuned["accepted"] > 0
    refused = http.post(
        "/v1/completions",
        json={"model": "tiny", "prompt": "x", "speculation": {"strategy": "pearl"}},
    )
    assert refused.status_code == 400
    assert "vanilla_sd, autoregressive" in refused.json()["error"]["message"]


def test_stats_are_told_unless_unwanted(http: httpx.Client) -> None:
    stats = complete(http, max_tokens=24)["speculation"]
    assert set(stats) == {
        "strategy",
        "drafted",
        "judged",
        "accepted",
        "rescued",
        "predicted",
        "predicted_accepted",
        "forced",
        "accepted_by",
        "rounds",
        "accepted_at",
        "target_calls",
        "acceptance_rate",
        "mean_acceptance_length",
        "first_token_seconds",
        "tokens_per_second",
    }
    assert stats["acceptance_rate"] == stats["accepted"] / stats["judged"]
    assert stats["drafted"] >= stats["judged"] >= stats["accepted"]
    assert stats["accepted_by"] == {stats["strategy"]: stats["accepted"]}
    assert stats["mean_acceptance_length"] > 1
    assert stats["accepted"] == sum(stats["accepted_at"])
    assert stats["mean_acceptance_length"] == 1 + stats["accepted"] / stats["rounds"]
    assert 0 < stats["first_token_seconds"] < 24 / stats["tokens_per_second"]
    assert "speculation" not in complete(http, speculation={"stats": False})
    assert all(
        "speculation" not in chunk
        for chunk in stream(http, "/v1/completions", prompt="hi", speculation={"stats": False})
    )


def test_token_ids_of_a_whole_answer_and_of_a_stream(
    http: httpx.Client, served: ServedModel
) -> None:
    """Also those without text, and the token that ended the answer."""
    asked = {"temperature": 0, "return_token_ids": True, "max_tokens": 24}
    whole = complete(http, **asked)
    [choice] = whole["choices"]
    ids = choice["token_ids"]
    assert len(ids) == whole["usage"]["completion_tokens"] == 24
    # bytes at the end that may begin a character are no text
    assert served.decode(ids).rstrip("\ufffd") == choice["text"].rstrip("\ufffd")
    chunks = stream(http, "/v1/completions", prompt="hello there", **asked)
    assert [
        token for chunk in chunks for one in chunk["choices"] for token in one.get("token_ids", ())
    ] == ids
    stopped = complete(http, **asked, stop_token_ids=[ids[9]])["choices"][0]
    assert stopped["token_ids"] == ids[: ids.index(ids[9]) + 1]
    rated = complete(http, **asked, logprobs=1, return_tokens_as_token_ids=True)["choices"][0]
    assert rated["logprobs"]["tokens"] == [f"token_id:{token}" for token in ids]
    assert "token_ids" not in complete(http)["choices"][0]


def test_a_trace_colours_the_whole_text(http: httpx.Client) -> None:
    whole = complete(http, "The cat", max_tokens=30, speculation={"trace": True})
    tokens = whole["speculation"]["tokens"]
    assert "".join(token["text"] for token in tokens) == texts(whole)[0]
    assert {token["origin"] for token in tokens} == {"accepted", "recovered", "target"}
    assert (
        sum(token["origin"] == "accepted" for token in tokens) == whole["speculation"]["accepted"]
    )
    assert len(tokens) == whole["usage"]["completion_tokens"]
    chunks = stream(
        http,
        "/v1/completions",
        prompt="The cat",
        max_tokens=30,
        speculation={"trace": True, "stats": False},
    )
    assert [
        token for chunk in chunks for token in chunk.get("speculation", {}).get("tokens", [])
    ] == tokens
    for chunk in chunks[:-1]:
        shown = "".join(token["text"] for token in chunk["speculation"]["tokens"])
        assert shown == chunk["choices"][0]["text"], (
            "without stop strings a chunk's tokens are its text"
        )


def test_a_stop_string_cuts_tokens_and_counts_too(http: httpx.Client) -> None:
    full = texts(complete(http, "The cat", max_tokens=40))[0]
    cut = complete(
        http, "The cat", max_tokens=40, stop=full[9:12], speculation={"trace": True}, logprobs=0
    )
    text, tokens = texts(cut)[0], cut["speculation"]["tokens"]
    assert text == full[: full.index(full[9:12])]
    assert "".join(token["text"] for token in tokens) == text
    details = cut["usage"]["completion_tokens_details"]
    assert details["accepted_prediction_tokens"] >= sum(
        token["origin"] == "accepted" for token in tokens
    )
    assert details["accepted_prediction_tokens"] <= cut["usage"]["completion_tokens"]
    assert (
        len(cut["choices"][0]["logprobs"]["tokens"])
        == len(tokens)
        == cut["usage"]["completion_tokens"]
    )
    chunks = stream(
        http, "/v1/completions", prompt="The cat", max_tokens=40, stop=full[9:12], logprobs=0
    )
    parts = [
        choice["logprobs"]["tokens"]
        for chunk in chunks
        for choice in chunk["choices"]
        if choice["logprobs"]
    ]
    assert [token for part in parts for token in part] == cut["choices"][0]["logprobs"]["tokens"]


def test_the_system_fingerprint_belongs_to_the_settings(
    http: httpx.Client, served: ServedModel
) -> None:
    fingerprint = complete(http)["system_fingerprint"]
    assert fingerprint.startswith("fp_")
    assert {
        chunk["system_fingerprint"] for chunk in stream(http, "/v1/completions", prompt="hi")
    } == {fingerprint}
    other = served_pair("vanilla_sd", slots=1, num_speculative_tokens=5)
    with serving(other) as (url, _), httpx.Client(base_url=url, timeout=60) as second:
        assert complete(second)["system_fingerprint"] != fingerprint


def test_a_request_gives_up_when_a_time_is_over(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    served = served_pair("autoregressive", slots=1)
    model = served.pair.models["target"]
    forward = model.forward
    monkeypatch.setattr(model, "forward", lambda rows: (time.sleep(0.05), forward(rows))[1])
    with (
        serving(served, request_timeout=0.2) as (url, _),
        httpx.Client(base_url=url, timeout=60) as http,
    ):
        for timeout, expected in (
            (None, (504, "deadline_exceeded")),
            (100, (504, "deadline_exceeded")),
            (0.1, (408, "deadline_exceeded")),  # the client's own limit
        ):
            body = {"model": "tiny", "prompt": "hi", "max_tokens": 200, "ignore_eos": True}
            response = http.post("/v1/completions", json=body | {"timeout": timeout})
            assert (response.status_code, response.json()["error"]["code"]) == expected
