"""A rolling restart of what serves a pair on this machine: each process is followed by one of the bundle that `current` leads to.

The new process listens on the old one's port, which both share (`listen.py` of the bundle), and only when it does is the old one asked to
end. What is served is found by asking Linux who listens, and from which bundle: nothing is noted that could be out of date.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from components.engines.environments import peers_root
from components.engines.failures import last_line, why_ended
from components.engines.ports import listening
from components.engines.process import START_SECONDS
from components.engines.vllm import NAME, file_name
from registry.bundles.vllm.build import bundles_of
from registry.bundles.vllm.render import DRAIN
from serving.errors import DraftwellError

POLL_SECONDS = 0.2
END_SECONDS = 2.0 * DRAIN
"""That an old process has to answer what it has begun, and to end."""


@dataclass(frozen=True)
class Replica:
    """A process that serves a bundle.

    Args:
        bundle: its folder.
        port: that it listens on.
        options: those that a user gave `serve.sh`.
        environment: as a user started `serve.sh`, without what that has set itself.
    """

    pid: int
    bundle: Path
    port: int
    options: tuple[str, ...]
    environment: Mapping[str, str]

    @property
    def number(self) -> str:
        """Of the replica, which on CPUs decides about its cores."""
        return self.environment.get("DRAFTWELL_REPLICA") or "1"


def replicas_of(out: Path, pair: str) -> list[Replica]:
    """The processes of this user and machine that serve a bundle of a pair, in the order of their start; empty where there is no /proc.

    Args:
        out: folder of bundles.
    """
    home = bundles_of(out, pair).resolve()
    found = {}
    for place in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError, ValueError, KeyError):  # it is another user's, has ended, or serves nothing
            bundle = Path(os.readlink(place / "cwd"))
            if bundle.parent == home and (ports := listening(int(place.name))):
                found[int(place.name)] = replica_of(place, bundle, min(ports))
    return [replica for pid, replica in sorted(found.items()) if parent_of(pid) not in found]  # an engine's process may hold the socket too


def replica_of(place: Path, bundle: Path, port: int) -> Replica:
    """What a process was started with.

    Args:
        place: its folder in /proc.
    Raises:
        OSError, KeyError, ValueError: it has ended, or was not started by `serve.sh`.
    """
    words = os.fsdecode((place / "cmdline").read_bytes()).split("\0")[:-1]
    pairs = (one.partition("=") for one in os.fsdecode((place / "environ").read_bytes()).split("\0") if one)
    variables = {name: value for name, _, value in pairs}
    count, own = int(variables["DRAFTWELL_OPTIONS"]), set(variables["DRAFTWELL_SET"].split())
    return Replica(int(place.name), bundle, port, tuple(words[len(words) - count :]),
                   {name: value for name, value in variables.items() if name not in own})


def parent_of(pid: int) -> int:
    """Process id of its parent; 0 where it has ended."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return 0


def rolling_restart(out: Path, pair: str, say: Callable[[str], None], *, start_seconds: float = START_SECONDS,
                    end_seconds: float = END_SECONDS) -> int:
    """Let every process that serves another bundle of a pair than the one that `current` leads to be followed by one that serves that.

    One after the other: it starts on the same port with the same options and variables, and the old one is asked to end when the new one
    listens. Killed in between, it is called again; a process that has started already stays.

    Args:
        out: folder of bundles.
        start_seconds: within which a new one must listen.
        end_seconds: within which an old one must have ended.
    Returns:
        how many were followed by another; 0 where all serve that bundle, or none serves.
    Raises:
        DraftwellError: there is no bundle (`no_bundle`); a new process did not start (as `why_ended` says, or `server_failed`), then the
            old one serves on; or an old one does not end (`server_not_ended`), while the new one serves.
    """
    current = bundles_of(out, pair) / "current"
    bundle = current.resolve()
    if not (bundle / "serve.sh").is_file():
        raise DraftwellError(f"no bundle at {current}: build one with `draftwell deploy --engine {NAME}`", code="no_bundle")
    running = replicas_of(out, pair)
    done = {(one.port, one.number) for one in running if one.bundle == bundle}
    others = [one for one in running if one.bundle != bundle]
    for old in others:
        if (old.port, old.number) not in done:  # else an earlier restart was stopped after the new one listened
            say(f"starting {bundle.name} on port {old.port} beside {old.bundle.name} (process {old.pid})")
            start_beside(old, bundle, pair, start_seconds)
        say(f"{bundle.name} listens on port {old.port}: process {old.pid} answers what it has begun, and ends")
        end_process(old.pid, end_seconds)
    if not running:
        say(f"nothing of {pair} is served by this user here: start it with `draftwell serve --engine {NAME} --pair {pair}`")
    elif not others:
        say(f"all that serves {pair} here serves {bundle.name}")
    return len(others)


