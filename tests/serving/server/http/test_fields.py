"""vLLM's further request fields, the model's own sampling defaults, pings, and tokens of texts and
conversations."""

from __future__ import annotations

import asyncio
import json
import sys
import threading
from importlib.metadata import version
from pathlib import Path
from typing import Any

import httpx
import pytest

from draftwell.serving.server.http import rendering as answer_module, service as service_module
from draftwell.serving.server.http.conversation import Conversation
from draftwell.serving.server.http.rendering import PING
from draftwell.serving.server.http.requests import (
    OTHER_FIELDS,
    ChatRequest,
    CompletionRequest,
    Generation,
    Messages,
)
from draftwell.serving.server.http.responses_api import ResponsesRequest
from draftwell.serving.server.model.loading import log_defaults
from draftwell.serving.server.model.served_model import ServedModel
from tests.support.server.served_pair import MAX_CONTEXT, TunedModel, served_pair, serving

USER = {"role": "user", "content": "hi"}
CHAT = {"model": "tiny", "messages": [USER], "max_tokens": 4, "temperature": 0}
PLAIN = {"model": "tiny", "prompt": "hello there", "max_tokens": 24, "temperature": 0}


def test_a_field_that_is_read_is_not_listed_as_lacking() -> None:
    """`parallel_tool_calls` and `metadata` are fields of some requests, and ignored in others."""
    requests = (CompletionRequest, ChatRequest, ResponsesRequest)
    for model in requests:
        assert not model.OFF.keys() & model.model_fields.keys()
    everywhere = set.intersection(*(set(model.model_fields) for model in requests))
    assert not everywhere & set(OTHER_FIELDS["ignored"])


def text_of(http: httpx.Client, **change: Any) -> str:
    response = http.post("/v1/completions", json=PLAIN | change)
    assert response.status_code == 200, response.text
    return str(response.json()["choices"][0]["text"])


def refused(http: httpx.Client, path: str, body: dict[str, Any]) -> tuple[str, str]:
    response = http.post(path, json=body)
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert "\n" not in error["message"]
    return error["param"], error["message"]


def tokens(served: ServedModel, **sampling: Any) -> list[int]:
    """The engine's plain output under a request's settings."""
    other = served_pair("autoregressive", slots=1)
    asked = other.pair.sampling(max_tokens=24, **sampling)
    return (
        other.pair.engine().generate(served.encode(PLAIN["prompt"]), asked, other.strategy).output
    )


def expected(served: ServedModel, **sampling: Any) -> str:
    """Its text."""
    return served.decode(tokens(served, **sampling)).rstrip("\ufffd")


@pytest.mark.parametrize(
    "asked",
    [
        {"repetition_penalty": 1.5},
        {"repetition_penalty": 0.01},
        {"repetition_penalty": 0.7, "presence_penalty": 0.5},
        {"min_tokens": 20},
    ],
    ids=str,
)
def test_what_alters_logits_gives_the_text_of_plain_decoding(
    http: httpx.Client, served: ServedModel, asked: dict[str, Any]
) -> None:
    assert text_of(http, **asked) == expected(served, **asked)


def test_a_seeded_min_p_of_one_is_greedy(http: httpx.Client) -> None:
    assert text_of(http, temperature=1, seed=3, min_p=1) == text_of(http)


def test_stop_token_ids_end_the_answer_and_are_not_shown(
    http: httpx.Client, served: ServedModel
) -> None:
    whole = tokens(served)
    place = next(i for i in range(3, len(whole)) if whole[i] not in whole[:i])
    stop = whole[place]
    response = http.post("/v1/completions", json=PLAIN | {"stop_token_ids": [stop]}).json()
    assert response["choices"][0]["text"] == served.decode(whole[:place]).rstrip("\ufffd")
    assert response["choices"][0]["finish_reason"] == "stop"
    assert response["usage"]["completion_tokens"] == place + 1
    later = http.post(
        "/v1/completions", json=PLAIN | {"stop_token_ids": [stop], "min_tokens": place + 3}
    ).json()
    assert later["usage"]["completion_tokens"] >= place + 3


def test_ignored_ends_of_text_do_not_end_an_answer(http: httpx.Client, served: ServedModel) -> None:
    end = str(next(iter(served.stop_tokens)))
    ended = http.post("/v1/completions", json=PLAIN | {"logit_bias": {end: 100}}).json()
    assert (ended["usage"]["completion_tokens"], ended["choices"][0]["finish_reason"]) == (
        1,
        "stop",
    )
    longer = http.post(
        "/v1/completions", json=PLAIN | {"logit_bias": {end: 100}, "ignore_eos": True}
    ).json()
    assert (longer["usage"]["completion_tokens"], longer["choices"][0]["finish_reason"]) == (
        24,
        "length",
    )
    least = http.post(
        "/v1/completions", json=PLAIN | {"logit_bias": {end: 100}, "min_tokens": 7}
    ).json()
    assert (least["usage"]["completion_tokens"], least["choices"][0]["finish_reason"]) == (
        8,
        "stop",
    )


