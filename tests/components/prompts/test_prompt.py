"""Prompt files: both row forms, compressed or not, and one clear line for everything that is wrong
with them."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from draftwell.components.bench.answers.checks import checker_for
from draftwell.components.prompts.prompt import Prompt, demo_prompts, read_prompts
from tests.support.errors import raises_code

GOOD = '{"prompt": "Hello"}\n'


def write(path: Path, text: str | bytes) -> Path:
    data = text if isinstance(text, bytes) else text.encode()
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return path


@pytest.mark.parametrize("name", ["p.jsonl", "p.jsonl.gz"])
def test_both_forms_of_rows_are_read(tmp_path: Path, name: str) -> None:
    rows = [
        {"id": "a", "task": "qa", "prompt": "Grüße?", "reference": "42"},
        {
            "question_id": 7,
            "category": "chat",
            "turns": ["one", "two"],
            "reference": ["first", "second"],
        },
        {"prompt": "x", "turns": None},
    ]
    path = write(tmp_path / name, "\n\n".join(json.dumps(row, ensure_ascii=False) for row in rows))
    assert read_prompts(path) == [
        Prompt("a", "qa", ["Grüße?"], "42"),
        Prompt("7", "chat", ["one", "two"], "first"),
        Prompt("line-5", None, ["x"], None),
    ]


SYSTEM, FIRST, ANSWER, SECOND = (
    {"role": role, "content": text}
    for role, text in (
        ("system", "Sei höflich."),
        ("user", "你好吗？"),
        ("assistant", "很好。"),
        ("user", "و أنت؟ 🙂"),
    )
)


@pytest.mark.parametrize(
    ("said", "messages", "turns", "answers"),
    [
        ([SYSTEM, FIRST], (SYSTEM,), ["你好吗？"], ()),
        # a request: what came before stays verbatim
        ([SYSTEM, FIRST, ANSWER, SECOND], (SYSTEM, FIRST, ANSWER), ["و أنت؟ 🙂"], ()),
        # a recording
        (
            [SYSTEM, FIRST, ANSWER, SECOND, ANSWER],
            (SYSTEM,),
            ["你好吗？", "و أنت؟ 🙂"],
            ("很好。", "很好。"),
        ),
        (
            [FIRST, SECOND, ANSWER],
            (FIRST,),
            ["و أنت؟ 🙂"],
            ("很好。",),
        ),  # nobody answered the first
        ([{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}], (), ["a"], ("b",)),
        (
            [
                {
                    "role": "user",
                    "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}],
                }
            ],
            (),
            ["a\nb"],
            (),
        ),
    ],
)
def test_recorded_messages_become_turns_and_the_messages_before_them(
    tmp_path: Path,
    said: list[dict[str, str]],
    messages: tuple[dict[str, str], ...],
    turns: list[str],
    answers: tuple[str, ...],
) -> None:
    (prompt,) = read_prompts(write(tmp_path / "p.jsonl", json.dumps({"messages": said})))
    assert (prompt.messages, prompt.turns, prompt.answers) == (messages, turns, answers)
    assert prompt.reference == (answers[0] if answers else None)


def test_other_keys_are_kept_for_those_who_check_answers(tmp_path: Path) -> None:
    row = {
        "id": "a",
        "task": "qa",
        "prompt": "x",
        "responses": ["y"],
        "reference": None,
        "answer": "#### 4",
        "test_list": ["assert f() == 1"],
    }
    (prompt,) = read_prompts(write(tmp_path / "p.jsonl", json.dumps(row)))
    assert prompt.fields == {"answer": "#### 4", "test_list": ["assert f() == 1"]}
    assert (prompt.answers, prompt.reference) == (("y",), "y")


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"test": 5, "entry_point": "f"}, "`test`"),
        ({"test": "def check(f): pass", "entry_point": ["f"]}, "`entry_point`"),
        ({"test_list": "assert f() == 1"}, "`test_list`"),
        ({"test_list": ["assert f()"], "test_setup_code": ["import os"]}, "`test_setup_code`"),
        ({"answerKey": "B", "choices": {"text": "bank"}}, "`choices`"),
        ({"answer": "B", "options": "A)bank B)library"}, "`options`"),
    ],
)
def test_what_no_checker_can_read_is_found_before_anything_is_measured(
    tmp_path: Path, fields: dict[str, Any], name: str
) -> None:
    path = write(tmp_path / "p.jsonl", GOOD + json.dumps({"prompt": "x", **fields}))
    with raises_code("bad_prompt", "p.jsonl line 2", name) as error:
        read_prompts(path)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "fields",
    [
        {"test": 5},
        {"choices": 5},
        {"choices": 5, "answer_key": "Boston"},
        {"test_list": []},
        {"answer": ["1", "2"]},
    ],
)
def test_fields_of_other_tables_may_be_anything_and_grade_nothing(
    tmp_path: Path, fields: dict[str, Any]
) -> None:
    (prompt,) = read_prompts(write(tmp_path / "p.jsonl", json.dumps({"prompt": "x", **fields})))
    assert prompt.fields == fields
    assert checker_for(prompt) is None


@pytest.mark.parametrize(
    "fields",
    [
        {"choices": [1, 2.5, "x"], "answer_key": "A"},
        {"choices": {"label": ["A", "B"], "text": ["x", "y"]}, "answerKey": "A"},
    ],
)
def test_choices_that_pass_the_check_grade_an_answer(
    tmp_path: Path, fields: dict[str, Any]
) -> None:
    (prompt,) = read_prompts(write(tmp_path / "p.jsonl", json.dumps({"prompt": "x", **fields})))
    assert prompt.fields == fields
    checker = checker_for(prompt)
    assert checker is not None
    assert (checker(prompt, "A"), checker(prompt, "B")) == (True, False)


def test_a_limit_reads_no_further(tmp_path: Path) -> None:
    path = write(
        tmp_path / "p.jsonl", "".join(f'{{"prompt": "{i}"}}\n' for i in range(5)) + "broken"
    )
    assert [p.prompt for p in read_prompts(path, limit=5)] == list("01234")
    with raises_code("bad_prompt", "line 6"):
        read_prompts(path)


@pytest.mark.parametrize(
    ("text", "code", "names"),
    [
        (GOOD + '{"prompt": "half', "bad_prompt", ["line 2", "JSON"]),
        (GOOD + "[1]\n", "bad_prompt", ["line 2", "JSON object"]),
        (
            "\n" + '{"story": "x"}\n',
            "bad_prompt",
            ["line 2", "prompt", "turns", "messages", "keys: story"],
        ),
        (
            '{"messages": [{"role": "system", "content": "Be kind."}]}',
            "bad_prompt",
            ["line 1", "role user"],
        ),
        (
            '{"messages": [{"role": "user", "content": null}]}',
            "bad_prompt",
            ["line 1", "`role`", "`content`"],
        ),
        ('{"messages": [{"role": "user", "content": " "}]}', "bad_prompt", ["line 1", "empty"]),
        ('{"turns": []}', "bad_prompt", ["line 1", "empty"]),
        ('{"turns": ["a", 3]}', "bad_prompt", ["line 1", "`prompt`"]),
        ('{"prompt": {"a": 1}}', "bad_prompt", ["line 1", "prompt", "keys: a"]),
        (
            '{"id": 1, "prompt": "a"}\n{"id": "1", "prompt": "b"}',
            "duplicate_prompt_id",
            ["'1'", "twice"],
        ),
        ("", "no_prompts", []),
        (GOOD.encode() + b"\xff\n", "bad_prompt", ["line 2", "UTF-8"]),
    ],
)
def test_a_bad_file_is_refused_in_one_line(
    tmp_path: Path, text: str | bytes, code: str, names: list[str]
) -> None:
    with raises_code(code, "p.jsonl", *names) as error:
        read_prompts(write(tmp_path / "p.jsonl", text))
    assert "\n" not in str(error.value)


def test_missing_folder_truncated_and_short_files_are_refused(tmp_path: Path) -> None:
    with raises_code("no_such_source", "none.jsonl"):
        read_prompts(tmp_path / "none.jsonl")
    with raises_code("unreadable_source", str(tmp_path)):
        read_prompts(tmp_path)
    path = tmp_path / "p.jsonl.gz"
    path.write_bytes(gzip.compress(GOOD.encode() * 500)[:-9])
    with raises_code("bad_gzip", str(path)):
        read_prompts(path)
    path.write_bytes(GOOD.encode())
    with raises_code("bad_gzip", str(path)):
        read_prompts(path)
    with raises_code("bad_limit", "not 0"):
        read_prompts(write(tmp_path / "p.jsonl", GOOD), limit=0)


def test_demo_prompts_come_with_the_package() -> None:
    prompts = demo_prompts(16)
    assert len(prompts) == 16
    assert len({p.task for p in prompts}) >= 8
    assert len(demo_prompts()) == 120
