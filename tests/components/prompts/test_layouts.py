"""Rows as other people's programs write them: each gives the conversation that the model was asked,
with its tools and its system message, or the reason why it gives none."""

from __future__ import annotations

import json
import random
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from draftwell.components.collect.continuations import asked
from draftwell.components.prompts.messages import NoPrompt
from draftwell.components.prompts.prompt import Prompt, ids_of, prompts_of_row
from draftwell.components.prompts.sources import LeftOut, load_prompts
from tests.support.models.tiny import table_pair
from tests.support.server.served_pair import tiny_pair

FILES = Path(__file__).parents[2] / "data" / "traffic"
"""Small files in public layouts, written by hand from their documentation."""

FIND = {"type": "object", "properties": {"order": {"type": "integer"}}}
TOOL = {"type": "function", "function": {"name": "find", "parameters": FIND}}
CALL = {"id": "c1", "type": "function", "function": {"name": "find", "arguments": {"order": 7}}}
WRITTEN_CALL = {**CALL, "function": {"name": "find", "arguments": '{"order": 7}'}}
ASKED = {"role": "user", "content": "Where is it?"}
CALLED = {"role": "assistant", "content": "", "tool_calls": [CALL]}
RESULT = {"role": "tool", "content": "shipped", "tool_call_id": "c1"}
BRIEF = {"role": "system", "content": "Be brief."}


def one(row: dict[str, Any], **layout: Any) -> Prompt:
    (prompt,) = prompts_of_row(row, "row", **layout)
    return prompt


AGENT: dict[str, dict[str, Any]] = {
    "chat completions": {
        "tools": [TOOL],
        "messages": [
            ASKED,
            {"role": "assistant", "content": None, "tool_calls": [WRITTEN_CALL]},
            RESULT,
        ],
    },
    "legacy functions": {
        "functions": [TOOL["function"]],
        "messages": [
            ASKED,
            {"role": "assistant", "content": None, "tool_calls": [WRITTEN_CALL]},
            {**RESULT, "role": "function"},
        ],
    },
    "responses": {
        "tools": [{"type": "function", **TOOL["function"]}, {"type": "web_search"}],
        "input": [
            {"role": "user", "content": [{"type": "input_text", "text": "Where is it?"}]},
            {"type": "reasoning", "summary": [], "encrypted_content": "gAAAA"},
            {"type": "function_call", "call_id": "c1", "name": "find", "arguments": '{"order": 7}'},
            {"type": "function_call_output", "call_id": "c1", "output": "shipped"},
        ],
    },
    "anthropic": {
        "tools": [{"name": "find", "input_schema": FIND}],
        "messages": [
            ASKED,
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "hm", "signature": "x"},
                    {"type": "tool_use", "id": "c1", "name": "find", "input": {"order": 7}},
                ],
            },
            {
                "role": "user",
                "content": [
                    {
                        "type": "tool_result",
                        "tool_use_id": "c1",
                        "content": [{"type": "text", "text": "shipped"}],
                    }
                ],
            },
        ],
    },
    "null keys of a table": {
        "tools": json.dumps([TOOL]),
        "messages": json.dumps([ASKED, {**CALLED, "content": None}, RESULT]),
    },
}


@pytest.mark.parametrize("name", AGENT)
def test_an_agents_turn_keeps_its_tools_calls_and_results(name: str) -> None:
    prompt = one(AGENT[name])
    assert (prompt.turns, list(prompt.after), list(prompt.tools)) == (
        ["Where is it?"],
        [CALLED, RESULT],
        [TOOL],
    )


def test_tools_that_may_not_be_called_are_not_offered() -> None:
    assert one({"messages": [ASKED], "tools": [TOOL], "tool_choice": "none"}).tools == ()


def test_an_answer_after_results_is_recorded_and_a_call_is_not() -> None:
    answer = {"role": "assistant", "content": "In Bergen."}
    assert one({"messages": [ASKED, CALLED, RESULT, answer]}).answers == ("In Bergen.",)
    assert one({"messages": [ASKED, CALLED]}).answers == ()