def test_a_stop_string_is_looked_for_after_min_tokens_only(http: httpx.Client) -> None:
    whole = text_of(http)
    assert text_of(http, stop=whole[2]).startswith(whole[:2])
    assert len(text_of(http, stop=whole[2])) <= 2
    assert text_of(http, stop=whole[2], min_tokens=12)[:4] == whole[:4]


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"min_p": 1.5}, "min_p"),
        # a logit that is divided by next to nothing is infinite
        ({"repetition_penalty": 1e-3}, "repetition_penalty"),
        ({"repetition_penalty": 1e-320}, "repetition_penalty"),
        ({"priority": 1}, "priority"),
        ({"min_tokens": 25}, "min_tokens"),
        ({"min_tokens": -1}, "min_tokens"),
        ({"stop_token_ids": [10**6]}, "stop_token_ids"),
        ({"stop_token_ids": [1] * 129}, "stop_token_ids"),
        ({"ignore_eos": 1}, "ignore_eos"),
        ({"bad_words": ["x"]}, "bad_words"),
        ({"guided_regex": "("}, "guided_regex"),
        ({"prompt_logprobs": 1}, "prompt_logprobs"),
        ({"skip_special_tokens": False}, "skip_special_tokens"),
        ({"min_pp": 1}, "min_pp"),
    ],
)
def test_a_wrong_value_is_named(http: httpx.Client, change: dict[str, Any], param: str) -> None:
    assert refused(http, "/v1/completions", PLAIN | change)[0] == param


def test_usage_is_in_every_chunk_where_it_is_asked_for(http: httpx.Client) -> None:
    """As load generators ask for it; each choice has its own counts, and the last chunk those of
    the request."""
    options = {
        "stream": True,
        "n": 2,
        "seed": 3,
        "temperature": 1,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
    }
    lines = http.post("/v1/completions", json=PLAIN | options).text.split("\n\n")
    *chunks, last = [
        json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")
    ]
    counted: dict[int, list[int]] = {0: [], 1: []}
    for chunk in chunks:
        counted[chunk["choices"][0]["index"]].append(chunk["usage"]["completion_tokens"])
        assert chunk["usage"]["prompt_tokens"] == last["usage"]["prompt_tokens"]
        assert (
            chunk["usage"]["total_tokens"]
            == chunk["usage"]["prompt_tokens"] + chunk["usage"]["completion_tokens"]
        )
    assert all(counts == sorted(counts) for counts in counted.values())
    assert sum(counts[-1] for counts in counted.values()) == last["usage"]["completion_tokens"]
    alone = http.post(
        "/v1/completions",
        json=PLAIN | options | {"stream_options": {"continuous_usage_stats": True}},
    ).text
    assert '"usage"' not in alone, "include_usage turns it on, as with vLLM"


def test_vllms_harmless_defaults_are_taken(http: httpx.Client, served: ServedModel) -> None:
    harmless = {name: values[0] if values else None for name, values in Generation.OFF.items()}
    more = {
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "min_tokens": 0,
        "ignore_eos": False,
        "top_k": -1,
        "stop_token_ids": [],
        "add_special_tokens": True,
        "cache_salt": "s",
        "request_id": "r",
        "session_id": "s",
        "stream_interval": 2,
        "stream_options": None,
        "truncation_side": "left",
    }
    assert text_of(http, **harmless, **more) == text_of(http)
    chat = (
        CHAT
        | harmless
        | more
        | {
            "add_special_tokens": False,
            "echo": False,
            "add_generation_prompt": True,
            "continue_final_message": False,
            "chat_template_kwargs": {},
        }
    )
    assert http.post("/v1/chat/completions", json=chat).status_code == 200


def test_the_models_own_sampling_defaults_fill_what_a_request_leaves_open() -> None:
    served = served_pair("autoregressive", slots=1)
    config = served.pair.modules["target"].generation_config
    config.temperature, config.top_k, config.top_p, config.repetition_penalty = 0.6, 20, 7.0, 1.2
    fresh = TunedModel("tiny", served.pair, served.strategy, 1)
    assert fresh.sampling_defaults == {
        "temperature": 0.6,
        "top_k": 20,
        "repetition_penalty": 1.2,
    }, "a top_p of 7 is none"
    body = CompletionRequest(model="tiny", prompt="x", top_k=-1).with_defaults(
        fresh.sampling_defaults
    )
    settings = body.sampling_settings()
    assert (settings["temperature"], settings["top_k"], settings["repetition_penalty"]) == (
        0.6,
        0,
        1.2,
    )
    assert CompletionRequest(model="tiny", prompt="x").used_temperature == 1.0
    assert served.sampling_defaults == {}
    assert (
        TunedModel("tiny", served.pair, served.strategy, 1, model_defaults=False).sampling_defaults
        == {}
    )


