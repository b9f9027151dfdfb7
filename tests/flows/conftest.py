"""One tiny pair and one Prefect server for all tests of this folder."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.flows.tiny_files import write_pair, write_prompts


@pytest.fixture(scope="session")
def pair_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """YAML file of a tiny pair."""
    return write_pair(tmp_path_factory.mktemp("pair"))


@pytest.fixture(scope="session")
def prompts_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Twelve short prompts."""
    return write_prompts(tmp_path_factory.mktemp("prompts") / "prompts.jsonl")


@pytest.fixture
def run() -> Callable[..., Any]:
    """Run `draftwell` in this process."""
    from typer.testing import CliRunner

    from flows.cli.main import app

    return lambda *arguments: CliRunner().invoke(app, [str(argument) for argument in arguments])
