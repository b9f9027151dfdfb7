"""A program in a process group: it ends with all that it started, also where its starter is
killed."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from draftwell.components.engines.process_group import ProcessGroup
from tests.support.paths import REPO
from tests.support.peers.environments import in_group
from tests.support.server.server_process import wait_until

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")

STARTER = """\
import pathlib, signal, sys, time
from draftwell.components.engines.process_group import ProcessGroup
group = ProcessGroup("fake", ["/bin/sh", "-c", "sleep 300 & exec cat"], pathlib.Path(sys.argv[1]), piped=True)
assert group.exchange(b"here\\n") == b"here\\n"
group.signal(signal.SIGSTOP)
print(group.pid, flush=True)
time.sleep(300)
"""  # noqa: E501


def test_one_that_rests_ends_with_all_that_it_started_when_its_starter_is_killed(
    tmp_path: Path,
) -> None:
    command = [sys.executable, "-c", STARTER, str(tmp_path / "log")]
    with subprocess.Popen(command, cwd=REPO, stdout=subprocess.PIPE) as starter:
        try:
            assert starter.stdout is not None
            group = int(starter.stdout.readline())
            assert len(in_group(group)) == 2
        finally:
            starter.send_signal(signal.SIGKILL)
    wait_until(lambda: not in_group(group), "it goes on")


def test_what_its_command_leaves_behind_ends_with_the_command(tmp_path: Path) -> None:
    group = ProcessGroup("fake", ["/bin/sh", "-c", "sleep 300 & exit 0"], tmp_path / "log")
    wait_until(lambda: not in_group(group.pid), "it goes on")
    group.end()


def test_one_that_ends_by_itself_answers_nothing_and_says_why(tmp_path: Path) -> None:
    group = ProcessGroup(
        "fake", ["/bin/sh", "-c", "echo no model >&2; exit 3"], tmp_path / "log", piped=True
    )
    try:
        assert group.exchange(b"x" * 1_000_000) == b""
        error = group.why_ended("engine_failed")
        assert error.code == "engine_failed"
        assert str(error) == f"fake ended with exit code 3 (no model); see {tmp_path / 'log'}"
    finally:
        group.end()


def test_what_is_asked_to_end_and_does_not_is_ended_by_force(tmp_path: Path) -> None:
    ignores = ["/bin/sh", "-c", "trap '' TERM; echo on; while :; do sleep 1; done"]
    group = ProcessGroup("fake", ignores, tmp_path / "log")
    wait_until(lambda: (tmp_path / "log").read_text() == "on\n", "it does not start")
    assert group.exit_code() is None
    group.end(0.2)
    assert group.exit_code() == -signal.SIGKILL
    wait_until(lambda: not in_group(group.pid), "it goes on")