@pytest.mark.parametrize(
    ("defaults", "feedback", "said"),
    [
        ({"temperature": 0.6}, True, ""),
        ({"repetition_penalty": 1.1}, False, "slower"),
        ({"min_p": 0.1}, False, ""),
        ({"repetition_penalty": 1.1}, True, "feedback cannot"),
        ({"min_p": 0.1}, True, "feedback cannot"),
    ],
)
def test_what_the_models_defaults_cost_is_logged(
    caplog: pytest.LogCaptureFixture, defaults: Any, feedback: bool, said: str
) -> None:
    log_defaults(defaults, feedback=feedback)
    assert [said in line and "--generation-config none" in line for line in caplog.messages] == (
        [True] if said else []
    )


def test_values_that_a_template_cannot_work_with_are_refused_in_one_line(
    http: httpx.Client, served: ServedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    template = served.pair.tokenizer.chat_template
    monkeypatch.setattr(
        served.pair.tokenizer,
        "chat_template",
        template + "{% if depth %}{{ 'x' + depth }}{% endif %}",
    )
    assert http.post("/v1/chat/completions", json=CHAT).status_code == 200
    response = http.post("/v1/chat/completions", json=CHAT | {"chat_template_kwargs": {"depth": 3}})
    assert (response.status_code, response.json()["error"]["param"]) == (
        400,
        "chat_template_kwargs",
    )
    assert "\n" not in response.json()["error"]["message"]


def test_a_chat_can_continue_its_last_message(http: httpx.Client, served: ServedModel) -> None:
    messages = [USER, {"role": "assistant", "content": "Once upon"}]
    body = CHAT | {"messages": messages, "continue_final_message": True}
    response = http.post("/v1/chat/completions", json=body).json()
    assert response["usage"]["prompt_tokens"] == len(
        served.encode("<|start|>user\nhi<|end|><|start|>assistant\nOnce upon")
    )
    closed = http.post(
        "/v1/chat/completions", json=CHAT | {"messages": messages, "add_generation_prompt": False}
    ).json()
    assert closed["usage"]["prompt_tokens"] == response["usage"]["prompt_tokens"] + 1 + served_tail(
        served
    )
    assert (
        refused(http, "/v1/chat/completions", body | {"add_generation_prompt": True})[0]
        == "add_generation_prompt"
    )
    assert (
        refused(http, "/v1/chat/completions", CHAT | {"continue_final_message": True})[0]
        == "continue_final_message"
    )


def served_tail(served: ServedModel) -> int:
    """Tokens that the tests' template writes after every conversation: it always opens the
    assistant's turn."""
    return len(served.encode("<|start|>assistant"))


def test_template_values_reach_the_template_and_nothing_else(served: ServedModel) -> None:
    tokenizer = served.pair.tokenizer
    before = tokenizer.chat_template
    try:
        tokenizer.chat_template = "{{ mood }}{% for m in messages %}{{ m.content }}{% endfor %}"
        assert served.encode_chat([USER], values={"mood": "ok"}) == served.encode("okhi")
        tokenizer.chat_template = "{% for one in papers %}{{ one.title }}{% endfor %}"
        body = ChatRequest(
            **CHAT, chat_template_kwargs={"papers": [{"title": "a"}, {"title": "b"}], "mood": True}
        )
        assert served.encode_chat([USER], **body.template_options) == served.encode("ab")
    finally:
        tokenizer.chat_template = before


def test_a_template_value_that_means_something_else_is_refused(http: httpx.Client) -> None:
    """A template's own names, and arguments of the function that renders it."""
    names = "messages conversations self range namespace raise_exception strftime_now tokenize "
    names += "chat_template return_dict conversation add_generation_prompt"
    for name in names.split():
        body = CHAT | {"chat_template_kwargs": {name: "{{ 1 }}"}}
        param, message = refused(http, "/v1/chat/completions", body)
        assert (param, name in message) == ("chat_template_kwargs", True)


def test_tokens_of_a_text_and_back(http: httpx.Client, served: ServedModel) -> None:
    found = http.post("/tokenize", json={"prompt": "hello the", "return_token_strs": True}).json()
    ids = served.encode("hello the")
    assert (found["tokens"], found["count"], found["max_model_len"]) == (ids, len(ids), MAX_CONTEXT)
    assert "".join(found["token_strs"]) == "helloĠthe"
    assert http.post("/detokenize", json={"tokens": ids, "model": "tiny"}).json() == {
        "prompt": "hello the"
    }


def test_tokens_of_a_conversation(http: httpx.Client, served: ServedModel) -> None:
    ids = served.encode_chat([USER])
    found = http.post("/tokenize", json={"model": "tiny", "messages": [USER]}).json()
    assert found == {"tokens": ids, "count": len(ids), "max_model_len": MAX_CONTEXT}
    tool = {
        "type": "function",
        "function": {"name": "stop", "parameters": {"type": "object", "properties": {}}},
    }
    found = http.post("/tokenize", json={"messages": [USER], "tools": [tool]}).json()
    assert found["tokens"] == served.encode_chat([USER], tools=[tool]) != ids


@pytest.mark.parametrize("path", ["/tokenize", "/detokenize"])
def test_tokens_have_the_servers_deadline(
    served: ServedModel, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    go_on = threading.Event()
    monkeypatch.setattr(served, "encode", lambda *given, **options: go_on.wait(60))
    monkeypatch.setattr(served.pair.tokenizer, "decode", lambda *given, **options: go_on.wait(60))
    with serving(served, request_timeout=0.2) as (url, _):
        try:
            response = httpx.post(
                f"{url}{path}",
                json={"prompt": "hi"} if path == "/tokenize" else {"tokens": [5]},
                timeout=60,
            )
            assert (response.status_code, response.json()["error"]["code"]) == (
                504,
                "deadline_exceeded",
            )
        finally:
            go_on.set()


PART = {"type": "text", "text": ""}


def test_a_value_for_a_template_is_short(http: httpx.Client) -> None:
    body = CHAT | {"chat_template_kwargs": {"a": "x" * 70_000}}
    param, message = refused(http, "/v1/chat/completions", body)
    assert param == "chat_template_kwargs.a"
    assert "more than" in message


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": 5}, "prompt"),
        ("/tokenize", {"messages": [{"role": "user"}]}, "messages[0]"),
        ("/tokenize", {"prompt": "a", "promt": "a"}, "promt"),
        ("/detokenize", {"tokens": [10**6]}, "tokens"),
        ("/detokenize", {"tokens": "a"}, "tokens"),
        ("/tokenize", {"prompt": "x" * 100_000}, "prompt"),
    ],
)
def test_a_wrong_body_is_named_there_too(
    http: httpx.Client, path: str, body: dict[str, Any], param: str
) -> None:
    assert refused(http, path, body)[0] == param


