"""Messages and items as clients send them back: fields of other servers, thoughts of other models,
missing ids. What is no turn is left out, and what cannot be read is named."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from draftwell.serving.server.http.requests import ChatRequest
from draftwell.serving.server.http.responses_api import ResponsesRequest
from draftwell.serving.server.model.served_model import ServedModel
from tests.support.server.served_pair import roomy_pair

ASKED = {"role": "user", "content": "hi"}
SAID = {"role": "assistant", "content": "yes"}
CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
CALLED = CALL | {"function": {"name": "f", "arguments": {"a": 1}}}


@pytest.fixture(scope="module")
def served() -> ServedModel:
    return roomy_pair()


def chat(*messages: Any, **fields: Any) -> dict[str, Any]:
    return {"model": "tiny", "messages": messages, "max_tokens": 2, "temperature": 0} | fields


def turns(*messages: Any) -> list[dict[str, Any]]:
    """What the chat template sees of a chat's messages."""
    body = chat() | {"messages": list(messages)}
    return [message.plain() for message in ChatRequest.model_validate(body).messages]


def items(*given: Any) -> list[dict[str, Any]]:
    """What it sees of a response's input."""
    return ResponsesRequest.model_validate({"model": "tiny", "input": list(given)}).messages


FOREIGN: list[dict[str, Any]] = [
    {"id": "msg_1", "created_at": 1.5, "status": "completed"},
    {"opts": {"a": 1}},
    {"provider_specific_fields": {"refusal": None, "citations": []}},
    {"reasoning_details": [{"type": "reasoning.text", "text": "hm"}]},
    {"thinking_blocks": [{"type": "thinking", "thinking": "hm", "signature": "x"}]},
    {"cache_control": {"type": "ephemeral"}},
    {"refusal": None, "annotations": [], "audio": None, "function_call": None, "tool_calls": None},
    {"refusal": "", "annotations": [{"type": "url_citation"}], "tool_calls": []},
    {"refusal": "the answer's own words count"},
    {"name": "helper", "weight": 1, "prefix": True, "metadata": {"a": "b"}},
    {"reasoning_content": None, "reasoning": None},
    {"images": [], "parts": [{"type": "text", "text": "yes"}], "experimental_attachments": []},
]


@pytest.mark.parametrize("fields", FOREIGN, ids=lambda fields: ",".join(fields))
def test_fields_of_other_servers_are_left_out(http: httpx.Client, fields: dict[str, Any]) -> None:
    own = {name: value for name, value in fields.items() if name not in ("audio", "function_call")}
    assert turns(ASKED | own, SAID | fields, ASKED) == [ASKED, SAID, ASKED]
    answer = http.post("/v1/chat/completions", json=chat(ASKED, SAID | fields, ASKED))
    assert answer.status_code == 200, answer.text
    assert http.post("/tokenize", json={"messages": [ASKED, SAID | fields]}).status_code == 200


def test_a_mistyped_field_of_the_request_is_still_refused(http: httpx.Client) -> None:
    answer = http.post("/v1/chat/completions", json=chat(ASKED, temprature=1))
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "temprature")


@pytest.mark.parametrize(
    ("sent", "seen"),
    [
        (SAID | {"tool_calls": [CALL | {"index": 0}]}, SAID | {"tool_calls": [CALLED]}),
        (
            {"role": "assistant", "content": None, "tool_calls": [CALL]},
            {"role": "assistant", "content": "", "tool_calls": [CALLED]},
        ),
        (
            {"role": "assistant", "tool_calls": [CALLED | {"id": None}]},
            {"role": "assistant", "content": "", "tool_calls": [CALLED | {"id": ""}]},
        ),
        (
            {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": None}}]},
            {
                "role": "assistant",
                "content": "",
                "tool_calls": [
                    {"id": "", "type": "function", "function": {"name": "f", "arguments": {}}}
                ],
            },
        ),
        (
            {
                "role": "tool",
                "tool_call_id": "c1",
                "content": [{"type": "text", "text": "3", "cache_control": {"type": "ephemeral"}}],
            },
            {"role": "tool", "tool_call_id": "c1", "content": "3"},
        ),
        ({"role": "tool", "content": None}, {"role": "tool", "content": ""}),
        (
            {"role": "assistant", "content": None, "refusal": "No."},
            {"role": "assistant", "content": "No."},
        ),
        (
            {"role": "developer", "content": [{"type": "text", "text": "x"}]},
            {"role": "system", "content": "x"},
        ),
        (
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "hm", "signature": "x"},
                    {"type": "redacted_thinking", "data": "x"},
                    {"type": "output_text", "text": "a", "annotations": []},
                    {"type": "text", "text": "b"},
                    {"type": "refusal", "refusal": "c"},
                ],
            },
            {"role": "assistant", "content": "abc"},
        ),
        (
            {"role": "user", "content": [{"type": "input_text", "text": "hi"}]},
            ASKED,
        ),
    ],
    ids=str,
)
def test_a_turn_is_what_its_message_says(sent: dict[str, Any], seen: dict[str, Any]) -> None:
    assert turns(sent) == [seen]


