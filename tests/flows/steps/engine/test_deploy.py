"""What the server of a bundle for vLLM is started with."""

from __future__ import annotations

from pathlib import Path

import pytest

from draftwell.flows.steps.engine.serve import server_environment
from tests.support.peers.environments import install


def test_a_server_keeps_the_preload_that_a_user_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(tmp_path / "peers", monkeypatch, ("vllm",))
    monkeypatch.setenv("LD_PRELOAD", "")
    monkeypatch.setenv("PYTHONPATH", "ours")
    found = server_environment("tiny")
    assert found["LD_PRELOAD"] == ""
    assert "PYTHONPATH" not in found
    monkeypatch.delenv("LD_PRELOAD")
    assert "LD_PRELOAD" not in server_environment("tiny")