@pytest.mark.parametrize(
    ("row", "messages", "turns"),
    [
        ({"system": "Be brief.", "messages": [ASKED]}, [BRIEF], ["Where is it?"]),
        (
            {"system": [{"type": "text", "text": "Be brief."}], "messages": [ASKED]},
            [BRIEF],
            ["Where is it?"],
        ),
        ({"instructions": "Be brief.", "input": "Where is it?"}, [BRIEF], ["Where is it?"]),
        ({"system_prompt": "Be brief.", "question": "a"}, [BRIEF], ["a"]),
        ({"system": "not this", "messages": [BRIEF, ASKED]}, [BRIEF], ["Where is it?"]),
        ({"messages": [{"role": "developer", "content": "Be brief."}, ASKED]}, [BRIEF], None),
        ({"conversation": [{"role": "user", "content": "a"}]}, [], ["a"]),
        ({"conversations": {"from": ["human", "gpt"], "value": ["a", "b"]}}, [], ["a"]),
        ({"messages": [{"type": "human", "content": "a"}]}, [], ["a"]),
        ({"input": [[{"role": "user", "content": "a"}]], "type": "GENERATION"}, [], ["a"]),
        ({"messages": [{"role": "prompter", "text": "a"}]}, [], ["a"]),
        ({"instruction": "do", "context": "this"}, [], ["do\n\nthis"]),
        ({"prompt": '{"a": 1}'}, [], ['{"a": 1}']),
        ({"prompt": '[{"type": "circle"}]'}, [], ['[{"type": "circle"}]']),
        ({"text": '{"content": 1} fix it'}, [], ['{"content": 1} fix it']),
        ({"question": '[{"role": "x"}]'}, [], ['[{"role": "x"}]']),
        ({"text": "a", "url": "http://x.org/images/1"}, [], ["a"]),
        ({"messages": [ASKED], "model": "gpt-4o-audio-preview"}, [], None),
        ({"prompt": "a", "model": "speechless-13b"}, [], ["a"]),
        ({"prompt": "[INST] a [/INST]"}, [], ["[INST] a [/INST]"]),
        ({"prompt": [{"role": "user", "content": "a"}]}, [], ["a"]),
        ({"prompt": None, "prompt_id": 7, "messages": [ASKED]}, [], ["Where is it?"]),
        ({"prompt": "a", "tokens": 12, "tools": None}, [], ["a"]),
    ],
)
def test_other_names_of_the_same(
    row: dict[str, Any], messages: list[Any], turns: list[str] | None
) -> None:
    prompt = one(row)
    assert list(prompt.messages) == messages
    assert prompt.turns == (turns or ["Where is it?"])
    assert not prompt.raw


def test_completions_are_raw_wherever_they_come_from() -> None:
    body = {"model": "m", "prompt": ["a", "b"], "max_tokens": 4}
    for row in (body, {"custom_id": "x", "url": "/v1/completions", "body": body}):
        assert [(p.turns, p.raw) for p in prompts_of_row(row, "x")] == [
            (["a"], True),
            (["b"], True),
        ]
    assert [p.raw for p in prompts_of_row({"prompt": "a", "model": "m"}, "x")] == [False]
    said = '[{"role": "user", "content": "a"}]'
    served = {"prompt": said, "model": "image-llama"}
    assert [(p.turns, p.raw) for p in prompts_of_row(served, "x", bodies=True)] == [([said], True)]
    tokens = [p.tokens for p in prompts_of_row({**body, "prompt": [[1, 2], [3]]}, "x")]
    assert tokens == [((1, 2),), ((3,),)]
    assert one({**body, "prompt": [4, 5]}).tokens == ((4, 5),)
    assert one({**body, "prompt": [4]}).tokens == ((4,),)
    assert ids_of(table_pair(), one({**body, "prompt": [4, 5]})) == [4, 5]