def start_beside(old: Replica, bundle: Path, pair: str, seconds: float) -> int:
    """Start a process that serves a bundle as another one serves its own, and wait until it listens; returns its process id.

    It belongs to no terminal. Its log is beside those of the engines.

    Raises:
        DraftwellError: it ended, or did not listen in time; it is gone then.
    """
    log = peers_root() / "logs" / f"{file_name(f'{NAME}/{pair}-{old.port}-{old.number}-{bundle.name}')}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    variables = {**old.environment, "DRAFTWELL_REPLICA": old.number}
    script = str(bundle / "serve.sh")
    # no Popen, whose object warns where it is dropped and its process serves on
    pid = os.posix_spawn(script, [script, *old.options], variables, setsid=True, file_actions=[
        (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
        (os.POSIX_SPAWN_OPEN, 1, str(log), os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644), (os.POSIX_SPAWN_DUP2, 1, 2)])
    try:
        wait_until_it_listens(pid, old.port, log, seconds)
    except BaseException:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):  # it was waited for
            os.waitpid(pid, 0)
        raise
    return pid


def wait_until_it_listens(pid: int, port: int, log: Path, seconds: float) -> None:
    """Wait until this very child listens on a port, on which others may listen too. vLLM listens when its engine is ready.

    Raises:
        DraftwellError: it ended, or does not listen in time.
    """
    end, label = time.monotonic() + seconds, f"the new process on port {port}"
    while port not in listening(pid):
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            code = os.waitstatus_to_exitcode(status)
            error = why_ended(label, log, code)
            if error.code != "engine_failed":
                raise error
            raise DraftwellError(f"{label} ended with exit code {code} ({last_line(log)}), and what was served before is served on: see "
                                 f"{log}", code="server_failed")
        if time.monotonic() >= end:
            raise DraftwellError(f"{label} did not listen within {seconds:g} s, and what was served before is served on: see {log}",
                                 code="server_failed")
        time.sleep(POLL_SECONDS)


def end_process(pid: int, seconds: float) -> None:
    """Ask a process to end, and wait until it has.

    Raises:
        DraftwellError: it has not in time (`server_not_ended`).
    """
    try:
        handle = os.pidfd_open(pid)  # a number may be given again, this may not
    except ProcessLookupError:
        return
    try:
        signal.pidfd_send_signal(handle, signal.SIGTERM)
        ready, _, _ = select.select([handle], [], [], seconds)
    except ProcessLookupError:
        return
    finally:
        os.close(handle)
    if not ready:
        raise DraftwellError(f"process {pid} of the bundle before has not ended within {seconds:g} s; the new one serves: end it by hand",
                             code="server_not_ended")


def restart_hook(command: str | None, out: Path, pair: str, say: Callable[[str], None]) -> Callable[[], bool]:
    """What restarts the servers of a pair after `current` has moved.

    Args:
        command: of a shell, such as `docker compose …`; None restarts what this user serves on this machine.
    Returns:
        a call, which says whether there was anything to restart as far as can be known (a command is taken at its word), and raises a
        `DraftwellError` where the command fails (`restart_failed`), or what `rolling_restart` does.
    """
    def restart() -> bool:
        if command is None:
            rolling_restart(out, pair, say)
            return bool(replicas_of(out, pair))
        say(f"restarting: {command}")
        done = subprocess.run(["/bin/sh", "-c", command], stdin=subprocess.DEVNULL, check=False)
        if done.returncode:
            raise DraftwellError(f"what should restart the servers ended with exit code {done.returncode}: {command}",
                                 code="restart_failed")
        return True

    return restart

