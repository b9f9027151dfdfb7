"""`tool_choice: allowed_tools` in either API, and the fields that ask for a tone."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
from tokenizers import AddedToken

from draftwell.serving.server.http.requests import ChatRequest
from draftwell.serving.server.http.responses_api import ResponsesRequest
from draftwell.serving.server.model.served_model import ServedModel
from tests.support.server.served_pair import calling_pair

NAMES = ("add", "say", "stop")
ARGUMENTS = {"type": "object", "properties": {"x": {"enum": [1]}}, "required": ["x"]}
FLAT = [{"type": "function", "name": name, "parameters": ARGUMENTS} for name in NAMES]
TOOLS = [
    {"type": "function", "function": {key: one[key] for key in ("name", "parameters")}}
    for one in FLAT
]
CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "Go."}], "tools": TOOLS}
ASKED = {"model": "tiny", "input": "Go.", "tools": FLAT}


def of_chat(mode: str, *names: str) -> dict[str, Any]:
    tools = [{"type": "function", "function": {"name": name}} for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}


def of_response(mode: str, *names: str) -> dict[str, Any]:
    tools = [{"type": "function", "name": name} for name in names]
    return {"type": "allowed_tools", "mode": mode, "tools": tools}


@pytest.fixture(scope="module")
def served() -> ServedModel:
    return calling_pair()


def test_required_calls_one_of_those_that_are_allowed(http: httpx.Client) -> None:
    called = set()
    for seed in range(4):
        body = CHAT | {"tool_choice": of_chat("required", "add", "say"), "seed": seed}
        more = {"max_tokens": 200, "temperature": 1, "parallel_tool_calls": False}
        choice = http.post("/v1/chat/completions", json=body | more).json()["choices"][0]
        assert choice["finish_reason"] == "tool_calls"
        [call] = choice["message"]["tool_calls"]
        assert json.loads(call["function"]["arguments"]) == {"x": 1}
        called.add(call["function"]["name"])
        asked = ASKED | {"tool_choice": of_response("required", "say"), "seed": seed}
        response = http.post("/v1/responses", json=asked | {"max_output_tokens": 300}).json()
        assert response["tool_choice"] == of_response("required", "say")
        assert {item["name"] for item in response["output"]} == {"say"}
    assert called <= {"add", "say"}


def test_the_others_stay_in_the_prompt_and_cannot_be_called() -> None:
    for request in (
        ChatRequest.model_validate(CHAT | {"tool_choice": of_chat("auto", "say")}),
        ResponsesRequest.model_validate(ASKED | {"tool_choice": of_response("auto", "say")}),
    ):
        assert [one.name for one in request.offered] == ["say"]
        assert [one["function"]["name"] for one in request.template_options["tools"]] == [*NAMES]
        assert not request.must_call
        assert request.parser().names == {"say"}
        assert request.format is not None
        definition = request.format.define(lambda text: False)
        assert r"\"say\"" in definition
        assert r"\"add\"" not in definition


@pytest.mark.parametrize(
    ("choice", "param", "words"),
    [
        (of_chat("auto", "add", "sing"), "tool_choice", "not among the tools"),
        (of_chat("sometimes", "add"), "tool_choice.allowed_tools.mode", "'auto' or 'required'"),
        (of_chat("auto"), "tool_choice.allowed_tools.tools", "at least 1"),
        ({"type": "allowed_tools"}, "tool_choice.allowed_tools", "required"),
        ({"type": "mcp"}, "tool_choice.type", "function"),
        ("sometimes", "tool_choice", "'none', 'auto' or 'required'"),
    ],
    ids=str,
)
def test_what_is_refused(http: httpx.Client, choice: Any, param: str, words: str) -> None:
    response = http.post("/v1/chat/completions", json=CHAT | {"tool_choice": choice})
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, param), error
    assert words in error["message"]


@pytest.mark.parametrize("verbosity", ["low", "medium", "high"])
def test_a_tone_changes_nothing(http: httpx.Client, verbosity: str) -> None:
    plain = {"model": "tiny", "max_tokens": 8, "temperature": 0, "messages": CHAT["messages"]}
    texts = [
        http.post("/v1/chat/completions", json=plain | asked).json()["choices"][0]["message"]
        for asked in ({}, {"verbosity": verbosity})
    ]
    assert texts[0] == texts[1]
    body = {"model": "tiny", "input": "Go.", "max_output_tokens": 4}
    asked = body | {"text": {"verbosity": verbosity}}
    assert http.post("/v1/responses", json=asked).status_code == 200


def test_tokenizer_info_is_what_a_client_needs_to_encode(
    http: httpx.Client, served: ServedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = served.pair.tokenizer
    for name, value in {
        "add_bos_token": True,
        "added_tokens_decoder": {0: AddedToken("<s>", special=True)},
        "vocab_file": "/srv/vocab.json",
        "name_or_path": "/srv/model",
        "token": "hf_of_the_hub",
    }.items():
        monkeypatch.setitem(tokenizer.init_kwargs, name, value)
    answer = http.get("/tokenizer_info")
    info = answer.json()
    assert (info["add_bos_token"], info["added_tokens_decoder"]) == (True, {"0": "<s>"})
    assert [one for one in ("/srv", "hf_of_the_hub") if one in answer.text] == []
    assert info["eos_token"] == tokenizer.eos_token
    assert info["bos_token"] is None
    assert info["chat_template"] == tokenizer.chat_template
    assert info["tokenizer_class"] == type(tokenizer).__name__
    assert info["model_max_length"] == served.max_context
