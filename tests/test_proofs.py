"""docs/proofs.md and SECURITY.md name tests that exist, and pages are whole."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from draftwell.serving.runtime.strategies import STRATEGIES
from tests.support.paths import REPO

NAMED = re.compile(r"`((?:tests/[\w/]+/)?test_\w+\.py)::(test_\w+)`")


def files_named(name: str) -> list[Path]:
    """Test files of a path, or of a bare name."""
    return [REPO / name] if "/" in name else sorted((REPO / "tests").rglob(name))


@pytest.mark.parametrize(("page", "least"), [("docs/proofs.md", 50), ("SECURITY.md", 15)])
def test_every_test_that_a_claim_names_exists(page: str, least: int) -> None:
    named = NAMED.findall((REPO / page).read_text(encoding="utf-8"))
    assert len(named) > least
    missing = []
    for name, test in named:
        files = [file for file in files_named(name) if file.is_file()]
        if sum(f"def {test}(" in file.read_text(encoding="utf-8") for file in files) != 1:
            missing.append(f"{name}::{test}")
    assert not missing


def test_every_lossless_strategy_is_in_the_table() -> None:
    text = (REPO / "docs" / "proofs.md").read_text(encoding="utf-8")
    table = text.partition("## Lossless strategies")[2].partition("\n## ")[0]
    first = " ".join(re.findall(r"^\|([^|]*)\|", table, re.MULTILINE))
    lossless = {name for name, cls in STRATEGIES.items() if cls.lossless}
    assert set(re.findall(r"`(\w+)`", first)) == lossless - {"autoregressive"}


def test_no_chapter_stands_twice_and_each_begins_behind_an_empty_line() -> None:
    """What merges of two branches do to a page."""
    for page in sorted((REPO / "docs").glob("*.md")):
        text = page.read_text(encoding="utf-8")
        chapters = re.findall(
            r"^## .*$",
            re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL),
            re.MULTILINE,
        )
        assert len(set(chapters)) == len(chapters), page.name
        assert not re.search(r"[^\n]\n## ", text), page.name
