"""The Responses API, by OpenAI's own client: text and messages, streamed events, and what a server
without stored state refuses."""

from __future__ import annotations

import json
import threading
from typing import Any

import httpx
import openai
import pytest
from openai.types.responses import (
    Response,
    ResponseCompletedEvent,
    ResponseIncompleteEvent,
    ResponseTextDeltaEvent,
)

from draftwell.serving.server.http.errors import APIError
from draftwell.serving.server.http.responses_api import failure_code
from draftwell.serving.server.model.served_model import ServedModel

ENDLESS = {"ignore_eos": True}


def respond(client: openai.OpenAI, said: Any = "Say hi", **more: Any) -> Any:
    return client.responses.create(
        model="tiny",
        input=said,
        **{"temperature": 0, "max_output_tokens": 20, "extra_body": ENDLESS, **more},
    )


def chat(client: openai.OpenAI, messages: Any, **more: Any) -> Any:
    settings = {"temperature": 0, "max_tokens": 20, "extra_body": ENDLESS, **more}
    return client.chat.completions.create(model="tiny", messages=messages, **settings)


def test_a_text_is_answered_as_a_chat_is(client: openai.OpenAI) -> None:
    found = respond(client, metadata={"a": "b"})
    same = chat(client, [{"role": "user", "content": "Say hi"}])
    assert found.output_text == same.choices[0].message.content
    assert (found.usage.input_tokens, found.usage.output_tokens) == (
        same.usage.prompt_tokens,
        same.usage.completion_tokens,
    )
    assert (found.status, found.metadata, found.object) == ("incomplete", {"a": "b"}, "response")
    assert found.incomplete_details.reason == "max_output_tokens"
    assert found.id.startswith("resp_") or found.id.startswith("resp-")
    Response.model_validate(found.model_dump(), strict=False)


def test_messages_instructions_and_an_earlier_response(client: openai.OpenAI) -> None:
    found = respond(
        client,
        [
            {
                "role": "user",
                "content": [
                    {"type": "input_text", "text": "Say "},
                    {"type": "input_text", "text": "hi"},
                ],
            }
        ],
        instructions="Be brief.",
    )
    same = chat(
        client, [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Say hi"}]
    )
    assert found.output_text == same.choices[0].message.content
    assert found.instructions == "Be brief."
    earlier = [item.model_dump() for item in found.output]
    again = respond(
        client,
        [{"role": "user", "content": "Say hi"}, *earlier, {"role": "user", "content": "And?"}],
    )
    assert again.usage.input_tokens > found.usage.input_tokens
    both = respond(
        client,
        [{"role": "developer", "content": "x"}, {"role": "user", "content": "hi"}],
        instructions="y",
    )
    assert both.usage.input_tokens > 0, "two system messages are one"


def test_a_stream_has_the_events_that_the_client_parses(client: openai.OpenAI) -> None:
    whole = respond(client)
    events = list(respond(client, stream=True))
    kinds = [event.type for event in events]
    assert kinds[:4] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
    ]
    assert kinds[-4:] == [
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.incomplete",
    ]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert (
        "".join(event.delta for event in events if isinstance(event, ResponseTextDeltaEvent))
        == whole.output_text
    )
    assert isinstance(events[-1], ResponseIncompleteEvent)
    assert events[-1].response.output_text == whole.output_text
    assert events[-1].response.usage == whole.usage
    assert {event.item_id for event in events if isinstance(event, ResponseTextDeltaEvent)} == {
        events[-1].response.output[0].id
    }


def test_the_clients_own_stream_helper_reads_it(client: openai.OpenAI, served: ServedModel) -> None:
    end = str(next(iter(served.stop_tokens)))
    with client.responses.stream(
        model="tiny", input="Say hi", temperature=0, extra_body={"logit_bias": {end: 100}}
    ) as stream:
        events = list(stream)
        final = stream.get_final_response()
    assert isinstance(events[-1], ResponseCompletedEvent) or events[-1].type == "response.completed"
    assert (final.status, final.output_text) == ("completed", "")


def test_logprobs_are_listed_on_demand(client: openai.OpenAI) -> None:
    found = respond(client, include=["message.output_text.logprobs"], top_logprobs=2)
    listed = found.output[0].content[0].logprobs
    same = (
        chat(client, [{"role": "user", "content": "Say hi"}], logprobs=True, top_logprobs=2)
        .choices[0]
        .logprobs.content
    )
    assert [(one.token, one.logprob) for one in listed] == [
        (one.token, one.logprob) for one in same
    ]
    assert all(len(one.top_logprobs) == 2 for one in listed)
    assert not respond(client).output[0].content[0].logprobs


