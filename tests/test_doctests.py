"""The examples in the docstrings of the source give what they show."""

import doctest
import importlib

import pytest

from tests.support.paths import REPO

MODULES = sorted(
    ".".join(("draftwell", *path.relative_to(REPO).with_suffix("").parts))
    for room in ("components", "flows", "registry", "serving")
    for path in (REPO / room).rglob("*.py")
    if ">>> " in path.read_text(encoding="utf-8")
)


@pytest.mark.parametrize("name", MODULES)
def test_examples_of_the_docstrings(name: str) -> None:
    result = doctest.testmod(importlib.import_module(name))
    assert result.attempted, f"{name} shows >>> outside a docstring"
    assert not result.failed, (
        f"{result.failed} of {result.attempted} examples fail: see the output above"
    )
