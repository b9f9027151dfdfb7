"""Tools by OpenAI's own client: calls that have to be made, calls that the model decides about,
streams, histories and templates."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import openai
import pytest

from draftwell.serving.runtime.grammar import guidance
from draftwell.serving.server.http.requests import MOST_CALLS, FunctionSpec, calls_grammar
from draftwell.serving.server.model.served_model import ServedModel
from tests.support.server.functions import POINT, SCHEMAS, TOOLS
from tests.support.server.served_pair import calling_pair, tiny_tokenizer

STRICT = [{"type": "function", "function": tool["function"] | {"strict": True}} for tool in TOOLS]
ASK: dict[str, Any] = {
    "model": "tiny",
    "messages": [{"role": "user", "content": "How warm?"}],
    "max_tokens": 900,
    "temperature": 0,
}
NATIVE = (
    "{% if tools %}<|start|>tools\n{% for t in tools %}{{ t | tojson }}\n{% endfor "
    "%}<|end|>{% endif %}"
    "{% for m in messages %}<|start|>{{ m.role }}\n{{ m.content }}"
    "{% for c in m.tool_calls or [] %}CALL {{ c.function.name }} {{ c.function.arguments | "
    "tojson }}{% endfor %}<|end|>{% endfor %}"
    "<|start|>assistant\n"
)


@pytest.fixture(scope="module")
def served() -> ServedModel:
    return calling_pair()


def ask(client: openai.OpenAI, **change: Any) -> Any:
    return client.chat.completions.create(**(ASK | {"tools": TOOLS} | change))


def called(choice: Any) -> list[tuple[str, Any]]:
    """Names and arguments, which follow their schemas."""
    calls = [
        (call.function.name, json.loads(call.function.arguments))
        for call in choice.message.tool_calls
    ]
    for name, arguments in calls:
        jsonschema.validate(arguments, SCHEMAS[name])
    assert len({call.id for call in choice.message.tool_calls}) == len(calls)
    assert choice.finish_reason == "tool_calls"
    return calls


@pytest.mark.parametrize("temperature", [0, 1])
def test_a_call_that_has_to_be_made(client: openai.OpenAI, temperature: float) -> None:
    for seed in range(2 if temperature else 1):
        choice = ask(
            client,
            tool_choice="required",
            temperature=temperature,
            seed=seed,
            parallel_tool_calls=False,
        ).choices[0]
        assert len(called(choice)) == 1
        assert choice.message.content is None


@pytest.mark.parametrize("name", SCHEMAS)
def test_a_function_that_has_to_be_called(client: openai.OpenAI, name: str) -> None:
    choices = ask(
        client,
        tool_choice={"type": "function", "function": {"name": name}},
        n=2,
        temperature=1,
        seed=1,
    ).choices
    for choice in choices:
        assert [found for found, _ in called(choice)] == [name]


def test_calls_of_functions_without_a_draft_are_those_with_one(client: openai.OpenAI) -> None:
    """Names and marks are forced: few passes of the target are left."""
    asked = {"tool_choice": "required", "parallel_tool_calls": False}
    plain = ask(client, **asked, extra_body={"speculation": {"enabled": False}})
    fast = ask(client, **asked)
    assert called(plain.choices[0]) == called(fast.choices[0])
    assert fast.speculation["target_calls"] < 0.6 * plain.speculation["target_calls"]


def test_several_calls(client: openai.OpenAI, served: ServedModel) -> None:
    newline = served.encode("\n")[0]  # instead of the end
    choice = ask(
        client,
        tools=TOOLS[2:],
        tool_choice="required",
        logit_bias={str(newline): 20},
        max_tokens=2000,
    ).choices[0]
    assert 2 <= len(called(choice)) <= MOST_CALLS


@pytest.mark.parametrize(
    "choice", ["required", {"type": "function", "function": {"name": "go_to"}}], ids=str
)
def test_a_stream_adds_up_to_the_whole(client: openai.OpenAI, choice: Any) -> None:
    asked: Any = {"tool_choice": choice, "temperature": 1, "seed": 3, "parallel_tool_calls": False}
    whole = called(ask(client, **asked).choices[0])
    with client.chat.completions.stream(**(ASK | {"tools": STRICT} | asked)) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_completion()
    assert called(final.choices[0]) == whole
    assert "tool_calls.function.arguments.delta" in kinds
    pieces = [
        call
        for chunk in ask(client, **asked, stream=True)
        for choice in chunk.choices
        for call in choice.delta.tool_calls or ()
    ]
    assert (pieces[0].function.name, pieces[0].type, pieces[0].index) == (
        whole[0][0],
        "function",
        0,
    )
    assert pieces[0].id.startswith("call_")
    assert all(piece.id is None and piece.function.name is None for piece in pieces[1:])
    assert json.loads("".join(piece.function.arguments or "" for piece in pieces)) == whole[0][1]
    assert len(pieces) > 3


def test_the_model_may_say_something_instead(client: openai.OpenAI) -> None:
    for tools in (TOOLS, STRICT):
        choice = ask(client, tools=tools, max_tokens=12).choices[0]
        assert choice.message.tool_calls is None
        assert choice.message.content
        assert choice.finish_reason in ("stop", "length")
        streamed = "".join(
            chunk.choices[0].delta.content or ""
            for chunk in ask(client, tools=tools, max_tokens=12, stream=True)
        )
        assert streamed == choice.message.content


def test_a_call_that_the_model_begins_follows_its_schema_if_tools_are_strict(
    client: openai.OpenAI, served: ServedModel
) -> None:
    mark = served.pair.tokenizer.convert_tokens_to_ids("<tool_call>")
    choice = ask(
        client,
        tools=STRICT,
        logit_bias={str(mark): 100},
        parallel_tool_calls=False,
        temperature=1,
        seed=5,
    ).choices[0]
    assert len(called(choice)) == 1
    loose = ask(client, logit_bias={str(mark): 100}, max_tokens=20).choices[0]
    assert loose.message.tool_calls is None
    assert loose.message.content == "<tool_call>" * 20


@pytest.mark.parametrize("marks", [True, False], ids=["tokens", "text"])
def test_no_spelling_of_the_mark_leaves_the_schema(marks: bool) -> None:
    """Not with the mark's token, not letter by letter, and not after as many calls as there may
    be."""
    tokenizer = tiny_tokenizer()
    if marks:
        tokenizer.add_tokens(["<tool_call>", "</tool_call>"])
    reader = guidance.GuidanceTokenizer(
        tokenizer, len(tokenizer), frozenset([tokenizer.eos_token_id])
    )
    tools = [FunctionSpec.model_validate(tool["function"]) for tool in STRICT[2:]]
    definition = calls_grammar(tools, lambda text: marks, most=1, text=True)

    def letters(text: str) -> list[int]:
        return [one for letter in text for one in tokenizer.encode(letter)]

    def fits(ids: list[int]) -> bool:
        matcher = guidance.GuidanceGrammar(reader, definition).matcher()
        return all(matcher.allowed()[token] and matcher.accept(token) for token in ids)

    begin, end = (
        tokenizer.encode(mark) if marks else letters(mark)
        for mark in ("<tool_call>", "</tool_call>")
    )
    call = [*begin, *letters('\n{"name": "stop", "arguments": {}}\n'), *end]
    wrong = letters('<tool_call>\n{"name": "stop", "arguments": {"city": 5}}\n</tool_call>')
    assert fits([*letters("Well <tool_call, <tool_cal>: "), *call, *letters(" and so on.")])
    assert not fits([*letters("Well: "), *wrong])
    assert not fits([*call, *letters(" and "), *wrong]), "nor after the last call that may be made"


def test_calls_or_an_answer_in_the_format(client: openai.OpenAI, served: ServedModel) -> None:
    """Where the model decides; where it has to call, the format of an answer has no place."""
    mark = str(served.pair.tokenizer.convert_tokens_to_ids("<tool_call>"))
    form: Any = {"type": "json_schema", "json_schema": {"name": "point", "schema": POINT}}
    for seed in range(3):
        asked = {
            "response_format": form,
            "parallel_tool_calls": False,
            "temperature": 1,
            "seed": seed,
        }
        assert len(called(ask(client, **asked, logit_bias={mark: 100}).choices[0])) == 1
        answer = ask(client, **asked, logit_bias={mark: -100}).choices[0]
        assert (answer.finish_reason, answer.message.tool_calls) == ("stop", None)
        jsonschema.validate(json.loads(answer.message.content), POINT)
        assert len(called(ask(client, **asked, tool_choice="required").choices[0])) == 1
    chosen = ask(
        client, extra_body={"guided_choice": ["yes", "no"]}, logit_bias={mark: -100}
    ).choices[0]
    assert chosen.message.content in ("yes", "no")


@pytest.mark.parametrize(("unknown", "named"), [("tool", "tools"), ("format", "response_format")])
def test_what_is_refused_is_named_beside_a_format(
    client: openai.OpenAI, unknown: str, named: str
) -> None:
    odd = {"type": "object", "properties": {"x": {"type": "array", "uniqueItems": True}}}
    parameters, schema = (odd, POINT) if unknown == "tool" else (POINT, odd)
    form: Any = {"type": "json_schema", "json_schema": {"name": "point", "schema": schema}}
    tools = [{"type": "function", "function": {"name": "say", "parameters": parameters}}]
    with pytest.raises(openai.BadRequestError) as caught:
        ask(client, tools=tools, response_format=form)
    assert caught.value.param == named
    assert "uniqueItems" in caught.value.message


def test_a_single_call_is_not_cut_by_the_mark_within_its_arguments(client: openai.OpenAI) -> None:
    tag = {
        "type": "object",
        "properties": {"tag": {"const": "a </tool_call> b"}},
        "required": ["tag"],
        "additionalProperties": False,
    }
    tools = [{"type": "function", "function": {"name": "say", "parameters": tag}}]
    choice = ask(client, tools=tools, tool_choice="required", parallel_tool_calls=False).choices[0]
    assert [json.loads(call.function.arguments) for call in choice.message.tool_calls] == [
        {"tag": "a </tool_call> b"}
    ]
    assert choice.finish_reason == "tool_calls"


def test_none_means_none(client: openai.OpenAI) -> None:
    without = ask(client, tools=openai.NOT_GIVEN, max_tokens=12)
    none = ask(client, tool_choice="none", max_tokens=12)
    assert none.choices[0].message.content == without.choices[0].message.content
    assert none.usage.prompt_tokens == without.usage.prompt_tokens


def test_a_call_that_is_cut_says_so(client: openai.OpenAI) -> None:
    asked = {"tool_choice": {"type": "function", "function": {"name": "weather"}}}
    choice = ask(client, **asked, max_tokens=60).choices[0]
    assert choice.finish_reason == "length"
    assert choice.message.tool_calls[0].function.name == "weather"
    assert choice.message.tool_calls[0].function.arguments.startswith("{")


def test_a_stop_string_within_arguments_leaves_no_call_to_make(client: openai.OpenAI) -> None:
    asked = {
        "tool_choice": {"type": "function", "function": {"name": "weather"}},
        "stop": ['"unit'],
    }
    choice = ask(client, **asked).choices[0]
    assert choice.finish_reason == "stop"
    assert choice.message.tool_calls[0].function.arguments.startswith('{"city"')
    *_, last = [
        chunk.choices[0].finish_reason
        for chunk in ask(client, **asked, stream=True)
        if chunk.choices
    ]
    assert last == "stop"


def test_logprobs_and_traces_of_streams_are_complete(client: openai.OpenAI) -> None:
    asked = {
        "tool_choice": "required",
        "logprobs": True,
        "parallel_tool_calls": False,
        "extra_body": {"speculation": {"trace": True}},
    }
    whole = ask(client, **asked)
    rated, traced = 0, 0
    for chunk in ask(client, **asked, stream=True):
        rated += sum(len(choice.logprobs.content) for choice in chunk.choices if choice.logprobs)
        traced += len((chunk.model_extra or {}).get("speculation", {}).get("tokens", ()))
    assert (
        rated == traced == whole.usage.completion_tokens == len(whole.choices[0].logprobs.content)
    )


HISTORY: list[Any] = [
    {"role": "user", "content": "How warm?"},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {
                "id": "call_1",
                "type": "function",
                "function": {"name": "weather", "arguments": '{"city": "Rom", "unit": "C"}'},
            }
        ],
    },
    {"role": "tool", "tool_call_id": "call_1", "content": [{"type": "text", "text": "22"}]},
]


def prompt_of(
    client: openai.OpenAI, served: ServedModel, monkeypatch: pytest.MonkeyPatch, **asked: Any
) -> str:
    seen: list[list[int]] = []
    right = served.pair.encode_chat
    monkeypatch.setattr(
        served.pair,
        "encode_chat",
        lambda *given, **options: seen.append(right(*given, **options)) or seen[-1],
    )
    ask(client, messages=HISTORY, max_tokens=1, **asked)
    return str(served.pair.tokenizer.decode(seen[0]))


def test_a_template_that_knows_tools_gets_them(
    client: openai.OpenAI, served: ServedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(served.pair.tokenizer, "chat_template", NATIVE)
    prompt = prompt_of(client, served, monkeypatch)
    assert '"description": "Weather of a city"' in prompt
    assert 'CALL weather {"city": "Rom", "unit": "C"}<|end|><|start|>tool\n22<|end|>' in prompt
    assert "tools\n" not in prompt_of(client, served, monkeypatch, tool_choice="none")


@pytest.mark.parametrize(
    "asked",
    [
        {
            "messages": [
                HISTORY[0],
                {
                    "role": "assistant",
                    "tool_calls": [{"function": {"name": "weather", "arguments": "no object"}}],
                },
            ],
            "tools": openai.NOT_GIVEN,
        },
        {"tools": TOOLS[2:]},
    ],
    ids=["arguments", "schema"],
)
def test_a_template_that_trips_over_tools_is_the_requests_error(
    client: openai.OpenAI, served: ServedModel, monkeypatch: pytest.MonkeyPatch, asked: Any
) -> None:
    """As templates do that expect arguments to be an object, or functions to have a description."""
    monkeypatch.setattr(
        served.pair.tokenizer,
        "chat_template",
        (
            "{% for t in tools or [] %}{{ t.function.description + '.' }}{% endfor %}"
            "{% for m in messages %}{% for c in m.tool_calls or [] %}{% for k in "
            "c.function.arguments.items() %}{{ k }}{% endfor %}{% endfor %}"
            "{{ m.content | length + (none if m.role == 'system' else 1) }}{% endfor %}"
        ),
    )
    with pytest.raises(openai.BadRequestError) as error:
        ask(client, **asked, max_tokens=1)
    assert error.value.param == "messages"
    with pytest.raises(openai.InternalServerError):  # the template's own fault
        ask(
            client,
            messages=[{"role": "system", "content": "x"}],
            tools=openai.NOT_GIVEN,
            max_tokens=1,
        )


def test_a_template_that_knows_none_gets_them_as_text(
    client: openai.OpenAI, served: ServedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = prompt_of(client, served, monkeypatch)
    assert prompt.startswith("<|start|>system\nYou may call functions")
    assert '{"name": "weather", "description": "Weather of a city", "parameters": {' in prompt
    assert (
        '<|start|>assistant\n<tool_call>\n{"name": "weather", "arguments": {"city": "Rom", '
        '"unit": "C"}}\n</tool_call><|end|>'
    ) in prompt
    assert "<|start|>user\n<tool_response>\n22\n</tool_response><|end|><|start|>assistant" in prompt
    again = prompt_of(client, served, monkeypatch, tool_choice="none")
    assert "You may call" not in again
    assert "<tool_response>" in again


def test_an_answer_can_be_sent_back_as_it_came(client: openai.OpenAI) -> None:
    first = ask(client, tool_choice="required", parallel_tool_calls=False).choices[0].message
    result = {"role": "tool", "tool_call_id": first.tool_calls[0].id, "content": "done"}
    second = ask(client, messages=[*ASK["messages"], first.model_dump(), result], max_tokens=5)
    assert second.usage.completion_tokens <= 5


@pytest.mark.parametrize(
    ("asked", "param"),
    [
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        ({"tools": [TOOLS[0], TOOLS[0]]}, "tools"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
        ({"tools": TOOLS * 50}, "tools"),
        ({"tool_choice": "always"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "fly"}}}, "tool_choice"),
        ({"tools": [], "tool_choice": "required"}, "tool_choice"),
        ({"extra_body": {"guided_regex": "a"}}, "tools"),
        ({"extra_body": {"guided_regex": "a"}, "tool_choice": "required"}, "tools"),
        (
            {
                "tool_choice": "required",
                "tools": [
                    {
                        "type": "function",
                        "function": {
                            "name": "f",
                            "parameters": {
                                "type": "object",
                                "properties": {"a": {"type": "array", "uniqueItems": True}},
                            },
                        },
                    }
                ],
            },
            "tools",
        ),
        (
            {
                "tools": [
                    {"type": "function", "function": {"name": "f", "parameters": {"type": "array"}}}
                ]
            },
            "tools[0].function.parameters",
        ),
        (
            {
                "tools": [
                    {
                        "type": "function",
                        "function": {"name": "f", "parameters": {"type": ["object", "null"]}},
                    }
                ]
            },
            "tools[0].function.parameters",
        ),
        (
            {
                "messages": [
                    {"role": "user", "content": "x", "tool_calls": HISTORY[1]["tool_calls"]}
                ]
            },
            "messages[0]",
        ),
    ],
    ids=lambda value: str(value)[:60],
)
def test_what_cannot_be_done_is_refused(
    client: openai.OpenAI, asked: dict[str, Any], param: str
) -> None:
    with pytest.raises(openai.BadRequestError) as error:
        ask(client, **asked)
    assert error.value.param == param
    assert "\n" not in error.value.message


def test_a_schema_that_cannot_be_enforced_matters_only_where_it_has_to_be(
    client: openai.OpenAI,
) -> None:
    parameters = {"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}}
    tool: Any = {"type": "function", "function": {"name": "f", "parameters": parameters}}
    assert ask(client, tools=[tool], max_tokens=3).choices[0].message.content is not None