def test_the_model_card_has_the_context_and_the_server_a_version(http: httpx.Client) -> None:
    assert http.get("/v1/models/tiny").json()["max_model_len"] == MAX_CONTEXT
    assert http.get("/version").json() == {"version": version("draftwell")}


def test_the_version_is_that_of_the_bundles_wheel_where_only_that_is_installed(
    http: httpx.Client, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Its name is another than the project's, which is not there then."""
    metadata = tmp_path / "draftwell_runtime-1.2.3.dist-info" / "METADATA"
    metadata.parent.mkdir()
    metadata.write_text("Metadata-Version: 2.1\nName: draftwell-runtime\nVersion: 1.2.3\n")
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    assert http.get("/version").json() == {"version": "1.2.3"}


def test_a_silent_stream_is_pinged_and_says_the_same(
    http: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first event comes late, and so does every other one."""
    right = Conversation.next
    waited: list[float | None] = []

    async def late(self: Conversation, seconds: float | None = None) -> Any:
        waited.append(seconds)
        if len(waited) % 2:
            await asyncio.sleep(0)
            return None if seconds is not None else await right(self, seconds)
        return await right(self, None)

    whole = text_of(http)
    monkeypatch.setattr(service_module, "PING_SECONDS", 0.01)
    monkeypatch.setattr(answer_module, "PING_SECONDS", 0.01)
    monkeypatch.setattr(Conversation, "next", late)
    with http.stream("POST", "/v1/completions", json=PLAIN | {"stream": True}) as response:
        said = "".join(response.iter_text())
    assert said.startswith(PING)
    assert said.count(PING) >= 2
    from json import loads

    events = [loads(line[6:]) for line in said.splitlines() if line.startswith("data: {")]
    assert "".join(event["choices"][0]["text"] for event in events) == whole


@pytest.mark.parametrize("name", ["reasoning", "reasoning_content"])
def test_an_assistants_thoughts_reach_the_template_by_both_names(name: str) -> None:
    """As clients send them back, with the answer that they belong to."""
    asked = {
        "messages": [
            {"role": role, "content": "said", name: "thought"} for role in ("assistant", "user")
        ]
    }
    answer, question = (message.plain() for message in Messages.model_validate(asked).messages)
    assert answer == {
        "role": "assistant",
        "content": "said",
        "reasoning": "thought",
        "reasoning_content": "thought",
    }
    assert question == {"role": "user", "content": "said"}
