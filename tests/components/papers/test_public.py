"""The papers' data sets from their makers' files."""

from __future__ import annotations

import gzip
import json
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
    for one, rows in zip(PUBLIC, (code, maths, training), strict=False):
        text = "".join(json.dumps(row) + "\n" for row in rows).encode()
        (tmp_path / one.file).write_bytes(gzip.compress(text) if one.file.endswith(".gz") else text)
    return tmp_path


def test_the_rows_that_are_measured_are_taken(published: Path) -> None:
    """A full run's prompts have the ids that the kept cells name."""
    main([str(published)])
    assert [prompt.id for prompt in choose("maths", 3, published).prompts] == [
        "gsm8k_test/0000",
        "gsm8k_test/0001",
        "gsm8k_test/0002",
    ]
    assert choose("maths-train", FULL.training, published).source == "GSM8K (train), 64 prompts"
    found = choose("code", FULL.prompts, published)
    assert found.source == "HumanEval, 12 prompts"
    (paper,) = papers_named("csd")
    cells = committed.committed_cells([*paper.measured_in(FULL).values()])
    assert tuple(prompt.id for prompt in found.prompts) == cells["csd-code"].report.prompt_ids


def test_they_are_the_files_that_data_reads() -> None:
    assert {one.made for one in PUBLIC} <= {one.file for one in SETS.values()}
    assert all(f"-o data/{one.file} {one.address}" in DOWNLOADS for one in PUBLIC)
    assert all(
        len(one.rows)
        >= (FULL.training if "train" in one.made else max(FULL.prompts, FULL.replayed))
        for one in PUBLIC
        if one.kind != "wt2_test_cont"
    )


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
