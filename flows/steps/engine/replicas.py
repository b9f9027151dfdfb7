"""A rolling restart of what serves a pair on this machine: each process is followed by one of the
bundle that `current` leads to.

Where other processes listen on the old one's port, these answer while it is ended and the new one
starts in its place. A single process is ended only when the new one listens beside it; both share
the port (`listen.py` of the bundle). What is served is found by asking Linux (`processes.py`).
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Set
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from draftwell.components.engines.environments import peers_root
from draftwell.components.engines.failures import last_line, why_ended
from draftwell.components.engines.ports import listening
from draftwell.components.engines.process import START_SECONDS
from draftwell.components.engines.vllm import NAME, file_name
from draftwell.flows.steps.engine.processes import Replica, replicas_of
from draftwell.flows.steps.engine.restart_record import read_record, write_record
from draftwell.registry.bundles.vllm.build import bundles_of
from draftwell.serving.errors import DraftwellError
from draftwell.serving.files import file_lock

POLL_SECONDS = 0.2
END_SECONDS = 30.0
"""That an old process has to end, besides what its requests and its engine have
(`--shutdown-timeout` each)."""
LOCK, RECORD = ".restart", ".restart.json"
"""Files beside the bundles of a pair: which a restart locks, and where it notes the process that is
to be followed."""
Say = Callable[[str], None]


def rolling_restart(
    out: Path,
    pair: str,
    say: Say,
    *,
    start_seconds: float = START_SECONDS,
    end_seconds: float = END_SECONDS,
) -> int:
    """Let every process that serves another bundle of a pair than the one that `current` leads to
    be followed by one that serves that.

    One after the other, on the same port with the same options, variables and cores. Another
    restart of the pair is waited for. Killed in between, it is called again: a process that it has
    started already stays, and one that it has ended without another is made up for.

    Args:
        out: folder of bundles.
        start_seconds: within which a new one must listen.
        end_seconds: within which an old one must have ended, besides twice its
            `--shutdown-timeout`.
    Returns:
        how many were followed by another, now or as made up for; 0 where all serve that bundle, or
        none serves.
    Raises:
        DraftwellError: there is no bundle (`no_bundle`); a new process did not start (as
            `why_ended` says, or `server_failed`), then the old one serves on, or one of its bundle
            was started in its place; or an old one does not end (`server_not_ended`), then the next
            restart starts one in its place.
    """
    current = bundles_of(out, pair) / "current"
    if not (current / "serve.sh").is_file():
        raise DraftwellError(
            f"no bundle at {current}: build one with `draftwell deploy --engine {NAME}`",
            code="no_bundle",
        )
    with alone(current.parent / LOCK, say):
        bundle = current.resolve()
        running = replicas_of(out, pair)
        # those that an earlier restart, which was killed, has started
        done = {
            (one.port, one.number)
            for one in running
            if one.bundle == bundle and comes(one, start_seconds, say)
        }
        others = [one for one in running if one.bundle != bundle]
        restart = Restart(
            out, pair, bundle, say, start_seconds, end_seconds, current.parent / RECORD
        )
        lost = restart.lost(done | {(one.port, one.number) for one in others})
        if lost is not None:
            say(
                f"an earlier restart has ended replica {lost.number} on port {lost.port}, "
                "and none has followed it"
            )
            restart.in_place(lost)
        for old in others:
            restart.follow(old, done=(old.port, old.number) in done)
    if lost is not None:
        return len(others) + 1
    if not running:
        say(
            f"nothing of {pair} is served by this user here: start it with `draftwell "
            f"serve --engine {NAME} --pair {pair}`"
        )
    elif not others:
        say(f"all that serves {pair} here serves {bundle.name}")
    return len(others)


@contextmanager
def alone(lock: Path, say: Say) -> Iterator[None]:
    """Hold a restart's lock; wait, after a line, while another restart holds it."""
    with file_lock(lock, wait=False) as free:
        if free:
            yield
            return
    say(f"another restart is under way: waiting for it ({lock})")
    with file_lock(lock):
        yield


