"""Pages as a whole: links lead somewhere, README is short and in the right order, made pages hold
what they are made of."""

from __future__ import annotations

import importlib.util
import pkgutil
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml

from tests.support.markdown import PAGES, commands
from tests.support.paths import REPO

README = (REPO / "README.md").read_text(encoding="utf-8")
CHOOSE = (REPO / "docs" / "choose.md").read_text(encoding="utf-8")
BENCHMARKS = (REPO / "docs" / "benchmarks.md").read_text(encoding="utf-8")
PAPERS = ("papers.md", "papers-gpu.md")
LOOP = [
    *("step collect", "step train", "step calibrate", "step choose"),
    *("gate", "release promote", "deploy"),
]
CURRENT = [page for page in PAGES if page.name not in ("log.md", "CHANGELOG.md")]
"""All pages but those of history, which may name what is gone."""


@pytest.fixture(scope="module")
def reference() -> ModuleType:
    spec = importlib.util.spec_from_file_location(
        "reference", REPO / "docs" / "hooks" / "reference.py"
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(REPO)))
def test_links_lead_to_files_and_headings(page: Path) -> None:
    text = re.sub(
        r"^ *```.*?^ *```|`[^`\n]*`",
        "",
        page.read_text(encoding="utf-8"),
        flags=re.MULTILINE | re.DOTALL,
    )
    for address in re.findall(r"\]\(([^)\s]+)\)", text):
        if re.match(r"[a-z]+:", address):
            continue
        name, _, heading = address.partition("#")
        file = page.parent / name if name else page
        assert file.exists(), address
        if heading:
            assert heading in {
                slug(line)
                for line in re.findall(r"^#+ (.*)$", file.read_text(encoding="utf-8"), re.MULTILINE)
            }, address


def slug(heading: str) -> str:
    """A heading as GitHub and mkdocs name it in addresses."""
    return re.sub(r"[\s-]+", "-", re.sub(r"[^\w\s-]", "", heading.lower())).strip("-")


