"""Tools in the Responses API, by OpenAI's own client: calls, streams, results that are sent back,
and formats beside calls."""

from __future__ import annotations

import json
import time
from typing import Any

import httpx
import jsonschema
import openai
import pytest
from openai.types.responses import ResponseFunctionToolCall

from draftwell.serving.runtime.engine.engine import Engine
from draftwell.serving.server.http import rendering as answer_module
from draftwell.serving.server.http.conversation import Conversation
from draftwell.serving.server.http.rendering import Answer
from draftwell.serving.server.http.responses_api import OutputItems
from draftwell.serving.server.http.tool_calls import ToolCallParser
from draftwell.serving.server.model.served_model import ServedModel
from tests.serving.runtime.grammar.schemas import DIGIT, closed
from tests.support.server.functions import SCHEMAS, TOOLS
from tests.support.server.served_pair import calling_pair

FLAT: list[Any] = [{"type": "function"} | tool["function"] for tool in TOOLS]
CALL = '<tool_call>\n{"name": "stop", "arguments": {}}\n</tool_call>'


@pytest.fixture(scope="module")
def served() -> ServedModel:
    return calling_pair()


def respond(client: openai.OpenAI, **change: Any) -> Any:
    asked = {
        "model": "tiny",
        "input": "How warm?",
        "tools": FLAT,
        "temperature": 0,
        "max_output_tokens": 900,
    }
    return client.responses.create(**asked | change)


def calls_of(response: Any) -> list[ResponseFunctionToolCall]:
    """The calls of a response, whose arguments follow their schemas."""
    calls = [item for item in response.output if item.type == "function_call"]
    for call in calls:
        jsonschema.validate(json.loads(call.arguments), SCHEMAS[call.name])
        assert (call.status, call.call_id.startswith("call_"), call.id.startswith("fc_")) == (
            "completed",
            True,
            True,
        )
    return calls


def test_arguments_that_a_stop_string_cuts_are_no_call_to_make(client: openai.OpenAI) -> None:
    response = respond(
        client, tool_choice={"type": "function", "name": "weather"}, extra_body={"stop": ['"unit']}
    )
    assert response.output[-1].arguments.startswith('{"city"')
    assert response.output[-1].status == "incomplete"


@pytest.mark.parametrize("choice", ["required", {"type": "function", "name": "go_to"}], ids=str)
def test_a_stream_of_calls_adds_up_to_the_whole(client: openai.OpenAI, choice: Any) -> None:
    asked: Any = {"tool_choice": choice, "parallel_tool_calls": False}
    response = respond(client, **asked)
    [call] = calls_of(response)
    assert (response.status, response.output, response.parallel_tool_calls) == (
        "completed",
        [call],
        False,
    )
    assert [tool.name for tool in response.tools] == list(SCHEMAS)
    events = list(respond(client, **asked, stream=True))
    kinds = [event.type.removeprefix("response.") for event in events]
    assert kinds[:3] == ["created", "in_progress", "output_item.added"]
    assert set(kinds[3:-3]) == {"function_call_arguments.delta"}
    assert kinds[-3:] == ["function_call_arguments.done", "output_item.done", "completed"]
    assert "".join(event.delta for event in events[3:-3]) == call.arguments == events[-3].arguments
    assert [(one.name, one.arguments) for one in calls_of(events[-1].response)] == [
        (call.name, call.arguments)
    ]
    assert {event.item_id for event in events[3:-2]} == {events[-1].response.output[0].id}
    with client.responses.stream(
        model="tiny", input="How warm?", tools=FLAT, temperature=0, **asked
    ) as stream:
        for _ in stream:
            pass
        assert stream.get_final_response().output[0].arguments == call.arguments


def test_results_can_be_sent_back_with_the_calls_as_they_came(client: openai.OpenAI) -> None:
    [call] = calls_of(respond(client, tool_choice="required", parallel_tool_calls=False))
    result: Any = {
        "type": "function_call_output",
        "call_id": call.call_id,
        "output": [{"type": "input_text", "text": "22"}],
    }
    said = {"role": "user", "content": "How warm?"}
    found = respond(
        client, input=[said, call.model_dump(exclude_none=True), result], max_output_tokens=5
    )
    same = client.chat.completions.create(
        model="tiny",
        tools=TOOLS,
        temperature=0,
        max_tokens=5,
        messages=[
            {"role": "user", "content": "How warm?"},
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [
                    {
                        "id": call.call_id,
                        "type": "function",
                        "function": {"name": call.name, "arguments": call.arguments},
                    }
                ],
            },
            {"role": "tool", "tool_call_id": call.call_id, "content": "22"},
        ],
    )
    assert found.usage.input_tokens == same.usage.prompt_tokens
    assert found.output_text == same.choices[0].message.content


def test_the_model_may_say_something_instead(client: openai.OpenAI) -> None:
    found = respond(
        client,
        max_output_tokens=12,
        include=["message.output_text.logprobs"],
        extra_body={"ignore_eos": True},
    )
    assert [item.type for item in found.output] == ["message"]
    assert len(found.output[0].content[0].logprobs) == 12
    assert found.status == "incomplete"