@pytest.mark.parametrize("stream", [False, True])
def test_logprobs_are_spelt_and_written_in_a_thread(
    client: openai.OpenAI, served: ServedModel, monkeypatch: Any, stream: bool
) -> None:
    """Tens of thousands of them would hold up every other stream."""
    spelling, writing = set[str](), set[str]()
    spell, write = served.token_text, json.dumps

    def spelt(token: int) -> str:
        spelling.add(threading.current_thread().name)
        return spell(token)

    def written(data: Any, **options: Any) -> str:
        if "top_logprobs" in str(data.get("logprobs", data.get("output", ""))):
            writing.add(threading.current_thread().name)
        return write(data, **options)

    monkeypatch.setattr(served, "token_text", spelt)
    monkeypatch.setattr(json, "dumps", written)
    found = respond(client, include=["message.output_text.logprobs"], stream=stream)
    assert len(list(found) if stream else found.output) > 0
    assert spelling
    assert writing
    assert all(name.startswith(("answer_", "stream_")) for name in spelling | writing), (
        spelling | writing
    )


def test_a_predicted_answer_works_here_too(client: openai.OpenAI) -> None:
    text = respond(client).output_text
    found = respond(
        client, extra_body=ENDLESS | {"prediction": {"type": "content", "content": text}}
    )
    assert found.output_text == text


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"background": True}, "background"),
        ({"text": {"format": {"type": "xml"}}}, "text.format.type"),
        ({"truncation": "auto"}, "truncation"),
        ({"n": 2}, "n"),
        ({"max_tokens": 5}, "max_tokens"),
        ({"include": ["everything"]}, "include[0]"),
        ({"input": []}, "input"),
        ({"input": [{"type": "function_call_output", "call_id": "x"}]}, "input[0].output"),
        ({"input": [{"type": "reasoning", "summary": []}]}, "input"),  # nothing else is there
        ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input[0].type"),
        ({"input": [{"id": "msg_1"}]}, "input[0].type"),
        ({"input": [{"type": "custom_tool_call", "name": "f", "input": "x"}]}, "input[0].type"),
        ({"input": [{"type": 5}]}, "input[0].type"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
            "input[0].content[0].type",
        ),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"inputs": "x"}, "inputs"),
        (
            {"input": [{"role": "user", "content": "a"}, {"role": "system", "content": "b"}]},
            "input",
        ),
        ({"model": 5}, "model"),
        ({"speculation": {"trace": True}}, "speculation.trace"),
    ],
)
def test_what_needs_stored_state_or_is_wrong_is_refused_in_one_line(
    client: openai.OpenAI, change: dict[str, Any], param: str
) -> None:
    body = {"model": "tiny", "input": "hi", "max_output_tokens": 2} | change
    response = httpx.post(f"{client.base_url}responses", json=body, timeout=100)
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert error["param"] == param
    assert "\n" not in error["message"]


def test_other_things_to_include_list_no_logprobs(client: openai.OpenAI) -> None:
    assert (
        not respond(client, include=["reasoning.encrypted_content"]).output[0].content[0].logprobs
    )


def test_values_of_the_template_are_passed_on(
    client: openai.OpenAI, served: ServedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    template = served.pair.tokenizer.chat_template
    monkeypatch.setattr(
        served.pair.tokenizer, "chat_template", template + "{% if think %}and think{% endif %}"
    )
    plain = respond(client).usage.input_tokens
    assert (
        respond(
            client, extra_body=ENDLESS | {"chat_template_kwargs": {"think": True}}
        ).usage.input_tokens
        > plain
    )


def test_an_earlier_refusal_is_part_of_the_conversation(client: openai.OpenAI) -> None:
    def asked(part: dict[str, str]) -> Any:
        return respond(
            client,
            [
                {"role": "user", "content": "hi"},
                {"role": "assistant", "content": [part]},
                {"role": "user", "content": "And?"},
            ],
        ).output_text

    assert asked({"type": "refusal", "refusal": "No."}) == asked(
        {"type": "output_text", "text": "No."}
    )
    body = {
        "model": "tiny",
        "input": [{"role": "assistant", "content": [{"type": "refusal", "text": "No."}]}],
    }
    assert httpx.post(f"{client.base_url}responses", json=body, timeout=100).status_code == 400


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (APIError(408, "late", code="deadline_exceeded"), "deadline_exceeded"),
        (APIError(504, "late", code="deadline_exceeded"), "server_error"),
        (APIError(429, "full", code="queue_full"), "rate_limit_exceeded"),
        (APIError(500, "broken"), "server_error"),
    ],
    ids=str,
)
def test_a_failed_response_says_whose_fault_it_is(error: APIError, code: str) -> None:
    assert failure_code(error) == code


def test_harmless_values_are_taken(client: openai.OpenAI) -> None:
    body = {
        "model": "tiny",
        "input": "hi",
        "max_output_tokens": 2,
        "store": True,
        "reasoning": {"effort": "low"},
        "tools": [],
        "include": ["reasoning.encrypted_content", "file_search_call.results"],
        "user": "me",
        "text": {"format": {"type": "text"}, "verbosity": "medium"},
        "truncation": "disabled",
        "previous_response_id": None,
        "parallel_tool_calls": True,
        "tool_choice": "auto",
        "background": False,
        "service_tier": "auto",
        "max_tool_calls": 3,
    }
    assert httpx.post(f"{client.base_url}responses", json=body, timeout=100).status_code == 200
    assert httpx.get(f"{client.base_url}responses/resp_1", timeout=100).status_code == 404
