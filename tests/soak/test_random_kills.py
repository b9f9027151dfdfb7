"""200 kills at random moments of training, collecting, publishing, deploying, switching and keeping
state: every restart goes on, and nothing that was reported as done is lost or replaced."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

KILLS = 200
pytestmark = pytest.mark.soak


def test_every_restart_goes_on_and_nothing_is_lost(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.soak.random_kills", str(tmp_path), str(KILLS)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=3600, check=False)
    assert done.returncode == 0, done.stderr
    killed: Counter[str] = Counter()
    last: dict[str, int] = {}
    for line in done.stdout.splitlines():
        name, reported, found = line.split()
        assert int(found) in (int(reported), int(reported) + 1), line
        killed[name] += 1
        last[name] = int(found)
    assert sum(killed.values()) == KILLS
    assert min(last.values()) > 0, "every writer finished something between two kills"
    print(f"\nkills {dict(killed)}, written {last}")
