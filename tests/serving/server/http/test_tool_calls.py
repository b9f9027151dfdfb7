"""Calls are taken out of a text alike however it is cut into pieces; what is no call stays text."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings, strategies as st

from draftwell.serving.server.http.tool_calls import (
    Call,
    FirstCall,
    Piece,
    TextPiece,
    ToolCallParser,
    joined,
)

ONE = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": [2, "}]"]}}\n</tool_call>'
TWO = '<tool_call>{"name":"say","arguments":{"text":"a </tool_call> \\" b"}}</tool_call>'
TEXTS: dict[str, tuple[str, str, list[tuple[str, str]]]] = {
    "text alone": ("Just text. \n", "Just text. \n", []),
    "a call alone": (ONE, "", [("add", '{"a": 1, "b": [2, "}]"]}')]),
    "text before": (f"Let me see. \n{ONE}", "Let me see.", [("add", '{"a": 1, "b": [2, "}]"]}')]),
    "two calls": (
        f"{ONE}\n{TWO}\n",
        "",
        [("add", '{"a": 1, "b": [2, "}]"]}'), ("say", '{"text":"a </tool_call> \\" b"}')],
    ),
    "text between": (
        f"{TWO} and  then\n{TWO}",
        "and  then",
        [("say", '{"text":"a </tool_call> \\" b"}')] * 2,
    ),
    "another order": (
        '<tool_call>{"arguments": {"a": 1}, "name": "add"}</tool_call>',
        "",
        [("add", '{"a": 1}')],
    ),
    "arguments as a text": (
        '<tool_call>{"name": "add", "arguments": "{\\"a\\": 1}"}</tool_call> ok',
        "ok",
        [("add", '{"a": 1}')],
    ),
    "arguments as a text before the name": (
        '<tool_call>{"arguments": "{\\"a\\": \\"</tool_call>\\"}", "name": "say"}</tool_call>',
        "",
        [("say", '{"a": "</tool_call>"}')],
    ),
    "arguments as a text that is none": (
        '<tool_call>{"name": "add", "arguments": "a = 1"}</tool_call>',
        '<tool_call>{"name": "add", "arguments": "a = 1"}</tool_call>',
        [],
    ),
    "arguments as a text of no object": (
        '<tool_call>{"name": "add", "arguments": "[1]"}</tool_call>',
        '<tool_call>{"name": "add", "arguments": "[1]"}</tool_call>',
        [],
    ),
    "the mark of the end in arguments before the name": (
        f'<tool_call>{{"arguments": {{"a": "</tool_call>"}}, "name": "add"}}</tool_call> and {ONE}',
        "and",
        [("add", '{"a": "</tool_call>"}'), ("add", '{"a": 1, "b": [2, "}]"]}')],
    ),
    "a string that is never closed": (
        f'<tool_call>{{"name": "add}}</tool_call> and\n{ONE}',
        '<tool_call>{"name": "add}</tool_call> and',
        [("add", '{"a": 1, "b": [2, "}]"]}')],
    ),
    "a list": (
        (
            '<tool_call>[{"name": "add", "arguments": {}}, {"name": "say", "arguments": {"x": '
            '"é"}}]\n</tool_call>'
        ),
        "",
        [("add", "{}"), ("say", '{"x": "\\u00e9"}')],
    ),
    "no arguments": ('<tool_call>{"name": "add"}</tool_call>', "", [("add", "{}")]),
    "arguments by another name": (
        '<tool_call>{"name": "add", "parameters": {"a": 1}}</tool_call>',
        "",
        [("add", '{"a": 1}')],
    ),
    "another name in another order": (
        '<tool_call>{"parameters": {"a": 1}, "name": "add"}</tool_call>',
        "",
        [("add", '{"a": 1}')],
    ),
    "arguments by an unknown name": (
        '<tool_call>{"name": "add", "args": {"a": 1}}</tool_call>',
        '<tool_call>{"name": "add", "args": {"a": 1}}</tool_call>',
        [],
    ),
    "a call after the mark in a text": (
        f"Write <tool_call> first.\n{ONE}",
        "Write <tool_call> first.",
        [("add", '{"a": 1, "b": [2, "}]"]}')],
    ),
    "an unknown function": (
        'Well \n<tool_call>{"name": "rm", "arguments": {}}</tool_call>',
        'Well \n<tool_call>{"name": "rm", "arguments": {}}</tool_call>',
        [],
    ),
    "no JSON": ("<tool_call>add(1)</tool_call> ok", "<tool_call>add(1)</tool_call> ok", []),
    "a mark that only begins": ("a < b, <tool, <tool_cal", "a < b, <tool, <tool_cal", []),
    "cut in the name": ('<tool_call>\n{"name": "ad', '<tool_call>\n{"name": "ad', []),
    "cut in the arguments": (
        '<tool_call>\n{"name": "add", "arguments": {"a": "x',
        "",
        [("add", '{"a": "x')],
    ),
    "cut by its end as a stop string": (
        '<tool_call>\n{"arguments": {"a": 1}, "name": "add"}\n',
        "",
        [("add", '{"a": 1}')],
    ),
    "a name that is no JSON": (
        '<tool_call>{"name": "a\\_b", "arguments": {}}</tool_call>',
        '<tool_call>{"name": "a\\_b", "arguments": {}}</tool_call>',
        [],
    ),
    "a name of two lines": (
        '<tool_call>{"name": "add\n", "arguments": {}}</tool_call>',
        '<tool_call>{"name": "add\n", "arguments": {}}</tool_call>',
        [],
    ),
    "a name that is a list": (
        '<tool_call>{"name": ["add"], "arguments": {}}</tool_call>',
        '<tool_call>{"name": ["add"], "arguments": {}}</tool_call>',
        [],
    ),
    "a name that is an object": (
        '<tool_call>{"name": {"add": 1}}',
        '<tool_call>{"name": {"add": 1}}',
        [],
    ),
    "half a character": (
        '<tool_call>{"arguments": {"x": "\\ud83d"}, "name": "say"}</tool_call>',
        "",
        [("say", '{"x": "\\ud83d"}')],
    ),
    "no number": (
        '<tool_call>{"arguments": {"x": NaN}, "name": "say"}</tool_call>',
        '<tool_call>{"arguments": {"x": NaN}, "name": "say"}</tool_call>',
        [],
    ),
    "a number without end": (
        '<tool_call>{"arguments": {"x": 1e999}, "name": "say"}</tool_call>',
        '<tool_call>{"arguments": {"x": 1e999}, "name": "say"}</tool_call>',
        [],
    ),
    "text after a call without its end": (
        '<tool_call>{"name": "add", "arguments": {}}\nIt is 3 < 4.',
        "It is 3 < 4.",
        [("add", "{}")],
    ),
    "a call after one without its end": (
        (
            '<tool_call>{"name": "add", "arguments": {}}\nAnd <tool_call>{"name": "say", '
            '"arguments": {}}'
        ),
        "And",
        [("add", "{}"), ("say", "{}")],
    ),
    "cut in the end": (
        '<tool_call>{"name": "add", "arguments": {}}\n</tool_ca',
        "",
        [("add", "{}")],
    ),
    "cut after the arguments": (
        '<tool_call>{"name": "add", "arguments": {}, "id"',
        "",
        [("add", "{}")],
    ),
    "empty": ("", "", []),
}


def read(pieces: list[str]) -> tuple[str, list[tuple[str, str]]]:
    parser = ToolCallParser({"add", "say"})
    found: list[Piece] = [piece for text in pieces for piece in parser.push(text)] + parser.finish()
    for piece in found:
        assert isinstance(piece, Call) or piece.text, "an empty piece"
    calls = [(call["function"]["name"], call["function"]["arguments"]) for call in joined(found)]
    assert len({call["id"] for call in joined(found)}) == len(calls) == parser.calls
    return "".join(piece.text for piece in found if isinstance(piece, TextPiece)), calls


@pytest.mark.parametrize("case", TEXTS.values(), ids=TEXTS)
def test_text_and_calls_whole_and_letter_by_letter(
    case: tuple[str, str, list[tuple[str, str]]],
) -> None:
    text, said, calls = case
    assert read([text]) == (said, calls)
    assert read([*text]) == (said, calls)


@settings(max_examples=100)
@given(
    st.lists(
        st.sampled_from(
            [
                ONE,
                TWO,
                " ",
                "\n",
                "word",
                "<tool_call>",
                "</tool_call>",
                "{",
                '"name": "add"',
                '"arguments": "</tool_call>',
                "<too",
            ]
        ),
        max_size=6,
    ),
    st.lists(st.integers(1, 30), min_size=1, max_size=40),
)
def test_pieces_change_nothing(parts: list[str], sizes: list[int]) -> None:
    text, pieces = "".join(parts), list[str]()
    while text and sizes:
        size = sizes[len(pieces) % len(sizes)]
        pieces.append(text[:size])
        text = text[size:]
    assert read(pieces) == read(["".join(parts)])


@pytest.mark.parametrize(
    ("text", "within"), [(ONE, False), (ONE[:-20], True), (ONE[:-13], False), ("text", False)]
)
def test_incomplete_arguments_are_known(text: str, within: bool) -> None:
    parser = ToolCallParser({"add"})
    parser.push(text)
    parser.finish()
    assert parser.within_arguments == within


def test_the_mark_in_a_text_holds_nothing_back() -> None:
    parser = ToolCallParser({"add"})
    shown = [
        piece.text
        for letter in "Use <tool_call> \n tags."
        for piece in parser.push(letter)
        if isinstance(piece, TextPiece)
    ]
    assert "".join(shown) == "Use <tool_call> \n tags."


@pytest.mark.parametrize(
    "text",
    [f"Well. {TWO}", f"<tool_call>[]</tool_call>{ONE}", ONE.replace("arguments", "parameters")],
)
def test_an_answer_of_one_call_ends_with_its_arguments(text: str) -> None:
    """Whatever these hold, and whatever comes before."""
    stop, seen = FirstCall({"add", "say"}), ""
    for letter in f"{text} and {ONE}":
        seen += stop.push(letter)
        if stop.stopped:
            break
    assert text.startswith(seen)
    assert text.removeprefix(seen).strip() in ("}\n</tool_call>", "}</tool_call>")
    assert stop.push("more") == ""


def test_strings_end_an_answer_of_one_call_too() -> None:
    stop = FirstCall({"add"}, ["END"])
    assert (stop.push("the END"), stop.stopped) == ("the ", True)


def test_a_call_within_the_least_tokens_is_noticed_after_them() -> None:
    stop = FirstCall({"add"})
    stop.let_pass(ONE[:30])
    assert not stop.stopped
    stop.push(ONE[30:])
    assert stop.stopped


def test_a_whole_call_within_the_least_tokens_ends_nothing_yet() -> None:
    stop = FirstCall({"add"})
    assert (stop.let_pass(ONE), stop.stopped) == (ONE, False)
    stop.push("\n")
    assert stop.stopped


def test_arguments_come_as_they_are_written() -> None:
    parser = ToolCallParser({"add"})
    seen = []
    for letter in ONE:
        seen += [
            piece.arguments
            for piece in parser.push(letter)
            if isinstance(piece, Call) and piece.id is None
        ]
    assert len(seen) == len('{"a": 1, "b": [2, "}]"]}')
    assert json.loads("".join(seen)) == {"a": 1, "b": [2, "}]"]}


@pytest.mark.parametrize(
    "text", [TEXTS["a list"][0], f"{ONE} and {TWO}"], ids=["a list", "one after another"]
)
def test_there_are_no_more_calls_than_are_wanted(text: str) -> None:
    """Within a list, or where the answer's least tokens hold several."""
    for pieces in ([text], [*text]):
        parser = ToolCallParser({"add", "say"}, most=1)
        found = [piece for part in pieces for piece in parser.push(part)] + parser.finish()
        assert [call["function"]["name"] for call in joined(found)] == ["add"]
