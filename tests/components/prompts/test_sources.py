"""Prompts from spools, tables and data sets; and one clear line for a source that is none."""

from __future__ import annotations

import csv
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from draftwell.components.prompts.prompt import Prompt
from draftwell.components.prompts.sources import LeftOut, load_prompts, readable_requests
from tests.support.errors import raises_code

SCRIPTS = ["今天天气怎么样？", "كيف حالك؟", "🙂 ok\nin two lines"]


def parquet(path: Path, **columns: list[Any]) -> Path:
    pq.write_table(pa.table(columns), path)
    return path


def test_jsonl_is_read_as_everywhere(tmp_path: Path) -> None:
    (tmp_path / "p.jsonl").write_text('{"prompt": "a"}\n{"id": "x", "prompt": "b"}\n')
    assert [prompt.id for prompt in load_prompts(tmp_path / "p.jsonl")] == ["line-1", "x"]
    (tmp_path / "q.jsonl").write_text('{"prompt": "a", "story": "once"}\n')
    assert load_prompts(tmp_path / "q.jsonl", column="story")[0].turns == ["once"]


def test_a_spool_of_requests_is_read_file_by_file_up_to_a_line_that_is_being_written(
    tmp_path: Path,
) -> None:
    bodies = [
        {
            "model": "m",
            "messages": [
                {"role": "system", "content": "be kind"},
                {"role": "user", "content": "你好"},
            ],
            "stream": True,
        },
        {"model": "m", "prompt": "once upon"},
    ]
    (tmp_path / "2026-11-20.jsonl").write_text("".join(json.dumps(body) + "\n" for body in bodies))
    (tmp_path / "2026-11-21.jsonl").write_text(
        json.dumps(bodies[1]) + "\n" + '{"model": "m", "mess'
    )
    (tmp_path / "notes.txt").write_text("not a request")
    first, second, third = load_prompts(tmp_path)
    assert (first.id, first.turns, first.messages) == (
        "2026-11-20/1",
        ["你好"],
        ({"role": "system", "content": "be kind"},),
    )
    assert (second.id, second.turns) == ("2026-11-20/2", ["once upon"])
    assert [prompt.raw for prompt in (first, second, third)] == [False, True, True], (
        "completions have no chat template"
    )
    assert third.id == "2026-11-21/1"
    (tmp_path / "2026-11-21.jsonl").write_text('{"prompt": ["a"]}\n{"prompt": ["b", "c"]}\n')
    assert [(p.id, p.prompt, p.raw) for p in load_prompts(tmp_path)[2:]] == [
        ("2026-11-21/1", "a", True),
        ("2026-11-21/2.0", "b", True),
        ("2026-11-21/2.1", "c", True),
    ]
    (tmp_path / "2026-11-20.jsonl").write_text('{"prompt": \n{"prompt": "a"}\n')
    left = LeftOut()
    assert next(p.id for p in load_prompts(tmp_path, left_out=left)) == "2026-11-20/2"
    assert "2026-11-20.jsonl line 1" in str(left)
    assert "JSON" in str(left)


def test_requests_in_an_array_are_named_by_their_places(tmp_path: Path) -> None:
    (tmp_path / "r.jsonl").write_text('[\n{"prompt": "a"},\n{"prompt": "b"}\n]')
    found, wrong = readable_requests([tmp_path / "r.jsonl"])
    assert ([prompt.id for prompt in found], wrong) == (["r/0", "r/1"], [])


def test_a_spool_line_that_ends_inside_a_character_is_still_being_written(tmp_path: Path) -> None:
    whole = json.dumps(
        {"messages": [{"role": "user", "content": "你好"}]}, ensure_ascii=False
    ).encode()
    spool = tmp_path / "day.jsonl"
    for cut in range(1, len(whole)):
        spool.write_bytes(whole + b"\n" + whole[:cut])
        assert [prompt.id for prompt in load_prompts(tmp_path)] == ["day/1"], cut
    middle = whole.index("你".encode())
    # a whole line that is cut, and bytes of another encoding
    for wrong in (whole[: middle + 1] + b"\n" + whole, b'{"prompt": "\xff'):
        spool.write_bytes(whole + b"\n" + wrong)
        left = LeftOut()
        assert load_prompts(tmp_path, left_out=left)[0].id == "day/1"
        assert "day.jsonl line 2" in str(left)
        assert "UTF-8" in str(left)


