"""What the server of a bundle for vLLM is started with."""

from __future__ import annotations

from pathlib import Path

import pytest

from draftwell.flows.steps.engine.serve import serve_and_ask, server_environment
from tests.support.errors import raises_code
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


def test_the_trials_server_is_given_no_key_because_the_trial_sends_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(tmp_path / "peers", monkeypatch, ("vllm",))
    monkeypatch.setenv("VLLM_API_KEY", "mine")
    monkeypatch.setenv("VLLM_API_KEY_FILE", "/a/file")
    script = tmp_path / "serve.sh"
    script.write_text('#!/bin/sh\necho "key <${VLLM_API_KEY:-}${VLLM_API_KEY_FILE:-}>"\nexit 1\n')
    script.chmod(0o755)
    limits = {"max_tokens": 1, "seconds": 1.0, "clients": 1}
    with raises_code("server_failed"):
        serve_and_ask(tmp_path, "tiny", [[1]], **limits, spool=tmp_path)  # type: ignore[arg-type]
    (log,) = (tmp_path / "peers").rglob("*serve-tiny*.log")
    assert "key <>" in log.read_text()
