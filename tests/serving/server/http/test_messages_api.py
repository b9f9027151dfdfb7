"""Anthropic's Messages API: what a request becomes, content blocks whole and streamed, errors."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from draftwell.serving.runtime.strategies import build_strategy
from draftwell.serving.server.http.keys import Keys
from draftwell.serving.server.http.messages_api import MessagesRequest
from draftwell.serving.server.http.security import Security
from draftwell.serving.server.model.served_model import ServedModel
from tests.support.server.served_pair import TunedModel, served_pair, serving, tiny_pair

USER = {"role": "user", "content": "Who is it?"}
BODY = {"model": "tiny", "max_tokens": 24, "temperature": 0, "messages": [USER]}
CITY = {"type": "object", "properties": {"city": {"enum": ["Rome"]}}, "required": ["city"]}
TOOLS = [{"name": "weather", "description": "Of a city", "input_schema": CITY}]
UNKNOWN = {"type": "object", "properties": {"city": {"type": "array", "uniqueItems": True}}}
LONG_CALL = {"type": "tool_use", "id": "t1", "name": "f", "input": {"city": "x" * 500_000}}


@pytest.fixture(scope="module")
def served() -> ServedModel:
    return TunedModel("tiny", tiny_pair(2, context=1536), build_strategy("vanilla_sd"), 2)


def message(http: httpx.Client, **asked: Any) -> dict[str, Any]:
    response = http.post("/v1/messages", json=BODY | asked)
    assert response.status_code == 200, response.text
    return dict(response.json())


def streamed(http: httpx.Client, **asked: Any) -> tuple[list[str], dict[str, Any]]:
    """Kinds of the events, and the message that Anthropic's client makes of them."""
    kinds, built = [], dict[str, Any]()
    lines = http.post("/v1/messages", json=BODY | asked | {"stream": True}).text.split("\n\n")
    for kind, data in (event.split("\n") for event in lines if event):
        told = json.loads(data.removeprefix("data: "))
        assert kind == f"event: {told['type']}"
        kinds.append(told["type"])
        match told["type"]:
            case "message_start":
                built = told["message"]
            case "content_block_start":
                assert told["index"] == len(built["content"])
                built["content"].append(told["content_block"] | {"json": ""})
            case "content_block_delta" if told["delta"]["type"] == "text_delta":
                built["content"][told["index"]]["text"] += told["delta"]["text"]
            case "content_block_delta":
                assert told["delta"]["type"] == "input_json_delta"
                built["content"][told["index"]]["json"] += told["delta"]["partial_json"]
            case "content_block_stop":
                block = built["content"][told["index"]]
                if written := block.pop("json"):
                    block["input"] = json.loads(written)
            case "message_delta":
                assert built["usage"] == told["usage"] | {"output_tokens": 0}
                built |= told["delta"]
                built["usage"] |= told["usage"]
    return kinds, built


def test_a_text_is_the_chats(http: httpx.Client) -> None:
    found = message(http)
    chat = http.post("/v1/chat/completions", json=BODY).json()
    said, usage = chat["choices"][0]["message"]["content"], chat["usage"]
    assert found["content"] == [{"type": "text", "text": said}]
    assert (found["type"], found["role"], found["model"]) == ("message", "assistant", "tiny")
    assert (found["stop_reason"], found["stop_sequence"]) == ("max_tokens", None)
    assert found["id"].startswith("msg_")
    counts = found["usage"]
    assert counts["output_tokens"] == usage["completion_tokens"] == 24
    read = counts["input_tokens"] + counts["cache_read_input_tokens"]
    assert read == usage["prompt_tokens"]
    asked = {key: BODY[key] for key in ("model", "messages")}
    counted = http.post("/v1/messages/count_tokens", json=asked).json()
    assert counted == {"input_tokens": usage["prompt_tokens"]}


