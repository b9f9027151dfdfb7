"""Fenced blocks of the pages: each names its language; JSON, YAML and Python parse, and what Python
imports exists."""

from __future__ import annotations

import ast
import importlib
import json
import re
import subprocess
from textwrap import dedent

import pytest
import yaml

import draftwell
from draftwell.registry.pairs import PairSpec
from tests.support.markdown import SHELL, Fence, fences

LANGUAGES = {
    *SHELL,
    "python",
    "json",
    "yaml",
    "toml",
    "text",
    "html",
    "http",
    "dockerfile",
    "ini",
    "diff",
}
OURS = "draftwell"


@pytest.mark.parametrize("fence", fences(), ids=str)
def test_it_names_its_language(fence: Fence) -> None:
    assert fence.language in LANGUAGES, f"{fence}: label the block (text for a picture or output)"


@pytest.mark.parametrize("fence", fences("json"), ids=str)
def test_json(fence: Fence) -> None:
    """Whole documents, and single members as they stand in a request's body."""
    json.loads(f"{{{fence.body}}}" if fence.body.startswith('"') else fence.body)


@pytest.mark.parametrize("fence", fences("yaml"), ids=str)
def test_yaml(fence: Fence) -> None:
    assert yaml.safe_load(fence.body)


@pytest.mark.parametrize("fence", fences("python"), ids=str)
def test_python(fence: Fence) -> None:
    for node in ast.walk(ast.parse(fence.body, str(fence))):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(OURS):
            module = importlib.import_module(str(node.module))
            assert [name.name for name in node.names if not hasattr(module, name.name)] == [], fence


@pytest.mark.parametrize("fence", fences(*SHELL), ids=str)
def test_shell(fence: Fence) -> None:
    parsed = subprocess.run(
        ["bash", "-n"], input=fence.body, capture_output=True, text=True, check=False
    )
    assert parsed.returncode == 0, parsed.stderr


def pairs() -> list[Fence]:
    return [fence for fence in fences("yaml") if re.search("^target:", fence.body, re.MULTILINE)]


@pytest.mark.parametrize("fence", pairs(), ids=str)
def test_a_pair_of_ones_own_is_valid(fence: Fence) -> None:
    assert (
        PairSpec.model_validate(yaml.safe_load(fence.body)).name
        == yaml.safe_load(fence.body)["name"]
    )


def test_there_is_a_pair_of_ten_lines_at_most() -> None:
    sizes = [len(fence.body.splitlines()) for fence in pairs()]
    assert sizes
    assert min(sizes) <= 10


def test_the_program_of_the_readme_is_the_librarys_example() -> None:
    """That is the one which tests/test_library.py runs."""
    stated = (draftwell.__doc__ or "").split("of your own:\n\n", 1)[1].split("\n\n`", 1)[0]
    [program] = [fence.body for fence in fences("python") if fence.page.name == "README.md"]
    assert program.strip() == dedent(stated).strip()
