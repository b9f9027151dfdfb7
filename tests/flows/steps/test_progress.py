"""Progress lines: the last step always, the others not too often."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from draftwell.flows.progress import counting, settle_prefect


def test_lines_come_at_most_every_five_seconds_and_at_the_end(capsys):
    now = iter([0.0, 1.0, 6.0, 6.0, 7.0, 8.0, 8.0])
    show = counting("bench", lambda: next(now))
    for done, words in ((1, "a"), (2, "b"), (3, "c")):
        show(done, 4, words)
    show(4, 4)
    assert capsys.readouterr().err.splitlines() == ["    bench: 2/4 b", "    bench: 4/4"]


def test_what_the_demo_runs_keeps_prefects_state_in_the_home(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in (
        "PREFECT_HOME",
        "PREFECT_LOGGING_LEVEL",
        "PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS",
    ):
        monkeypatch.setenv(name, "")  # put back after the test
        monkeypatch.delenv(name)
    monkeypatch.setenv("DRAFTWELL_HOME", "state")
    settle_prefect()
    assert os.environ["PREFECT_HOME"] == str(tmp_path / "state" / "prefect")
    assert (tmp_path / "state" / "prefect").is_dir(), (
        "Prefect's server makes no folder for its database"
    )
    monkeypatch.setenv("PREFECT_HOME", "mine")
    settle_prefect()
    assert os.environ["PREFECT_HOME"] == "mine"