@pytest.mark.parametrize(
    ("row", "told"),
    [
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "image_url"),
        ({"messages": [{"role": "user", "content": [{"type": "input_audio"}]}]}, "input_audio"),
        ({"messages": [{"role": "wizard", "content": "a"}]}, "'wizard'"),
        ({"messages": [BRIEF]}, "user"),
        ({"messages": ["a", 3]}, "`messages`"),
        ({"messages": [ASKED, {"role": "assistant", "tool_calls": [{"id": "x"}]}]}, "`name`"),
        ({"messages": [ASKED], "tools": "none"}, "`tools`"),
        ({"input": [{"type": "computer_call", "action": {}}]}, "computer_call"),
        ({"messages": {}}, "empty"),
        ({"prompt": "half \ud83c"}, "U+D83C"),
        ({"prompt": "bytes \udcff"}, "UTF-8"),
        ({"turns": ["a", None]}, "`turns`"),
        ({"timestamp": 1, "input_length": 6, "hash_ids": [1]}, "timestamp, input_length, hash_ids"),
        ({"messages": [{"from": "human", "value": 7}]}, "`content`"),
        ({"prompt": 7}, "`prompt`"),
        ({"prompt": [True]}, "`prompt`"),
        ({"messages": [ASKED, {"role": "assistant", "tool_calls": 5}]}, "`name`"),
        ({"messages": [{"role": "user", "content": {"a": 1}}]}, "`content`"),
    ],
)
def test_what_cannot_be_read_is_named(row: dict[str, Any], told: str) -> None:
    with pytest.raises(NoPrompt) as refused:
        prompts_of_row(row, "row")
    assert told in str(refused.value)


WORDS = (
    *("role", "from", "content", "value", "text", "type", "tool_calls", "function", "name"),
    *("arguments", "messages", "conversations", "prompt", "turns", "input", "tools", "system"),
    *("body", "kwargs", "observations", "id", "model", "max_tokens", "raw", "function_call"),
)
VALUES = (
    *("user", "assistant", "gpt", "tool", "function_call", "tool_use", "tool_result", "GENERATION"),
    *("", "[1]", '{"a": 1}', '[{"role": "user", "content": "a"}]', "[{'role': 'user'}]"),
    *(None, True, 0, 5, 1.5),
)


def anything(chance: random.Random, depth: int) -> Any:
    """JSON of words that mean something, in places where they mean nothing."""
    kind = chance.random()
    if depth == 0 or kind < 0.4:
        return chance.choice(VALUES)
    parts = [anything(chance, depth - 1) for _ in range(chance.randint(0, 4))]
    return parts if kind < 0.65 else {chance.choice(WORDS): part for part in parts}


def test_no_row_is_more_than_a_row_without_a_prompt() -> None:
    chance, found = random.Random(5), 0
    for _ in range(4000):
        row = {chance.choice(WORDS): anything(chance, 4) for _ in range(4)}
        for layout in ({}, {"cells": True}, {"bodies": True}):
            with suppress(NoPrompt):
                found += len(prompts_of_row(row, "row", **layout))
    assert found > 500


@pytest.mark.parametrize("column", ["prompt", "text"])
def test_a_cell_that_only_begins_like_json_is_a_text(column: str) -> None:
    assert one({"id": "1", column: "[sic] a text"}, cells=True).turns == ["[sic] a text"]


@pytest.mark.parametrize(
    ("cell", "turns"),
    [
        ('[{"role": "user", "content": "a"}]', ["a"]),
        ("[{'from': 'human', 'value': 'a'}, {'from': 'gpt', 'value': None}]", ["a"]),
        ('{"messages": [{"role": "user", "content": "a"}]}', ["a"]),
        ('["a", "b"]', ["a", "b"]),
        ("plain", ["plain"]),
    ],
)
@pytest.mark.parametrize("column", ["prompt", "text", "conversation"])
def test_json_in_a_cell_is_a_conversation(cell: str, turns: list[str], column: str) -> None:
    assert one({"id": "1", column: cell}, cells=True).turns == turns


