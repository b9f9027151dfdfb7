"""What README tells a reader to type exists: commands, options, targets of make, and the YAML of a pair of one's own."""

from __future__ import annotations

import re
import shlex
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import yaml

from registry.pairs import PairSpec
from serving.runtime.strategies import STRATEGIES
from tests.support.paths import REPO

PAGES = [REPO / "README.md", *sorted((REPO / "docs").glob("*.md"))]


def blocks(language: str, pages: list[Path]) -> list[str]:
    """Bodies of the fenced blocks of a language."""
    fence = re.compile(rf"^```{language}[^\n]*\n(.*?)^```", re.MULTILINE | re.DOTALL)
    return [body for page in pages for body in fence.findall(page.read_text(encoding="utf-8"))]


def lines(word: str) -> list[list[str]]:
    """Words of every line, of all shell blocks, that begins with `word`; `&&` and `;` part commands, comments are left out."""
    joined = "\n".join(blocks("(?:bash|sh|console)", PAGES)).replace("\\\n", " ")
    found = []
    for line in joined.splitlines():
        lexer = shlex.shlex(line.removeprefix("$ "), posix=True, punctuation_chars="&;|<>")
        lexer.whitespace_split, lexer.commenters = True, "#"
        command: list[str] = []
        for token in [*lexer, ";"]:
            if set(token) <= set("&;|<>"):
                found.append(command)
                command = []
            else:
                command.append(token)
    return [command for command in found if command and command[0] == word]


def commands() -> dict[str, Any]:
    from typer.main import get_command

    from flows.cli.main import app

    return dict(get_command(app).commands)  # type: ignore[attr-defined]


@pytest.mark.parametrize("words", lines("draftwell"), ids=" ".join)
def test_draftwell_lines(words: list[str]) -> None:
    known = commands()
    assert words[1].startswith("--") or words[1] in known, f"no command {words[1]}"
    if words[1] not in known:
        return
    options = {name: p for p in known[words[1]].params for name in (*p.opts, *p.secondary_opts)} | {"--help": None}
    given = [word for word in words[2:] if word.startswith("--")]
    assert [word for word in given if word.partition("=")[0] not in options] == []
    for option, value in pairwise(words[2:]):
        if option in ("--strategy", "--strategies"):
            assert [name for name in value.split(",") if name not in STRATEGIES] == []
    needed = {p.opts[0] for p in known[words[1]].params if p.required and p.param_type_name == "option"}
    assert "--help" in given or needed <= set(given), f"{words[1]} needs {needed}"


@pytest.mark.parametrize("words", lines("make"), ids=" ".join)
def test_make_lines(words: list[str]) -> None:
    makefile = (REPO / "Makefile").read_text()
    for word in words[1:]:
        variable, equals, _ = word.partition("=")
        pattern = rf"^{re.escape(variable)} \?=" if equals else rf"^{re.escape(word)}:"
        assert re.search(pattern, makefile, re.MULTILINE), f"the Makefile knows no {word}"


def pair_blocks() -> list[str]:
    return [body for body in blocks("yaml", PAGES) if re.search("^target:", body, re.MULTILINE)]


@pytest.mark.parametrize("body", pair_blocks())
def test_pairs_of_ones_own(body: str) -> None:
    assert PairSpec.model_validate(yaml.safe_load(body)).name == yaml.safe_load(body)["name"]


def test_the_reader_is_told_the_two_commands() -> None:
    told = [words[1:2] for words in lines("make")]
    assert ["demo"] in told
    assert ["test"] in told


def test_the_reader_can_bring_a_pair() -> None:
    """Ten lines, as README promises."""
    bodies = [body for body in pair_blocks() if body in (REPO / "README.md").read_text(encoding="utf-8")]
    assert bodies
    assert min(len(body.splitlines()) for body in bodies) <= 10
