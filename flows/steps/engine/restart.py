"""Restarting what serves a pair: a command that its user names, because systemd, compose,
Kubernetes or Ray runs the servers."""

from __future__ import annotations

import subprocess
from collections.abc import Callable

from draftwell.serving.errors import DraftwellError


def restart_hook(command: str | None, say: Callable[[str], None]) -> Callable[[], bool]:
    """What is called after `current` has moved.

    Args:
        command: of a shell, such as `systemctl restart my-vllm`; None leaves it to a person.
    Returns:
        a call that says whether anything was restarted; a command is taken at its word. It raises a
        `DraftwellError` where the command fails (`restart_failed`).
    """

    def restart() -> bool:
        if command is None:
            return False
        say(f"restarting: {command}")
        done = subprocess.run(["/bin/sh", "-c", command], stdin=subprocess.DEVNULL, check=False)
        if done.returncode:
            raise DraftwellError(
                f"the command that restarts the servers ended with exit code {done.returncode}: "
                f"{command}",
                code="restart_failed",
            )
        return True

    return restart
