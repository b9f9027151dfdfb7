"""Becomes a command whose process group ends when the process that started it is killed: `python
group_of_parent.py COMMAND...`

The starter holds this process's input open; nothing is written into it. A server starts processes
of its own, which would outlive both, and a server that is stopped (SIGSTOP) notices nothing. So a
watcher outside of the group waits for the end of the input. Linux only; elsewhere the command runs
without a watcher.
"""

from __future__ import annotations

import os
import signal
import sys

from peer_protocol import end_with_parent


def watch(leader: int) -> None:
    """Kill the group of `leader`, a process id, when the input ends; end before that if the leader
    does."""
    os.setpgid(0, 0)
    end_with_parent()
    os.read(0, 1)
    if os.getppid() == leader:
        os.killpg(leader, signal.SIGKILL)


def main() -> None:
    """Start the watcher, then run the command with an empty input."""
    leader = os.getpid()
    if sys.platform == "linux" and os.fork() == 0:
        watch(leader)
        os._exit(0)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.execvp(sys.argv[1], sys.argv[1:])


if __name__ == "__main__":
    main()
