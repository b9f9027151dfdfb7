"""A fake vLLM for the commands that take `--engine vllm`."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from draftwell.flows import progress
from tests.support.commands import split_name
from tests.support.peers.environments import install

SPEEDS = {"draft_model:2": 1.6, "draft_model": 1.2, "ngram": 1.1}


@pytest.fixture
def vllm(
    run: Any,
    pair_file: Path,
    prompts_file: Path,
    own_stores: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Callable[..., Any]:
    """Runs a command with a fake vLLM that is faster with drafts."""
    install(tmp_path / "peers", monkeypatch, ("vllm",))
    monkeypatch.setenv("FAKE_ENGINE_SPEEDS", json.dumps(SPEEDS))
    fixed = f"--engine vllm --pair {pair_file} --prompts {prompts_file} --set max_tokens=8"

    def called(command: str, *more: Any) -> Any:
        name, options = split_name(command)
        return run(f"{name} {fixed} {options}", *more)

    return called


@pytest.fixture
def quiet_prefect(prefect_server: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server, and as in a command's own process our lines on stderr and none of Prefect's, which
    would go to the stream of the first command of this process."""
    from prefect.logging.handlers import PrefectConsoleHandler

    monkeypatch.setattr(PrefectConsoleHandler, "emit", lambda *_: None)
    monkeypatch.setattr(progress, "run_log", lambda: None)


@pytest.fixture
def folder(own_stores: Path) -> Path:
    return own_stores / "draftwell" / "pairs" / "tiny" / "float32" / "cpu" / "vllm"


@pytest.fixture
def more(tmp_path: Path) -> Path:
    """Prompts for the gate."""
    file = tmp_path / "more.jsonl"
    words = ("apple", "river", "stone", "cloud", "tiger", "lemon", "piano", "table")
    file.write_text("".join(json.dumps({"prompt": word}) + "\n" for word in words))
    return file


@pytest.fixture
def models(pair_file: Path, own_stores: Path, tmp_path: Path) -> Path:
    """Folders `big` and `small` of a target and its draft, with a card that states a licence."""
    for name, role in (("Big Model", "target"), ("small", "draft")):
        shutil.copytree(pair_file.parent / role, tmp_path / name)
    (tmp_path / "Big Model" / "README.md").write_text("---\nlicense: mit\n---\nA model.\n")
    return tmp_path