@pytest.mark.parametrize(
    ("columns", "expected"),
    [
        ({"text": ["x"], "prompt": ["a"]}, Prompt("t/0", None, ["a"], fields={"text": "x"})),
        ({"prompt": ["x"], "turns": [["a", "b"]]}, Prompt("t/0", None, ["a", "b"])),
        (
            {
                "messages": [
                    [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
                ]
            },
            Prompt("t/0", None, ["a"], "b", answers=("b",)),
        ),
        (
            {
                "conversations": [
                    [{"from": "system", "value": "s"}, {"from": "human", "value": "a"}]
                ],
                "text": ["x"],
            },
            Prompt(
                "t/0",
                None,
                ["a"],
                messages=({"role": "system", "content": "s"},),
                fields={"text": "x"},
            ),
        ),
        (
            {"instruction": ["do"], "input": ["this"], "category": ["work"]},
            Prompt("t/0", "work", ["do\n\nthis"], fields={"input": "this"}),
        ),
        ({"instruction": ["do"], "input": [""]}, Prompt("t/0", None, ["do"], fields={"input": ""})),
        (
            {"id": [7], "question": ["a?"], "answer": ["#### 4"]},
            Prompt("t/0", None, ["a?"], fields={"answer": "#### 4"}),
        ),
    ],
)
def test_prompts_are_found_among_the_columns_of_a_table(
    tmp_path: Path, columns: dict[str, list[Any]], expected: Prompt
) -> None:
    assert load_prompts(parquet(tmp_path / "t.parquet", **columns)) == [expected]


def test_a_column_can_be_named(tmp_path: Path) -> None:
    path = parquet(tmp_path / "t.parquet", prompt=["a"], story=["once"])
    assert load_prompts(path, column="story")[0].turns == ["once"]
    for column in ("tale", None):
        table = path if column else parquet(tmp_path / "u.parquet", story=["once"])
        with raises_code("no_such_column", "--set column=", "story", column or "prompt"):
            load_prompts(table, column=column)


def test_a_limit_counts_what_is_not_empty_and_ids_stay(tmp_path: Path) -> None:
    path = parquet(tmp_path / "t.parquet", text=["a", "", None, "  ", "b", "c"])
    assert [(p.id, p.prompt) for p in load_prompts(path, limit=2)] == [("t/0", "a"), ("t/4", "b")]
    with raises_code("no_prompts", "none.parquet"):
        load_prompts(parquet(tmp_path / "none.parquet", text=["", None]))
    with raises_code("bad_limit", "0"):
        load_prompts(path, limit=0)


def test_csv_with_quotes_newlines_and_every_script(tmp_path: Path) -> None:
    with (tmp_path / "t.csv").open("w", newline="", encoding="utf-8-sig") as file:
        writer = csv.writer(file)
        writer.writerows([["task", "question"], *(["qa", text] for text in SCRIPTS)])
    assert [(p.task, p.prompt) for p in load_prompts(tmp_path / "t.csv")] == [
        ("qa", text) for text in SCRIPTS
    ]
    (tmp_path / "t.csv").write_bytes(b"question\n\xff\xfe\n")
    with raises_code("no_prompts", "t.csv", "UTF-8"):
        load_prompts(tmp_path / "t.csv")


def test_saved_data_sets_and_their_splits(tmp_path: Path) -> None:
    import datasets

    datasets.disable_progress_bars()
    one = datasets.Dataset.from_dict({"question": SCRIPTS, "id": [1, 2, 3]})
    one.save_to_disk(str(tmp_path / "one"))
    datasets.DatasetDict({"test": one, "dev": one.select([1])}).save_to_disk(str(tmp_path / "two"))
    assert [(p.id, p.prompt) for p in load_prompts(tmp_path / "one")] == [
        (f"one/{i}", text) for i, text in enumerate(SCRIPTS)
    ]
    assert [p.prompt for p in load_prompts(tmp_path / "two", split="dev")] == SCRIPTS[1:2]
    with raises_code("no_such_split", "'train'", "test, dev"):
        load_prompts(tmp_path / "two")


def test_parquet_files_of_a_folder_are_one_source_and_only_what_is_asked_for_is_read(
    tmp_path: Path,
) -> None:
    parquet(tmp_path / "b.parquet", text=["c"])
    parquet(tmp_path / "a.parquet", text=["a", "b"])
    assert [(p.id, p.prompt) for p in load_prompts(tmp_path)] == [
        (f"{tmp_path.name}/{i}", text) for i, text in enumerate("abc")
    ]
    (tmp_path / "b.parquet").write_bytes((tmp_path / "b.parquet").read_bytes()[:-9])
    assert [p.prompt for p in load_prompts(tmp_path, limit=2)] == ["a", "b"]
    left = LeftOut()
    assert [p.prompt for p in load_prompts(tmp_path, left_out=left)] == ["a", "b"]
    assert "b.parquet" in str(left)
    with raises_code("unreadable_source", "b.parquet"):
        load_prompts(tmp_path / "b.parquet")


def test_the_hub_is_streamed_under_our_own_cache(
    monkeypatch: pytest.MonkeyPatch, own_stores: Path
) -> None:
    import datasets

    asked: list[Any] = []

    def rows() -> Any:
        yield {"question": "a"}
        yield {"question": "b"}
        raise AssertionError("more was downloaded than was asked for")

    monkeypatch.setattr(
        datasets, "load_dataset", lambda *args, **kwargs: asked.append((args, kwargs)) or rows()
    )
    found = load_prompts("org/name:main", limit=2, split="test")
    assert [(p.id, p.prompt) for p in found] == [("org/name:main/0", "a"), ("org/name:main/1", "b")]
    assert asked == [
        (
            ("org/name", "main"),
            {
                "split": "test",
                "streaming": True,
                "cache_dir": str(own_stores / "draftwell" / "datasets"),
            },
        )
    ]


def test_no_hub_and_no_such_source_are_one_line_each(tmp_path: Path) -> None:
    for source, code in (
        ("nobody/nothing", "hub_failed"),
        ("nowhere.jsonl", "no_such_source"),
        ("nowhere.parquet", "no_such_source"),
        ("nowhere", "no_such_source"),
        (str(tmp_path), "no_such_source"),
    ):
        with raises_code(code, source) as error:
            load_prompts(source)
        assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("name", "categories", "each"),
    [
        (
            "categories",
            "coding humanities math multilingual qa rag reasoning roleplay stem summarization "
            "writing",
            2,
        ),
        ("lengths", "low_entropy mixed high_entropy", 4),
    ],
)
def test_the_shipped_sets_have_speed_benchs_categories(
    name: str, categories: str, each: int
) -> None:
    found = load_prompts(f"shipped:{name}")
    assert Counter(prompt.task for prompt in found) == dict.fromkeys(categories.split(), each)
    assert len({prompt.prompt for prompt in found}) == len({prompt.id for prompt in found})


def test_speed_benchs_own_file_is_read_and_its_placeholders_are_left_out(tmp_path: Path) -> None:
    """A row of the hub holds no text of another data set; what `prepare_data.py` writes does."""
    placeholder = "FULL BENCHMARK DATA SHOULD BE FETCHED FROM THE SOURCE USING SPECDEC_BENCH"
    file = parquet(
        tmp_path / "test.parquet",
        question_id=["a", "b"],
        category=["low_entropy", "mixed"],
        sub_category=["sort", "qa"],
        turns=[["Sort these."], [placeholder + " (x)"]],
        source=["s", "s"],
        src_id=["1", "2"],
        difficulty=[None, None],
        multiturn=[False, False],
    )
    left = LeftOut()
    (found,) = load_prompts(file, left_out=left)
    assert (found.task, found.turns) == ("low_entropy", ["Sort these."])
    assert "prepare_data.py" in str(left)
