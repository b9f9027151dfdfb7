"""A server's process: it ends with the one that started it, whatever ends that, and says why it
ended."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from draftwell.components.bench.servers import processes
from draftwell.components.bench.servers.processes import Server
from tests.support.errors import raises_code
from tests.support.paths import REPO
from tests.support.peers.environments import in_group
from tests.support.server.server_process import wait_until

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")

FAKE = REPO / "tests" / "support" / "peers" / "fake_server.py"
COMMAND = [sys.executable, str(FAKE)]
STARTER = """\
import pathlib, sys, time
from draftwell.components.bench.servers.processes import Server
server = Server("fake", ["/bin/sh", "-c", 'sleep 300 & exec "$0" "$@"', *sys.argv[2:]], pathlib.Path(sys.argv[1]))
print(server.group.pid, flush=True)
if "running" in sys.argv[1]:
    with server.running():
        time.sleep(300)
time.sleep(300)
"""  # noqa: E501


@pytest.mark.parametrize("log", ["running", "stopped"])
def test_it_ends_with_all_that_it_started_when_its_starter_is_killed(
    log: str, tmp_path: Path
) -> None:
    """It served on, with the model in memory and the port taken; also a process of its own and one
    that is stopped have to end."""
    with subprocess.Popen(
        [sys.executable, "-c", STARTER, str(tmp_path / log), *COMMAND],
        cwd=REPO,
        stdout=subprocess.PIPE,
    ) as starter:
        try:
            assert starter.stdout is not None
            group = int(starter.stdout.readline())
            assert len(in_group(group)) == 2
        finally:
            starter.send_signal(signal.SIGKILL)
    wait_until(lambda: not in_group(group), "it goes on")


def test_closed_it_leaves_nothing_and_why_it_ended_is_told(tmp_path: Path) -> None:
    server = Server("fake", COMMAND, tmp_path / "log")
    server.refuse_ended()
    group = server.group.pid
    server.group.process.kill()
    with raises_code("engine_killed", "fake", "SIGKILL"):
        server.refuse_ended(60)
    server.close()
    wait_until(lambda: not in_group(group), "it goes on")


def test_a_server_that_refuses_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One with a key was asked without for half an hour."""
    monkeypatch.setattr(processes, "START_SECONDS", 120.0)
    with raises_code("server_failed", "HTTP 401"):
        Server("fake", [*COMMAND, "--refuse"], tmp_path / "log")
