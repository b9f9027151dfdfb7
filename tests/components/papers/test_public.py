"""The papers' data sets from their makers' files."""

from __future__ import annotations

import gzip
import json
from collections import Counter
from pathlib import Path

import pytest

from draftwell.components.papers import committed
from draftwell.components.papers.cells import FULL
from draftwell.components.papers.prompts import SETS, choose
from draftwell.components.papers.public import DOWNLOADS, PUBLIC, main, make
from draftwell.components.papers.tables import papers_named
from draftwell.serving.errors import DraftwellError


@pytest.fixture
def published(tmp_path: Path) -> Path:
    """Files in the form of the published ones, with texts of our own."""
    code = [
        {
            "task_id": f"HumanEval/{i}",
            "prompt": f"def f{i}():",
            "canonical_solution": "    pass",
            "test": "",
            "entry_point": f"f{i}",
        }
        for i in range(164)
    ]
    maths = [
        {"question": f"What is {i} + 1?", "answer": f"It is one more.\n#### {i + 1}"}
        for i in range(1319)
    ]
    training = [
        {"question": f"What is {i} + 2?", "answer": f"It is two more.\n#### {i + 2}"}
        for i in range(7473)
    ]
    tasks = [
        {"task_id": i + 1, "text": f"Write f{i}.", "test_list": ["a", "b"], "code": "x\r\ny\r"}
        for i in range(974)
    ]
    for one, rows in zip(PUBLIC, (code, maths, training, tasks), strict=False):
        text = "".join(json.dumps(row) + "\n" for row in rows).encode()
        (tmp_path / one.file).write_bytes(gzip.compress(text) if one.file.endswith(".gz") else text)
    return tmp_path


def test_the_rows_that_are_measured_are_taken(published: Path) -> None:
    """A full run's prompts have the ids that the kept cells name."""
    main([str(published)])
    (paper,) = papers_named("csd")
    cells = committed.committed_cells([*paper.measured_in(FULL).values()])
    for name in ("csd-code", "csd-counted-maths"):
        cell, report = cells[name].cell, cells[name].report
        found = choose(cell.data, cell.prompts, published)
        assert tuple(prompt.id for prompt in found.prompts) == report.prompt_ids
    assert choose("maths-train", 800, published).source == "GSM8K (train), 800 prompts"
    (task,) = choose("code-train", 1, published).prompts
    assert (task.id, task.reference) == ("mbpp/1", "x\ny\n")
    assert task.prompt == "Write f0. Your code should pass these tests:\n\na\nb\n"


def test_they_are_the_files_that_data_reads() -> None:
    assert {one.made for one in PUBLIC} <= {one.file for one in SETS.values()}
    assert all(f"-o data/{one.file} {one.address}" in DOWNLOADS for one in PUBLIC)


def test_their_rows_are_enough_for_every_cell() -> None:
    """Fewer would be measured without a word: a cell takes what there is."""
    wanted = Counter[str]()
    cells = [cell for paper in papers_named() for cell in paper.measured_in(FULL).values()]
    for cell in cells:
        sets = [(cell.data, cell.prompts)]
        sets += [(name, cell.training_prompts) for name in cell.training.values()]
        for name, prompts in sets:
            wanted[SETS[name].file] = max(wanted[SETS[name].file], prompts)
    texts = [one for one in PUBLIC if one.kind != "wt2_test_cont"]  # its rows are articles
    assert {one.made: len(one.rows) for one in texts if len(one.rows) < wanted[one.made]} == {}


def test_paragraphs_of_wikitext_are_cut_and_detokenised(tmp_path: Path) -> None:
    """Of articles that are taken, long paragraphs alone, and none with an apostrophe that nobody
    can put back; the end of a formula is no title."""
    words = " ".join(f"w{i}" for i in range(60))
    marked = 'It costs £ 5 @,@ 000 ( a lot ) ; the man \'s inn , he said : " no " .'
    text = "\n".join(
        (
            *(" = One = ", f" {marked} {words} {words} ", " too short ", " = 1 rad = "),
            *(f" the ships ' {words} {words} ", " = Two = ", f" {words} {words} "),
            *(" = Three = ", f" {words} {words} "),
        )
    )
    (tmp_path / PUBLIC[-1].file).write_text(text)
    assert [path.name for path in make(tmp_path)] == ["wikitext2_test_continuation.jsonl"]
    rows = [json.loads(line) for line in (tmp_path / PUBLIC[-1].made).read_text().splitlines()]
    assert [row["id"] for row in rows] == ["wt2_test_cont/000_001", "wt2_test_cont/001_001"]
    whole = f"{rows[0]['prompt']} {rows[0]['reference']}"
    assert whole.startswith('It costs £5,000 (a lot); the man\'s inn, he said: "no". w0 w1')
    assert [len(row["prompt"].split()) for row in rows] == [48, 48]


def test_a_folder_without_them_and_another_file_are_one_line(
    published: Path, tmp_path: Path
) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(
        DraftwellError, match=r"holds no published file: download HumanEval\.jsonl\.gz"
    ):
        make(tmp_path / "empty")
    (published / PUBLIC[1].file).write_text('{"question": "one"}\n')
    with pytest.raises(
        DraftwellError, match=r"is not the file of https://raw.*: download it again"
    ):
        make(published)