@pytest.mark.parametrize("called", [True, False])
def test_calls_or_an_answer_in_the_format(
    client: openai.OpenAI, served: ServedModel, called: bool
) -> None:
    mark = str(served.pair.tokenizer.convert_tokens_to_ids("<tool_call>"))
    wanted: Any = {"format": {"type": "json_schema", "name": "point", "schema": closed(x=DIGIT)}}
    found = respond(
        client,
        text=wanted,
        extra_body={"logit_bias": {mark: 100 if called else -100}},
        parallel_tool_calls=False,
    )
    if called:
        assert len(calls_of(found)) == len(found.output) == 1
    else:
        jsonschema.validate(json.loads(found.output_text), closed(x=DIGIT))


def test_items_of_text_and_calls_in_their_order() -> None:
    """The same however the text is cut; every item is added, and done, in turn."""
    text = f"Well: {CALL} and {CALL}\nDone."
    for pieces in ([text], list(text)):
        items = OutputItems("resp-1", ToolCallParser({"stop"}))
        events = [event for piece in pieces for event in items.push(piece, [])] + items.finish(
            "incomplete"
        )
        assert [item["type"] for item in items.items] == [
            "message",
            "function_call",
            "message",
            "function_call",
            "message",
        ]
        assert [item["status"] for item in items.items] == ["completed"] * 4 + ["incomplete"]
        assert [item["content"][0]["text"] for item in items.items[::2]] == [
            "Well:",
            "and",
            "Done.",
        ]
        added = [
            fields["output_index"]
            for kind, fields in events
            if kind == "response.output_item.added"
        ]
        done = [
            fields["output_index"] for kind, fields in events if kind == "response.output_item.done"
        ]
        assert added == done == [0, 1, 2, 3, 4]
        assert len({item["id"] for item in items.items}) == 5


@pytest.mark.parametrize(
    "body",
    [
        (
            b'"tools": [{"type": "function", "name": "f", "parameters": {"default": NaN}}], '
            b'"input": "hi"'
        ),
        (
            b'"input": [{"type": "function_call", "call_id": "\\ud800", "name": "f", '
            b'"arguments": "{}"}]'
        ),
        b'"input": [{"type": "function_call_output", "call_id": "\\ud800", "output": "x"}]',
    ],
)
def test_what_cannot_be_written_is_refused(client: openai.OpenAI, body: bytes) -> None:
    """A response repeats the tools; a template may write the names of calls."""
    response = httpx.post(
        f"{client.base_url}responses",
        content=b'{"model": "tiny", "max_output_tokens": 2, %s}' % body,
        timeout=60,
        headers={"Content-Type": "application/json"},
    )
    assert response.status_code == 400, response.text


def test_a_list_of_calls_is_one_call_where_one_is_wanted(
    client: openai.OpenAI, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the model writes as one list, in both shapes of an answer."""
    collect, written = (
        Answer.collect,
        (
            '<tool_call>[{"name": "stop", "arguments": {}}, {"name": "stop", "arguments": '
            "{}}]</tool_call>"
        ),
    )

    async def collected(answer: Answer) -> Any:
        await collect(answer)
        return [written], [[]]

    monkeypatch.setattr(Answer, "collect", collected)
    for several, calls in ((None, 2), (True, 2), (False, 1)):
        asked: Any = {} if several is None else {"parallel_tool_calls": several}
        output = respond(client, max_output_tokens=1, **asked).output
        assert [item.type for item in output] == ["function_call"] * calls
        messages: Any = [{"role": "user", "content": "hi"}]
        chat = client.chat.completions.create(
            model="tiny", tools=TOOLS, max_tokens=1, messages=messages, **asked
        )
        assert len(chat.choices[0].message.tool_calls or []) == calls


@pytest.mark.parametrize(
    ("path", "asked"),
    [
        (
            "chat/completions",
            {"messages": [{"role": "user", "content": "hi"}], "tools": TOOLS, "max_tokens": 20},
        ),
        ("responses", {"input": "hi", "tools": FLAT, "max_output_tokens": 20}),
    ],
)
def test_a_stream_of_which_nothing_may_be_shown_is_not_silent(
    client: openai.OpenAI, monkeypatch: pytest.MonkeyPatch, path: str, asked: dict[str, Any]
) -> None:
    """Events come all the time, but their text may all be part of a call."""
    step, following = Engine.step, Conversation.next
    # none is late
    monkeypatch.setattr(Conversation, "next", lambda conversation, seconds: following(conversation))
    monkeypatch.setattr(answer_module, "PING_SECONDS", 0.1)
    monkeypatch.setattr(ToolCallParser, "push", lambda parser, text: [])
    monkeypatch.setattr(Engine, "step", lambda engine: (time.sleep(0.03), step(engine))[1])
    body = {"model": "tiny", "stream": True, "temperature": 0, "ignore_eos": True} | asked
    with httpx.stream("POST", f"{client.base_url}{path}", json=body, timeout=100) as response:
        assert list(response.iter_lines()).count(": ping") >= 2
