"""What restarts the servers: a user's own command, or a person."""

from __future__ import annotations

from pathlib import Path

from draftwell.flows.steps.engine.restart import restart_hook
from tests.support.errors import raises_code


def test_a_command_of_a_users_own_restarts(tmp_path: Path) -> None:
    said: list[str] = []
    assert restart_hook(f"touch '{tmp_path}/done'", said.append)()
    assert (tmp_path / "done").exists()
    assert said == [f"restarting: touch '{tmp_path}/done'"]
    assert not restart_hook(None, said.append)(), "nothing was restarted"
    with raises_code("restart_failed", "exit code 4"):
        restart_hook("exit 4", said.append)()