def comes(new: Replica, seconds: float, say: Say) -> bool:
    """Whether a process listens, which is waited for; False where it ends instead.

    Raises:
        DraftwellError: it does neither in time (`server_failed`).
    """
    if not new.is_ready:
        say(f"process {new.pid} is loading {new.bundle.name} for port {new.port}: waiting for it")
    end = time.monotonic() + seconds
    while new.runs and not new.is_ready:
        if time.monotonic() >= end:
            raise DraftwellError(
                f"process {new.pid}, which loads {new.bundle.name}, did not listen on port "
                f"{new.port} within {seconds:g} "
                "s, and what was served before is served on: end it by hand, then restart again",
                code="server_failed",
            )
        time.sleep(POLL_SECONDS)
    return new.runs


@dataclass(frozen=True)
class Restart:
    """How processes are followed by others.

    Args:
        bundle: that the new ones serve.
        start_seconds, end_seconds: as `rolling_restart` takes them.
        record: file that notes the process that is to be followed in its place.
    """

    out: Path
    pair: str
    bundle: Path
    say: Say
    start_seconds: float
    end_seconds: float
    record: Path

    def lost(self, there: Set[tuple[int, str]]) -> Replica | None:
        """The process that an earlier restart has ended without another in its place; None where
        there is none.

        Args:
            there: port and number of the replicas that serve, or are to be followed.
        """
        old = read_record(self.record)
        if old is not None and (old.port, old.number) not in there:
            return old
        self.record.unlink(missing_ok=True)
        return None

    def follow(self, old: Replica, *, done: bool) -> None:
        """Let a process be followed by one that serves the bundle.

        Args:
            done: whether that one listens already.
        Raises:
            DraftwellError: as `rolling_restart` says.
        """
        others = (
            one
            for one in replicas_of(self.out, self.pair)
            if one.port == old.port and one.pid != old.pid
        )
        if done:
            self.end(old)
        elif any(one.is_ready for one in others) or not old.is_ready:
            self.in_place(old)
        else:
            self.beside(old)

    def beside(self, old: Replica) -> None:
        """Start the new process first: no other one would answer."""
        self.say(
            f"starting {self.bundle.name} on port {old.port} beside {old.bundle.name} "
            f"(process {old.pid})"
        )
        try:
            start(old, self.bundle, self.pair, self.start_seconds)
        except DraftwellError as error:
            raise DraftwellError(
                f"{error}; {old.bundle.name} is served on", code=error.code
            ) from error
        self.say(f"{self.bundle.name} listens on port {old.port}")
        self.end(old)

    def in_place(self, old: Replica) -> None:
        """End the old process first, so that both never share the device; if the new one does not
        start, start the earlier bundle again."""
        self.tell_end(old)
        write_record(self.record, old)
        try:
            try:
                end_process(old, self.end_seconds)
                self.say(f"starting {self.bundle.name} on port {old.port} in its place")
                start(old, self.bundle, self.pair, self.start_seconds)
            except DraftwellError as error:
                if old.runs:
                    raise
                self.start_again(old, error)
        except DraftwellError:
            raise
        except BaseException:  # asked to end
            self.restore(old)
            raise
        self.record.unlink(missing_ok=True)

    def start_again(self, old: Replica, error: DraftwellError) -> NoReturn:
        """Start the earlier bundle, because the new one did not start, and raise."""
        self.say(f"{self.bundle.name} did not start: starting {old.bundle.name} again")
        try:
            start(old, old.bundle, self.pair, self.start_seconds)
        except DraftwellError as again:
            raise DraftwellError(
                f"{error}; nor did {old.bundle.name} start again: {again}", code=error.code
            ) from error
        self.record.unlink(missing_ok=True)
        raise DraftwellError(
            f"{error}; {old.bundle.name} was started again", code=error.code
        ) from error

    def restore(self, old: Replica) -> None:
        """Start the earlier bundle again when the old process, which was asked to end, has: both at
        once may not fit the device."""
        try:
            end_process(old, self.end_seconds)
        except DraftwellError as error:
            self.say(f"stopped: {error}")
            return
        self.say(f"stopped: starting {old.bundle.name} on port {old.port} again")
        spawn(old, old.bundle, self.pair)

    def end(self, old: Replica) -> None:
        """Ask a process to end, and wait until it has."""
        self.tell_end(old)
        end_process(old, self.end_seconds)

    def tell_end(self, old: Replica) -> None:
        """Say that a process is asked to end, unless it has ended already."""
        if old.runs:
            self.say(
                f"process {old.pid} of {old.bundle.name} on port {old.port} answers what "
                "it has begun, and ends"
            )


