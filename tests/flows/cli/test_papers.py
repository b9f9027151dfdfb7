"""`draftwell papers`: measured, resumed and rendered on a tiny pair."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from components.papers import catalogue
from components.papers.cells import PLAIN, Scale, sized
from components.papers.tables import Paper, PaperTable, Row


@pytest.fixture
def tiny_paper(pair_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One paper with one table on the tiny pair, in the place of all."""
    def tables(scale: Scale) -> tuple[PaperTable, ...]:
        cell = sized(scale, name="tiny-code", pair=str(pair_file), pad_target=120_000.0, data="code", prompts=2, max_tokens=6, repeats=1,
                     contenders={"SD": ("vanilla_sd@1+1:num_speculative_tokens=2",), "SPIDE": ("spide@1+1:tau=0.7",)})
        rows = (Row("SD: speed over plain", 1.5, "speed", "SD", PLAIN), Row("SPIDE: speed over SD", 1.2, "speed", "SPIDE", "SD"))
        return (PaperTable("tiny-1", "Table 1: tiny", "there", "here", cell, rows, "Because."),)

    monkeypatch.setattr(catalogue, "PAPERS", {"spide": Paper("spide", "Tiny paper", tables)})


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    (tmp_path / "sets" / "eval").mkdir(parents=True)
    (tmp_path / "sets" / "eval" / "humaneval.jsonl").write_text('{"prompt": "the man in the inn"}\n{"prompt": "ten men"}\n')
    return tmp_path / "sets"


@pytest.mark.usefixtures("tiny_paper")
def test_a_run_is_measured_once_and_ends_on_a_page(run: Callable[..., Any], prompts: Path, tmp_path: Path) -> None:
    arguments = ("papers", "--quick", "--only", "spide", "--data", prompts, "--out", tmp_path / "run", "--dtype", "float32", "--threads", 1)
    first = run(*arguments)
    assert first.exit_code == 0, (first.output, first.exception)
    files = list((tmp_path / "run" / "quick").glob("tiny-code-*.json"))
    assert len(files) == 1
    before = files[0].stat().st_mtime_ns
    again = run(*arguments, "--page", tmp_path / "page.md")
    assert again.exit_code == 0
    assert "measured before" in again.stderr
    assert files[0].stat().st_mtime_ns == before
    text = (tmp_path / "page.md").read_text()
    assert text == (tmp_path / "run" / "papers-quick.md").read_text()
    assert "HumanEval, 2 prompts" in text
    assert "](images/papers-tiny-1.png)" in text
    assert (tmp_path / "images" / "papers-tiny-1.png").is_file()
    other = run(*arguments, "--render", "--dtype", "bfloat16")
    assert "0 of 1 cells are measured" in other.stderr, "another number format is another run"


@pytest.mark.usefixtures("tiny_paper")
def test_a_cell_that_fails_is_on_the_page_and_in_the_exit_code(run: Callable[..., Any], tmp_path: Path, pair_file: Path,
                                                               monkeypatch: pytest.MonkeyPatch) -> None:
    from flows.steps import papers as steps
    from serving.errors import DraftwellError

    def refuse(*arguments: Any) -> Any:
        raise DraftwellError("the models are too large", code="pair_too_large")

    monkeypatch.setattr(steps, "open_cells", refuse)
    done = run("papers", "--quick", "--out", tmp_path / "run", "--dtype", "float32")
    assert done.exit_code == 1
    assert "Not measured: the models are too large" in (tmp_path / "run" / "papers-quick.md").read_text()


def test_mistakes_are_one_line(run: Callable[..., Any], tmp_path: Path) -> None:
    done = run("papers", "--only", "eagle")
    assert done.exit_code == 2
    assert "choose from spide, sprinter, csd, pyramidsd, duodecoding" in done.stderr
    assert "there is no folder" in run("papers", "--data", tmp_path / "datsets").stderr
    (tmp_path / "file").write_text("")
    done = run("papers", "--out", tmp_path / "file")
    assert done.exit_code == 2
    assert "name another folder" in done.stderr
