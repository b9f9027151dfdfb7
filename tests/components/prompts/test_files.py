"""Whatever a file is: a bad row costs that row, a file without a prompt is refused by one line."""

from __future__ import annotations

import csv
import gzip
import json
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from draftwell.components.prompts import files
from draftwell.components.prompts.sources import LeftOut, load_prompts
from tests.support.errors import raises_code


def texts(path: Path, left: LeftOut | None = None) -> list[str]:
    return [prompt.prompt for prompt in load_prompts(path, left_out=left)]


def row(text: str) -> str:
    return json.dumps({"conversations": [{"from": "human", "value": text}]})


BAD = [
    '{"prompt": "half a pair \\ud83c"}',
    '{"prompt": "broken',
    '{"messages": [{"role": "assistant", "content": "a"}]}',
    '{"prompt": "  "}',
    '{"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]}',
    '{"prompt": 5}',
    "[1]",
    '{"timestamp": 5}',
    '{"data": []}',
    '{"task_description": "a", "examples": [{"input": "not this"}]}',
]


def test_a_bad_row_costs_that_row_and_is_counted_with_its_place(tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    lines = [row("first"), *BAD, BAD[3], row("last")]
    path.write_bytes("\n".join(lines).encode() + b'\n{"prompt": "\xe9"}\n')
    left = LeftOut()
    assert texts(path, left) == ["first", "last"]
    assert left.reasons.total() == len(BAD) + 2
    assert {place.rsplit(" ", 1)[1] for place in left.first.values()} == {
        *"23456789",
        "10",
        "11",
        "14",
    }
    assert str(left).startswith("12 rows left out: ")
    assert f"(2, first {path} line 5)" in str(left)
    assert "\n" not in str(left)
    path.write_text("\n".join(BAD))
    with raises_code("no_prompts", "p.jsonl", "10 rows left out") as refused:
        load_prompts(path)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("suffix", [".parquet", ".arrow", ".csv", ".json"])
def test_rows_without_a_persons_turn_are_left_out_of_any_table(tmp_path: Path, suffix: str) -> None:
    talks = [
        [],
        [{"from": "human", "value": "a"}],
        [{"from": "gpt", "value": "x"}],
        [{"from": "human", "value": "b"}, {"from": "gpt", "value": "y"}],
    ]
    path = tmp_path / f"t{suffix}"
    table = pa.table({"conversations": talks})
    if suffix == ".parquet":
        pq.write_table(table, path)
    elif suffix == ".arrow":
        with pa.ipc.new_file(path, table.schema) as writer:
            writer.write_table(table)
    elif suffix == ".csv":
        with path.open("w", newline="") as file:
            rows: list[list[Any]] = [
                ["id", "conversations"],
                *([7, json.dumps(talk)] for talk in talks),
            ]
            csv.writer(file).writerows(rows)
    else:
        path.write_text(json.dumps([{"conversations": talk} for talk in talks]))
    left = LeftOut()
    assert texts(path, left) == ["a", "b"]
    assert left.reasons.total() == 2


def test_tools_of_a_table_have_no_keys_of_other_rows(tmp_path: Path) -> None:
    """Parquet gives every object the keys of all."""
    tools = [
        [{"type": "function", "function": {"name": name, "parameters": {"properties": wanted}}}]
        for name, wanted in (("f", {"one": {"type": "string"}}), ("g", {"two": {"type": "string"}}))
    ]
    messages = [{"role": "user", "content": "a"}]
    pq.write_table(pa.table({"messages": [messages] * 2, "tools": tools}), tmp_path / "t.parquet")
    found = load_prompts(tmp_path / "t.parquet")
    assert [list(prompt.tools) for prompt in found] == tools


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16"])
@pytest.mark.parametrize("name", ["p.jsonl", "p.json", "p.csv", "p.txt", "p.tsv"])
def test_encodings_that_windows_writes(tmp_path: Path, encoding: str, name: str) -> None:
    text = {
        "p.jsonl": row("Grüße 🙂") + "\r\n" + row("b") + "\r\n",
        "p.json": json.dumps([json.loads(row("Grüße 🙂")), json.loads(row("b"))], indent=1),
        "p.csv": 'id;prompt\r\n1;"Grüße 🙂"\r\n2;b\r\n',
        "p.tsv": "id\tprompt\r\n1\tGrüße 🙂\r\n2\tb\r\n",
        "p.txt": "Grüße 🙂\r\n\r\nb",
    }[name]
    (tmp_path / name).write_bytes(text.encode(encoding))
    assert texts(tmp_path / name) == ["Grüße 🙂", "b"]


@pytest.mark.parametrize("name", ["p.csv", "p.txt", "p.json"])
def test_a_row_of_another_encoding_costs_that_row(tmp_path: Path, name: str) -> None:
    good, bad = ("a", "caf\xe9") if name != "p.json" else (row("a"), '{"prompt": "caf\xe9"}')
    lines = [*(["prompt"] if name == "p.csv" else []), good, bad, good]
    (tmp_path / name).write_bytes("\n".join(lines).encode("latin-1"))
    left = LeftOut()
    assert texts(tmp_path / name, left) == ["a", "a"]
    assert list(left.reasons) == ["not UTF-8: save it as UTF-8"]


@pytest.mark.parametrize(
    "text",
    [
        "[%s,\n%s\n]",
        "[%s, %s]",
        "%s\n%s",
        '{"data": [%s, %s], "meta": {"page": 1}}',
        '{"features": [], "rows": [{"row_idx": 0, "row": %s}, {"row_idx": 1, "row": %s}]}',
        '{\n  "data": [\n%s,\n%s]}',
        '[{"body": %s, "logs": []}, {"data": [], "rows": [%s]}]',
    ],
)
@pytest.mark.parametrize("name", ["p.json", "p.jsonl", "p", "p.json.gz"])
def test_json_however_it_is_laid_out(tmp_path: Path, text: str, name: str) -> None:
    said = (text % (row("a"), row("b"))).encode()
    (tmp_path / name).write_bytes(gzip.compress(said) if name.endswith(".gz") else said)
    assert texts(tmp_path / name) == ["a", "b"]


def test_json_over_several_lines_is_read_in_pieces(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "CHUNK", 7)
    rows = [json.loads(row(f"{i} ] , [ é")) for i in range(30)]
    (tmp_path / "p.json").write_text(json.dumps(rows, indent=2, ensure_ascii=False))
    assert texts(tmp_path / "p.json") == [f"{i} ] , [ é" for i in range(30)]
    whole = (tmp_path / "p.json").read_text()
    (tmp_path / "p.json").write_text(whole[:-400])
    left = LeftOut()
    found = texts(tmp_path / "p.json", left)
    assert found == [f"{i} ] , [ é" for i in range(len(found))]
    assert left.reasons.total() == 1


def test_a_bad_line_of_a_log_costs_that_line(tmp_path: Path) -> None:
    said = "Received request x: prompt: '{}', params: P()\n"
    lines = [said.format(text) for text in ("a", r"C:\xyz", r"\N{no}", "b")]
    (tmp_path / "p.log").write_text("".join(lines))
    left = LeftOut()
    assert texts(tmp_path / "p.log", left) == ["a", "b"]
    assert left.reasons.total() == 2


@pytest.mark.parametrize("name", ["p.json", "p.jsonl"])
def test_an_array_that_is_cut_off_between_two_rows_is_told(tmp_path: Path, name: str) -> None:
    rows, left = '[\n{"prompt": "a"},\n{"prompt": "b"}', LeftOut()
    for end in (",\n", "\n", ""):
        left = LeftOut()
        (tmp_path / name).write_text(rows + end)
        assert len(load_prompts(tmp_path / name, left_out=left)) == 2
        assert "ends before its array" in str(left)
    (tmp_path / name).write_text(f"{rows} ]\n")
    whole = LeftOut()
    assert len(load_prompts(tmp_path / name, left_out=whole)) == 2
    assert not whole


def test_texts_that_look_like_python_warn_of_nothing(tmp_path: Path) -> None:
    (tmp_path / "p.jsonl").write_text(json.dumps({"input": r'["\d"]'}) + "\n")
    (tmp_path / "p.log").write_text(
        r"INFO 01-01 10:00:00 Received request a: prompt: '\d', params: 1" + "\n"
    )
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        found = [load_prompts(tmp_path / name)[0].prompt for name in ("p.jsonl", "p.log")]
    assert (found, told) == ([r'["\d"]', r"\d"], [])


def test_what_ends_early_gives_what_was_before(tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl.gz"
    data = gzip.compress("".join(row(str(i)) + "\n" for i in range(9000)).encode(), mtime=0)
    path.write_bytes(data[: len(data) // 2])
    left = LeftOut()
    assert len(load_prompts(path, left_out=left)) > 1000
    assert "gzip" in str(left)


@pytest.mark.parametrize(
    ("name", "data", "code"),
    [
        ("p.bin", b"\x00\x01\x02", "unreadable_source"),
        ("p.xlsx", b"PK\x03\x04\x14\x00\x06\x00", "unreadable_source"),
        ("p.csv", b"\x89PNG\r\n\x1a\n\x00\x00\x00\rIHDR", "unreadable_source"),
        ("p.parquet", b"PAR1 and nothing", "unreadable_source"),
        ("p.arrow", b"ARROW1\x00\x00", "unreadable_source"),
        ("p.csv", b"Timestamp,Model,Request tokens,Response tokens\n1,m,5,6\n", "no_such_column"),
        ("p.jsonl", b'{"timestamp": 0, "input_length": 7}\n', "no_such_column"),
        ("p.log", b"INFO 03-01 10:00:00 [logger.py:41] Received request x: params: P().\n", None),
        ("p.json", b"[]", "no_prompts"),
        ("p.txt", b"\n \n", "no_prompts"),
        ("p.csv", b"", "no_prompts"),
    ],
)
def test_a_file_without_prompts_is_refused_by_one_line(
    tmp_path: Path, name: str, data: bytes, code: str | None
) -> None:
    (tmp_path / name).write_bytes(data)
    with raises_code(code or "no_prompts", name) as refused:
        load_prompts(tmp_path / name)
    assert "\n" not in str(refused.value)
    if code == "no_such_column":
        assert "conversations" in str(refused.value)
        assert "imestamp" in str(refused.value)


def test_a_cell_may_be_longer_than_the_csv_module_allows(tmp_path: Path) -> None:
    (tmp_path / "p.csv").write_text('id,prompt\n1,"' + "a, " * 100_000 + '"\n')
    assert len(texts(tmp_path / "p.csv")[0]) == 300_000


def test_a_folder_as_the_hub_stores_it(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / ".cache").mkdir()
    for name in ("README.md", "dataset_infos.json", "notes.txt", ".cache/old.jsonl"):
        (tmp_path / name).write_text('{"default": {"license": "mit"}}\n')
    for name in ("test-00000-of-00001", "train-00000-of-00002", "train-00001-of-00002"):
        pq.write_table(pa.table({"text": [name]}), tmp_path / "data" / f"{name}.parquet")
    assert [text[:5] for text in texts(tmp_path)] == ["train", "train"]
    assert [p.prompt for p in load_prompts(tmp_path, split="test")] == ["test-00000-of-00001"]


def test_texts_of_a_folder_are_prompts_where_it_has_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    for name in ("README_zh.md", "croissant.json", "in/LICENSE.txt", "in/b.txt", "in/c.txt"):
        (tmp_path / name).write_text(f"{name}\n")
    assert texts(tmp_path) == ["in/b.txt", "in/c.txt"]
    (tmp_path / "in" / "train.csv").write_text("prompt\na\n")
    assert texts(tmp_path) == ["a"]


def test_ids_that_come_twice_are_counted_wherever_the_file_is(tmp_path: Path) -> None:
    """Logs of retries repeat them."""
    (tmp_path / "p.jsonl").write_text('{"id": "a", "prompt": "x"}\n' * 3)
    assert [p.id for p in load_prompts(tmp_path / "p.jsonl")] == ["a", "a (2)", "a (3)"]
    rows = ", ".join(['{"prompt": "x"}'] * 3)
    (tmp_path / "p.jsonl").write_text(f'{{"data": [{rows}]}}\n')
    assert len({p.id for p in load_prompts(tmp_path / "p.jsonl")}) == 3


READER = """
import sys, time
from draftwell.components.prompts.sources import LeftOut, load_prompts

left = LeftOut()
found = load_prompts(sys.argv[1], limit=90_000, redact=False, left_out=left)
peak = next(line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM"))
print(len(found), left.reasons.total(), time.process_time(), int(peak) / 1024)
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="peak memory is read from /proc")
@pytest.mark.parametrize("suffix", [".jsonl", ".json", ".csv", ".parquet"])
def test_a_hundred_thousand_conversations_take_a_minute_and_a_gigabyte_at_most(
    tmp_path: Path, suffix: str
) -> None:
    """Slow: it writes and reads 100 MB."""
    talk = [{"from": "human", "value": "word " * 40}, {"from": "gpt", "value": "answer " * 100}]
    talks = [talk if i % 100 else [] for i in range(100_000)]
    path = tmp_path / f"t{suffix}"
    if suffix == ".parquet":
        pq.write_table(pa.table({"conversations": talks}), path)
    elif suffix == ".json":
        path.write_text(json.dumps([{"conversations": one} for one in talks]))
    else:
        with path.open("w", newline="") as file:
            writer = csv.writer(file)
            if suffix == ".csv":
                writer.writerows([["conversations"], *([json.dumps(one)] for one in talks)])
            else:
                file.writelines(json.dumps({"conversations": one}) + "\n" for one in talks)
    done = subprocess.run(
        [sys.executable, "-c", READER, str(path)], capture_output=True, text=True, check=True
    )
    count, left, seconds, megabytes = map(float, done.stdout.split())
    assert (count, 900 <= left <= 1000) == (90_000, True)
    assert seconds <= 60
    assert megabytes <= 1000