def test_a_prompt_that_does_not_fit_is_counted(http: httpx.Client) -> None:
    def counted(*texts: str) -> httpx.Response:
        turns = [{"role": "user", "content": text} for text in texts]
        asked = {"model": "tiny", "messages": turns}
        return http.post("/v1/messages/count_tokens", json=asked)

    one, two = (counted("ab " * 10_000 * times).json()["input_tokens"] for times in (1, 2))
    assert two > 1.9 * one > 1536
    far = counted("a" * 300_000, "a" * 300_000)
    assert (far.status_code, far.json()["error"]["type"]) == (400, "invalid_request_error")


def test_a_stream_is_the_same_message(http: httpx.Client) -> None:
    message(http)  # leaves its prompt in a slot
    kinds, built = streamed(http)
    assert kinds[:3] == ["message_start", "ping", "content_block_start"]
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    assert set(kinds[3:-3]) == {"content_block_delta"}
    whole = message(http)
    assert built["content"] == whole["content"]
    assert built["stop_reason"] == whole["stop_reason"] == "max_tokens"
    assert built["usage"] == whole["usage"]
    assert built["usage"]["cache_read_input_tokens"] > 0
    assert built["usage"]["output_tokens"] == 24


@pytest.mark.parametrize(
    "choice",
    [{"type": "any", "disable_parallel_tool_use": True}, {"type": "tool", "name": "weather"}],
    ids=str,
)
def test_calls(http: httpx.Client, choice: dict[str, Any]) -> None:
    asked = {"tools": TOOLS, "tool_choice": choice, "max_tokens": 200}
    found = message(http, **asked)
    kinds, built = streamed(http, **asked)
    assert "content_block_delta" in kinds
    for one in (found, built):
        assert one["stop_reason"] == "tool_use"
        [block] = one["content"]
        assert (block["type"], block["name"]) == ("tool_use", "weather")
        assert block["input"] == {"city": "Rome"}
        assert block["id"]


def test_a_stop_sequence_is_named(http: httpx.Client) -> None:
    text = message(http)["content"][0]["text"]
    stop = text[4:6]
    found = message(http, stop_sequences=["never", stop])
    assert (found["stop_reason"], found["stop_sequence"]) == ("stop_sequence", stop)
    assert found["content"][0]["text"] == text[: text.index(stop)]
    assert streamed(http, stop_sequences=[stop])[1]["stop_sequence"] == stop
    empty = message(http, stop_sequences=[text[:1]])
    assert empty["content"] == [{"type": "text", "text": ""}]


def test_json_by_a_schema(http: httpx.Client) -> None:
    wanted = {"format": {"type": "json_schema", "schema": CITY}}
    found = message(http, output_config=wanted, max_tokens=200)
    assert json.loads(found["content"][0]["text"]) == {"city": "Rome"}
    assert found["stop_reason"] == "end_turn"


def test_blocks_become_the_messages_of_a_chat() -> None:
    use = {"type": "tool_use", "id": "t1", "name": "weather", "input": {"city": "Rome"}}
    result = {"type": "tool_result", "tool_use_id": "t1", "is_error": False}
    turns = [
        {"role": "user", "content": [{"type": "text", "text": "a", "cache_control": {}}]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "hm", "signature": "x"},
                {"type": "redacted_thinking", "data": "x"},
                {"type": "text", "text": "b"},
                use,
            ],
        },
        {
            "role": "user",
            "content": [
                result | {"content": [{"type": "text", "text": "12"}]},
                {"type": "text", "text": "c"},
            ],
        },
        {"role": "assistant", "content": "It is"},
    ]
    body = BODY | {
        "messages": turns,
        "system": [{"type": "text", "text": "s"}],
        "tools": TOOLS,
        "tool_choice": {"type": "auto"},
        "thinking": {"type": "enabled", "budget_tokens": 1024},
        "metadata": {"user_id": "u"},
    }
    chat = MessagesRequest.model_validate(body).chat()
    arguments = {"name": "weather", "arguments": {"city": "Rome"}}
    call = {"id": "t1", "type": "function", "function": arguments}
    assert [one.plain() for one in chat.messages] == [
        {"role": "system", "content": "s"},
        {"role": "user", "content": "a"},
        {
            "role": "assistant",
            "content": "b",
            "tool_calls": [call],
            "reasoning": "hm",
            "reasoning_content": "hm",
        },
        {"role": "tool", "content": "12", "tool_call_id": "t1"},
        {"role": "user", "content": "c"},
        {"role": "assistant", "content": "It is"},
    ]
    assert chat.continue_final_message
    assert chat.tool_choice == "auto"
    assert [one.parameters for one in chat.functions] == [CITY]