@pytest.mark.parametrize(
    ("column", "cell"),
    [
        ("text", '{"a": 1}'),
        ("messages", '[{"role": "user", "content": "cut o'),
        ("text", "[{'role': 'user' 'content': 'a'}]"),
        ("conversations", "[array(...)]"),
    ],
)
def test_json_in_a_cell_is_never_a_prompt(column: str, cell: str) -> None:
    with pytest.raises(NoPrompt):
        prompts_of_row({column: cell}, "row", cells=True)


TEMPLATES = {
    "none for tools": None,
    "its own": "{{ tools | tojson if tools else '' }}"
    "{% for m in messages %}{{ m.role }}:{{ m.content }}"
    "{% for c in m.tool_calls or [] %}{{ c.function.arguments.order }}{% endfor %};{% endfor %}",
}


@pytest.mark.parametrize("template", TEMPLATES)
def test_a_request_is_encoded_as_a_server_encodes_it(template: str) -> None:
    """Everywhere a prompt becomes tokens: `ids_of` for calibration, bench and gate, `asked` for
    collection."""
    pair = tiny_pair(1)
    pair.chat = True
    pair.tokenizer.chat_template = TEMPLATES[template] or pair.tokenizer.chat_template
    prompt = one({**AGENT["chat completions"], "system": "Be brief."})
    served = pair.encode_chat([BRIEF, ASKED, CALLED, RESULT], tools=[TOOL])
    assert ids_of(pair, prompt) == served
    history = [*prompt.messages, {"role": "user", "content": prompt.prompt}]
    assert asked(pair, prompt, 0, history, 5000) == (served, 0)
    text = pair.decode(served)
    assert all(part in text for part in ("Be brief.", "find", "shipped", "7"))
    assert len(asked(pair, prompt, 0, history, 60)[0]) == 60
    pair.chat = False
    assert "find" in pair.decode(ids_of(pair, prompt))


READ = {
    "openai_batch.jsonl": (
        ["request-1", "request-2", "request-3.0", "request-3.1"],
        ["/v1/embeddings", "batch"],
    ),
    "sharegpt.json": (["QWJhYvA_0", "tools_0"], ["empty", "user"]),
    "litellm.jsonl": (["chatcmpl-1", "chatcmpl-2"], ["aembedding", "empty"]),
    "langfuse.jsonl": (["obs-1", "obs-3", "tr-3"], ["SPAN"]),
    "langfuse.csv": (["langfuse/0", "langfuse/2"], ["SPAN"]),
    "alpaca.json": (["alpaca/0", "alpaca/1"], ["empty"]),
    "vllm.log": (["cmpl-51a1-0", "chatcmpl-52b2", "chatcmpl-53c3"], []),
}


@pytest.mark.parametrize("name", READ)
def test_files_in_public_layouts(name: str) -> None:
    left = LeftOut()
    prompts = {prompt.id: prompt for prompt in load_prompts(FILES / name, left_out=left)}
    ids, reasons = READ[name]
    assert (list(prompts), len(left.reasons)) == (ids, len(reasons))
    assert all(reason in str(left) for reason in reasons)
    if name == "sharegpt.json":
        assert prompts["QWJhYvA_0"].answers == ("Up to six metres.", "About two metres.")
        tools = prompts["tools_0"]
        assert tools.messages == ({"role": "system", "content": "Use the tools."},)
        assert tools.tools[0]["function"]["name"] == "get_time"
        assert [message["role"] for message in tools.after] == ["assistant", "tool"]
    if name == "litellm.jsonl":
        assert len(prompts["chatcmpl-1"].tools) == 1
        assert len(prompts["chatcmpl-1"].after) == 2
    if name == "vllm.log":
        raw, tokens, templated = prompts.values()
        assert (raw.prompt, raw.raw) == ('It\'s a "test":\nwrite on', True)
        assert tokens.tokens == ((5, 6, 7),)
        assert templated.prompt == "<|im_start|>user\nDon't stop<|im_end|>\n"
