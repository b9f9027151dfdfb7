"""The wording check of `make lint`: what it reads, what it finds, and that the pages it is switched
on for pass."""

from __future__ import annotations

import importlib.util
import re
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType

import pytest

from tests.support.paths import REPO


@pytest.fixture(scope="module")
def wording() -> ModuleType:
    loader = SourceFileLoader("wording", str(REPO / ".ci" / "wording"))
    spec = importlib.util.spec_from_loader("wording", loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


def hits(wording: ModuleType, path: Path) -> list[tuple[int, str]]:
    return [
        (line, match[0])
        for line, text in wording.spoken(path)
        for pattern in wording.WORDS
        for match in re.finditer(pattern, text, re.IGNORECASE)
    ]


def test_pages_are_read_without_their_code(wording: ModuleType, tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "The run goes on.\n`goes on`\n\n```text\nlies in\n```\n\nIt was held against it.\n"
    )
    assert hits(wording, page) == [(1, "goes on"), (8, "held against")]


def test_strings_of_modules_are_read_and_comments_are_not(
    wording: ModuleType, tmp_path: Path
) -> None:
    module = tmp_path / "module.py"
    module.write_text('# anew\nstation = 1\nhelp = "all cores if left out"\n')
    assert hits(wording, module) == [(3, "if left out")]


def test_words_that_only_contain_a_refused_one_pass(wording: ModuleType, tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("A renewed workstation mentions recommended relies in supplies.\n")
    assert hits(wording, page) == []


def test_what_lint_checks_passes(wording: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    makefile = (REPO / "Makefile").read_text(encoding="utf-8").replace("\\\n", " ")
    declared = re.search(r"^WORDING \?=(.*)$", makefile, re.MULTILINE)
    assert declared is not None
    assert wording.main(declared[1].split()) == 0, capsys.readouterr().out


def test_a_refused_word_is_one_line_with_file_line_and_advice(
    wording: ModuleType,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "page.md").write_text("fine\nthe mend\n")
    monkeypatch.setattr(wording, "ROOT", tmp_path)
    monkeypatch.setattr(
        wording.subprocess, "run", lambda *_, **__: type("Listed", (), {"stdout": "page.md\0"})
    )
    assert wording.main([]) == 1
    assert capsys.readouterr().out == "page.md:2: 'mend': write 'fix'\n"