@pytest.mark.parametrize(
    ("change", "status", "kind", "words"),
    [
        ({"max_tokens": None}, 400, "invalid_request_error", "max_tokens"),
        ({"max_tokens": 9999}, 400, "invalid_request_error", "context length"),
        ({"model": "other"}, 404, "not_found_error", "tiny"),
        ({"messages": []}, 400, "invalid_request_error", "messages"),
        ({"temperature": 9}, 400, "invalid_request_error", "temperature"),
        ({"tool_choice": {"type": "tool"}}, 400, "invalid_request_error", "name"),
        ({"tools": [{"type": "web_search_20250305", "name": "w"}]}, 400, "invalid_request_error",
         "tools[0].input_schema"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, 400,
         "invalid_request_error", "text only"),
        ({"messages": [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t",
          "content": [{"type": "document"}]}]}]}, 400, "invalid_request_error", "document"),
        ({"speculation": {"trace": True}}, 400, "invalid_request_error", "speculation.trace"),
        ({"tools": [TOOLS[0] | {"input_schema": {"type": "array"}}]}, 400,
         "invalid_request_error", "'tools[0].input_schema'"),
        ({"tools": [TOOLS[0] | {"input_schema": UNKNOWN}], "tool_choice": {"type": "any"}}, 400,
         "invalid_request_error", "tools: "),
        ({"output_config": {"format": {"type": "json_schema", "schema": UNKNOWN}}}, 400,
         "invalid_request_error", "output_config.format"),
        ({"speculation": {"strategy": "none"}}, 400, "invalid_request_error",
         "speculation.strategy: "),
        ({"system": "s", "messages": [USER, {"role": "assistant", "content": [LONG_CALL]}, USER]},
         400, "invalid_request_error", "'messages[1].content'"),
        ({"system": [{"type": "text", "text": "s" * 300_000}] * 2}, 400,
         "invalid_request_error", "'system'"),
        ({"stop_sequences": [""]}, 400, "invalid_request_error", "stop_sequences"),
    ],
    ids=lambda value: str(value)[:60] if isinstance(value, dict) else "",
)  # fmt: skip
def test_errors_have_anthropics_shape(
    http: httpx.Client, change: dict[str, Any], status: int, kind: str, words: str
) -> None:
    response = http.post("/v1/messages", json=BODY | change)
    assert response.status_code == status
    told = response.json()
    assert told["type"] == "error"
    assert told["error"]["type"] == kind
    assert words in told["error"]["message"]
    assert told.keys() == {"type", "error"}


def test_a_key_in_anthropics_header() -> None:
    security = Security(keys=Keys.of("k" * 20))
    with serving(served_pair("autoregressive", slots=1), security=security) as (url, _):
        wrong = httpx.post(f"{url}/v1/messages", json=BODY, headers={"x-api-key": "no"})
        assert (wrong.status_code, wrong.json()["error"]["type"]) == (401, "authentication_error")
        for other in ({}, {"Authorization": "Bearer no"}, {"Authorization": "Basic YTpi"}):
            headers = {"x-api-key": "k" * 20, **other}
            right = httpx.post(f"{url}/v1/messages", json=BODY, headers=headers)
            assert right.status_code == 200
        both = {"x-api-key": "no", "Authorization": f"Bearer {'k' * 20}"}
        assert httpx.post(f"{url}/v1/messages", json=BODY, headers=both).status_code == 200