@pytest.mark.parametrize("page", CURRENT, ids=lambda page: str(page.relative_to(REPO)))
def test_files_that_are_named_exist(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    named = set(
        re.findall(
            r"`((?:components|flows|registry|serving|docs|deploy|tests)/[\w./-]+\.(?:py|md|ya?ml|json))(?:`|::|:)",
            text,
        )
    )
    assert sorted(name for name in named if not (REPO / name).exists()) == []


@pytest.mark.parametrize("page", CURRENT, ids=lambda page: str(page.relative_to(REPO)))
def test_modules_and_functions_that_are_named_exist(page: Path) -> None:
    """Dotted names, such as `draftwell.components.replay.sampled.replay_expected`."""
    for name in re.findall(
        r"(?:`|::: |-m )((?:components|flows|registry|serving)(?:\.\w+)+)",
        page.read_text(encoding="utf-8"),
    ):
        assert pkgutil.resolve_name(name) is not None


@pytest.mark.parametrize("page", CURRENT, ids=lambda page: str(page.relative_to(REPO)))
def test_nothing_refers_to_papers_that_the_repository_lacks(page: Path) -> None:
    assert not re.findall(
        r"\bMETHODS\b|\bDESIGN\b|\bissue \d+|\.\./shared/", page.read_text(encoding="utf-8")
    )


def test_readme_names_two_commands_and_what_a_stranger_types_next() -> None:
    called = [words[1] for place, words in commands("make") if place.startswith("README.md")]
    assert called[:2] == ["demo", "serve"]
    assert "`make test`" in README
    typed = [words[1] for place, words in commands("draftwell") if place.startswith("README.md")]
    assert typed[:2] == ["tune", "serve"]


def test_the_steps_of_a_tuning_are_told_in_their_order() -> None:
    place = "docs/tuning.md:"
    steps = [" ".join(words[1:3]) for at, words in commands("draftwell") if at.startswith(place)]
    assert [re.sub(" --.*", "", step) for step in steps[: len(LOOP)]] == LOOP


def test_readme_is_short_and_one_click_from_every_caveat() -> None:
    assert len(README.splitlines()) <= 70
    limits = CHOOSE.partition("\n## Limits\n")[2]
    for caveat in ("one look at one H100", "With 32 clients", "no tensor parallelism", "Alpha"):
        assert caveat in limits
    for page in ("choose.md#limits", "benchmarks.md", "exactness.md", "gates.md"):
        assert f"](docs/{page})" in README


def test_readme_compares_in_five_rows_with_figures_that_the_benchmarks_hold() -> None:
    table = README.partition("## Measured")[2].partition("\n\nDefault")[0]
    rows = re.findall(r"^\| (?!---|compared)(.*) \|$", table, re.MULTILINE)
    assert len(rows) == 5
    for figure in re.findall(r"[0-9.]+ \[[0-9., ]+\]", table):
        assert figure in BENCHMARKS, figure


def test_the_pages_without_papers_are_small() -> None:
    pages = [page for page in (REPO / "docs").rglob("*.md") if page.parent.name != "papers"]
    sizes = {page.name: page.stat().st_size for page in pages if page.name not in PAPERS}
    assert sum(sizes.values()) <= 250_000, sizes


def test_the_papers_are_two_screens_and_a_short_page_each() -> None:
    docs = REPO / "docs"
    assert (docs / "papers.md").stat().st_size <= 25_000
    assert (docs / "papers" / "own-pair.md").stat().st_size <= 3_000
    for page in (docs / "papers").glob("*.md"):
        text = page.read_text(encoding="utf-8")
        assert page.stat().st_size <= 30_000, page
        assert len(re.findall(r"^\| ?-{3}", text, re.MULTILINE)) <= 8, page
        assert text.count("![") <= 8, page


def test_every_page_is_in_the_navigation() -> None:
    config: dict[str, Any] = yaml.safe_load((REPO / "mkdocs.yml").read_text(encoding="utf-8"))
    listed = set(re.findall(r"'([\w/-]+\.md)'", repr(config["nav"])))
    left_out = set(config["exclude_docs"].split())
    assert listed.isdisjoint(left_out)
    pages = {
        str(page.relative_to(REPO / "docs")) for page in PAGES if page.is_relative_to(REPO / "docs")
    }
    assert sorted(pages - left_out - listed) == []


def test_the_command_reference_has_every_command_and_option(reference: ModuleType) -> None:
    from draftwell.flows.cli.main import all_commands

    page = reference.commands()
    for name, command in all_commands().items():
        assert f"## draftwell {name}\n" in page
        assert all(f"`{option}`" in page for p in command.params for option in p.opts)
        listed = page.partition(f"## draftwell {name}\n")[2].partition("\n## ")[0]
        rows = dict(re.findall(r"^\| `([^`]+)` \| .* \| (.*) \|$", listed, re.MULTILINE))
        assert [key for key in command.all_keys() if not rows.get(key)] == []
    assert "## draftwell-serve\n" in page


def test_the_other_references_are_made_of_the_source(reference: ModuleType) -> None:
    assert "`collect_prompts`" in reference.settings()
    assert "`max_regression`" in reference.settings()
    assert "## spide\n" in reference.strategies()
    codes = reference.error_codes()
    assert "`invalid_input`" in codes
    assert "`context_too_long`" in codes


def test_links_of_included_pages_are_rewritten(reference: ModuleType) -> None:
    text = (
        "[a](docs/tuning.md) [b](serving/runtime/strategies/PAPERS.md#x) "
        "[c](registry/gates.yaml) [d](https://example.org) [e](#f) [g](docs/log.md#h)"
    )
    assert reference.relinked(text, "", "index.md", "https://host/repo") == (
        "[a](tuning.md) [b](strategy_papers.md#x) "
        "[c](https://host/repo/blob/main/registry/gates.yaml) [d](https://example.org) "
        "[e](#f) [g](https://host/repo/blob/main/docs/log.md#h)"
    )
    assert reference.relinked("[a](../README.md)", "docs", "x/y.md", "u") == "[a](../index.md)"