def start(old: Replica, bundle: Path, pair: str, seconds: float) -> None:
    """Start a process that serves a bundle as another one serves its own, and wait until it
    listens.

    Raises:
        DraftwellError: it ended, or did not listen in time; it is gone then.
    """
    pid, log = spawn(old, bundle, pair)
    try:
        wait_until_it_listens(pid, old.port, log, seconds)
    except BaseException:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):  # it was waited for
            os.waitpid(pid, 0)
        raise


def spawn(old: Replica, bundle: Path, pair: str) -> tuple[int, Path]:
    """A new process that serves a bundle as another one serves its own, on that one's port and
    cores: its process id, and its log.

    It belongs to no terminal. Its log is beside those of the engines.
    """
    log = (
        peers_root()
        / "logs"
        / f"{file_name(f'{NAME}/{pair}-{old.port}-{old.number}-{bundle.name}')}.log"
    )
    log.parent.mkdir(parents=True, exist_ok=True)
    # another bundle may have another port
    variables = {**old.environment, "DRAFTWELL_REPLICA": old.number, "PORT": str(old.port)}
    script = str(bundle / "serve.sh")
    # no Popen, whose object warns where it is dropped and its process serves on
    pid = os.posix_spawn(
        script,
        [script, *old.options],
        variables,
        setsid=True,
        file_actions=[
            (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
            (os.POSIX_SPAWN_OPEN, 1, str(log), os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644),
            (os.POSIX_SPAWN_DUP2, 1, 2),
        ],
    )
    with contextlib.suppress(OSError):  # where this process may not use them
        # serve.sh reads its own after it has checked the bundle
        os.sched_setaffinity(pid, old.cores)
    return pid, log


def wait_until_it_listens(pid: int, port: int, log: Path, seconds: float) -> None:
    """Wait until this very child listens on a port, on which others may listen too. vLLM listens
    when its engine is ready.

    Raises:
        DraftwellError: it ended, or does not listen in time.
    """
    end, label = time.monotonic() + seconds, f"the new process on port {port}"
    while port not in listening(pid):
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            code = os.waitstatus_to_exitcode(status)
            error = why_ended(label, log, code)
            # their advice is for what tunes
            if error.code in ("engine_failed", "engine_port_taken"):
                raise DraftwellError(
                    f"{label} ended with exit code {code} ({last_line(log)}): see {log}",
                    code="server_failed",
                )
            raise error
        if time.monotonic() >= end:
            raise DraftwellError(
                f"{label} did not listen within {seconds:g} s: see {log}", code="server_failed"
            )
        time.sleep(POLL_SECONDS)


def end_process(old: Replica, seconds: float) -> None:
    """Ask a process to end, and wait until it has.

    Args:
        seconds: that it has, besides twice what its requests have (`drain`): its engine may take as
            long again.
    Raises:
        DraftwellError: it has not in time (`server_not_ended`).
    """
    seconds += 2 * old.drain
    try:
        handle = os.pidfd_open(old.pid)
    except ProcessLookupError:
        return
    try:
        if not old.runs:  # its number is another process's by now
            return
        signal.pidfd_send_signal(handle, signal.SIGTERM)
        ready, _, _ = select.select([handle], [], [], seconds)
    except ProcessLookupError:
        return
    finally:
        os.close(handle)
    if not ready:
        raise DraftwellError(
            f"process {old.pid} of {old.bundle.name} has not ended within {seconds:g} s: "
            "end it by hand, then restart "
            "again",
            code="server_not_ended",
        )


def restart_hook(command: str | None, out: Path, pair: str, say: Say) -> Callable[[], bool]:
    """What restarts the servers of a pair after `current` has moved.

    Args:
        command: of a shell, such as `docker compose …`; None restarts what this user serves on this
            machine.
    Returns:
        a call, which says whether there was anything to restart as far as can be known (a command
        is taken at its word), and raises a `DraftwellError` where the command fails
        (`restart_failed`), or what `rolling_restart` does.
    """

    def restart() -> bool:
        if command is None:
            rolling_restart(out, pair, say)
            return bool(replicas_of(out, pair))
        say(f"restarting: {command}")
        done = subprocess.run(["/bin/sh", "-c", command], stdin=subprocess.DEVNULL, check=False)
        if done.returncode:
            raise DraftwellError(
                (
                    f"what should restart the servers ended with exit code {done.returncode}: "
                    f"{command}"
                ),
                code="restart_failed",
            )
        return True

    return restart
