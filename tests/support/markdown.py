"""Reading the documentation: pages, fenced blocks, and the commands in them."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from tests.support.paths import REPO

PAGES = tuple(
    sorted(
        [
            *REPO.glob("*.md"),
            *(REPO / "docs").rglob("*.md"),
            *(REPO / "examples").rglob("*.md"),
            REPO / "serving/runtime/strategies/PAPERS.md",
        ]
    )
)
SHELL = ("bash", "sh", "console")
FENCE = re.compile(r"^( *)```(\S*)[^\n]*\n(.*?)^ *```", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Fence:
    """A fenced block of a page."""

    page: Path
    line: int
    language: str
    body: str

    def __str__(self) -> str:
        return f"{self.page.relative_to(REPO)}:{self.line}"


@cache
def fences(*languages: str) -> tuple[Fence, ...]:
    """All fenced blocks of all pages; of these languages where any are named."""
    found = []
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        for match in FENCE.finditer(text):
            body = re.sub(f"^{match[1]}", "", match[3], flags=re.MULTILINE)
            found.append(Fence(page, text.count("\n", 0, match.start()) + 1, match[2], body))
    return tuple(fence for fence in found if not languages or fence.language in languages)


def shell_words(body: str) -> Iterator[list[str]]:
    """Words of every command of a shell block. Quotes may span lines; `&&`, `;` and pipes end a
    command; comments are left out."""
    pending = ""
    for line in body.replace("\\\n", " ").splitlines():
        pending += ("\n" if pending else "") + line.removeprefix("$ ")
        lexer = shlex.shlex(pending, posix=True, punctuation_chars="&;|<>")
        lexer.whitespace_split, lexer.commenters = True, "#"
        try:
            tokens = list(lexer)
        except ValueError:  # a quote that the next line closes
            continue
        pending, command = "", []
        for token in [*tokens, ";"]:
            if set(token) <= set("&;|<>"):
                yield command
                command = []
            else:
                command.append(token)
    assert not pending, f"a quote is not closed: {pending}"


@cache
def commands(program: str) -> tuple[tuple[str, list[str]], ...]:
    """Place and words of every call of a program in the shell blocks; `.venv/bin/` and assignments
    before it are left out."""
    found = []
    for fence in fences(*SHELL):
        for words in shell_words(fence.body):
            while words and re.match(r"[A-Z_]+=", words[0]):
                words = words[1:]
            if words and words[0].removeprefix(".venv/bin/") == program:
                found.append((str(fence), words))
    return tuple(found)
