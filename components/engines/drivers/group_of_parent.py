"""Becomes a command whose process group ends with it, and when the process that started it is
killed: `python group_of_parent.py DESCRIPTOR COMMAND...`

DESCRIPTOR is the reading end of a pipe that the starter holds open; nothing is written into it. A
server starts processes of its own, which would outlive both, and one that is stopped (SIGSTOP)
notices nothing. So a watcher outside of the group waits for the end of the pipe or of the command:
where SIGHUP is ignored (`nohup`), a command that reads the end of its input may end first.
"""

from __future__ import annotations

import os
import select
import signal
import sys


def watch(leader: int, descriptor: int) -> None:
    """Kill the group of `leader`, a process id, when that or the pipe ends; run in another group.

    The number of a group that has processes belongs to no other one.
    """
    nothing = os.open(os.devnull, os.O_RDWR)
    for own in range(3):  # else who reads the command's output would wait for the watcher, too
        os.dup2(nothing, own)
    try:
        select.select([descriptor, os.pidfd_open(leader)], [], [])
        os.killpg(leader, signal.SIGKILL)
    except ProcessLookupError:
        pass


def main() -> None:
    """Start the watcher, then run the command."""
    leader, descriptor = os.getpid(), int(sys.argv[1])
    watcher = os.fork()
    if watcher == 0:
        watch(leader, descriptor)
        os._exit(0)
    os.setpgid(watcher, watcher)  # before the command runs, and may be stopped with its group
    os.close(descriptor)
    os.execvp(sys.argv[2], sys.argv[2:])


if __name__ == "__main__":
    main()