THOUGHT = {"type": "reasoning", "id": "rs_1", "summary": []}


@pytest.mark.parametrize(
    "item",
    [
        THOUGHT,
        THOUGHT | {"content": [{"type": "reasoning_text", "text": "hm"}]},
        THOUGHT | {"summary": [{"type": "summary_text", "text": "hm"}], "status": None},
        THOUGHT | {"encrypted_content": "gAAA", "content": None},
        {"type": "reasoning"},
        {"type": "item_reference", "id": "rs_1"},
        {"id": "rs_1"},
        {"type": "web_search_call", "id": "ws_1", "status": "completed", "action": {}},
        {"type": "file_search_call", "queries": ["x"], "results": None},
        {"type": "mcp_list_tools", "server_label": "x", "tools": []},
        {"type": "compaction", "encrypted_content": "x"},
    ],
    ids=str,
)
def test_items_that_are_no_turns_are_left_out(http: httpx.Client, item: dict[str, Any]) -> None:
    assert items(ASKED, item, SAID, ASKED) == [ASKED, SAID, ASKED]
    body = {"model": "tiny", "input": [item, ASKED], "max_output_tokens": 2}
    answer = http.post("/v1/responses", json=body | {"instructions": "x"})
    assert answer.status_code == 200, answer.text


@pytest.mark.parametrize("ids", [{}, {"call_id": None, "id": None}, {"id": "fc_1"}], ids=str)
def test_calls_need_no_ids(http: httpx.Client, ids: dict[str, Any]) -> None:
    call = {"type": "function_call", "name": "f", "arguments": '{"a": 1}', "status": "completed"}
    result = {"type": "function_call_output", "output": [{"type": "input_text", "text": "3"}]}
    called = {"role": "assistant", "content": "", "tool_calls": [CALLED | {"id": ""}]}
    given = [ASKED, THOUGHT, call | ids, result | ids]
    assert items(*given) == [ASKED, called, {"role": "tool", "content": "3"}]
    body = {"model": "tiny", "input": given, "max_output_tokens": 2}
    assert http.post("/v1/responses", json=body).status_code == 200


def test_an_item_of_a_response_is_a_turn() -> None:
    parts = [
        {"type": "output_text", "text": "y", "annotations": [], "logprobs": []},
        {"type": "refusal", "refusal": "es"},
    ]
    about = {"id": "msg_1", "status": "completed", "phase": "final_answer"}
    item = {"type": "message", "role": "assistant", "content": parts}
    assert items(ASKED, item | about) == [ASKED, SAID]


def part(kind: str, **fields: Any) -> dict[str, Any]:
    return chat(ASKED, SAID, {"role": "user", "content": [{"type": kind, **fields}]})


@pytest.mark.parametrize(
    ("body", "param"),
    [
        (part("image_url", image_url={"url": "x"}), "messages[2].content[0].image_url"),
        (part("input_audio", input_audio={"data": ""}), "messages[2].content[0].input_audio"),
        (part("file", file={"file_id": "x"}), "messages[2].content[0].file"),
        (part("video_url", video_url={}), "messages[2].content[0].video_url"),
        (part("image"), "messages[2].content[0].type"),
        (chat(ASKED, SAID | {"audio": {"id": "a"}}), "messages[1].audio"),
        (chat(ASKED, audio={"voice": "x"}), "audio"),
        (chat(ASKED, modalities=["text", "audio"]), "modalities"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_is_no_text_is_named(http: httpx.Client, body: dict[str, Any], param: str) -> None:
    for path in ("/v1/chat/completions", "/tokenize"):
        sent = body if path != "/tokenize" else {"messages": body["messages"]}
        if path == "/tokenize" and not param.startswith("messages"):
            continue
        answer = http.post(path, json=sent)
        error = answer.json()["error"]
        assert (answer.status_code, error["param"]) == (400, param)
        assert "text only" in error["message"]
    if param.startswith("messages"):
        streamed = http.post("/v1/chat/completions", json=body | {"stream": True})
        assert (streamed.status_code, streamed.json()["error"]["param"]) == (400, param)


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ({"role": "user", "content": [{"type": "text"}]}, "messages[0].content[0].text"),
        ({"role": "user", "content": [{"type": ["text"]}]}, "messages[0].content[0].type"),
        ({"role": "user", "content": None}, "messages[0]"),
        ({"content": "x"}, "messages[0].role"),
        (
            SAID | {"function_call": {"name": "f", "arguments": "{}"}},
            "messages[0].function_call",
        ),
    ],
    ids=str,
)
def test_what_is_missing_in_a_message_is_named(
    http: httpx.Client, message: dict[str, Any], param: str
) -> None:
    answer = http.post("/v1/chat/completions", json=chat(message))
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, param)
    assert param == "messages[0]" or param.rpartition(".")[2] in error["message"]
