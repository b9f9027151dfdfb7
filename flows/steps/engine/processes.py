"""The processes that serve a pair's bundles for vLLM on this machine, as Linux lists them."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from draftwell.components.engines.ports import listening
from draftwell.registry.bundles.vllm.build import bundles_of

SERVER = "listen.py"
"""What `serve.sh` becomes; processes that the engine starts have its variables and its folder, but
not this word."""
TRIAL = "DRAFTWELL_TRIAL"
"""Variable of a server that is only being tried, and that a restart leaves alone."""


@dataclass(frozen=True)
class Replica:
    """A process that serves a bundle, or loads it.

    Args:
        bundle: its folder.
        port: that it listens on, or will.
        options: those that a user gave `serve.sh`.
        environment: as a user started `serve.sh`, without what that has set itself.
        started: when, in clock ticks since the machine's start: a process id may be given again,
            both together may not.
        cores: that it may use.
        drain: seconds that it has for what it has begun when it is asked to end.
    """

    pid: int
    bundle: Path
    port: int
    options: tuple[str, ...]
    environment: Mapping[str, str]
    started: int = 0
    cores: frozenset[int] = frozenset()
    drain: float = 0.0

    @property
    def number(self) -> str:
        """Of the replica, which on CPUs decides about its cores."""
        return self.environment.get("DRAFTWELL_REPLICA") or "1"

    @property
    def runs(self) -> bool:
        """Whether this very process has not ended."""
        return started_at(self.pid) == self.started

    @property
    def is_ready(self) -> bool:
        """Whether it listens now."""
        return self.port in listening(self.pid)


def replicas_of(out: Path, pair: str) -> list[Replica]:
    """The processes of this user and machine that serve a bundle of a pair or load it, in the order
    of their start; empty where there is no /proc. Those that were asked to end and those that are
    only being tried are left out.

    Args:
        out: folder of bundles.
    """
    home = bundles_of(out, pair).resolve()
    found = {}
    for place in Path("/proc").glob("[0-9]*"):
        # it is another user's, has ended, or serves nothing
        with contextlib.suppress(OSError, ValueError, KeyError):
            bundle = Path(os.readlink(place / "cwd"))
            if bundle.parent == home and (replica := replica_of(place, bundle)) is not None:
                found[replica.pid] = replica
    # an engine's process may hold the socket too
    own = [replica for replica in found.values() if parent_of(replica.pid) not in found]
    return sorted(own, key=lambda one: (one.started, one.pid))


def replica_of(place: Path, bundle: Path) -> Replica | None:
    """What a process was started with; None where it neither serves nor loads.

    Args:
        place: its folder in /proc.
    Raises:
        OSError, KeyError, ValueError: it has ended, or was not started by `serve.sh`.
    """
    pid = int(place.name)
    words = os.fsdecode((place / "cmdline").read_bytes()).split("\0")[:-1]
    pairs = (
        one.partition("=")
        for one in os.fsdecode((place / "environ").read_bytes()).split("\0")
        if one
    )
    variables = {name: value for name, _, value in pairs}
    count, port = int(variables["DRAFTWELL_OPTIONS"]), int(option_of(words, "--port") or "")
    started = started_at(pid)
    if (
        started is None
        or variables.get(TRIAL)
        or (port not in listening(pid) and (SERVER not in words or ignores(place, signal.SIGTERM)))
    ):
        return None
    return Replica(
        pid,
        bundle,
        port,
        tuple(words[len(words) - count :]),
        given(variables, bundle),
        started,
        frozenset(os.sched_getaffinity(pid)),
        float(option_of(words, "--shutdown-timeout") or 0),
    )


def given(variables: Mapping[str, str], bundle: Path) -> dict[str, str]:
    """The variables that a user gave `serve.sh`: those of the process without what the script has
    set, and without the bundle's wheels."""
    own = set(variables["DRAFTWELL_SET"].split())
    paths = [
        path
        for path in variables.get("PYTHONPATH", "").split(":")
        if path and bundle not in Path(path).parents
    ]
    return {
        **{
            name: value
            for name, value in variables.items()
            if name not in own and name != "PYTHONPATH"
        },
        **({"PYTHONPATH": ":".join(paths)} if paths else {}),
    }


def ignores(place: Path, number: signal.Signals) -> bool:
    """Whether a process ignores a signal, as one of ours does with SIGTERM once it was asked to
    end."""
    masks = dict(line.split(":", 1) for line in (place / "status").read_text().splitlines())
    return bool(int(masks["SigIgn"], 16) >> (number - 1) & 1)


def parent_of(pid: int) -> int:
    """Process id of its parent; 0 where it has ended."""
    return int((stat_of(pid) or ["", "0"])[1])


def started_at(pid: int) -> int | None:
    """When a process was started, in clock ticks since the machine's start; None where it has
    ended."""
    found = stat_of(pid)
    return None if found is None or found[0] in "ZX" else int(found[19])


def stat_of(pid: int) -> list[str] | None:
    """What Linux says about a process (`/proc/<pid>/stat`), from its state on; None where there is
    none."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None


def option_of(options: Sequence[str], name: str) -> str | None:
    """The value of an option of a command line, the last one.

    >>> (
    ...     option_of(["--port", "1", "--host=::", "--port=2"], "--port"),
    ...     option_of(["--port"], "--port"),
    ... )
    ('2', None)
    """
    pairs = [
        (one.partition("=")[0], one.partition("=")[2] or after)
        for one, after in zip(options, [*options[1:], ""], strict=True)
    ]
    return next((value for key, value in reversed(pairs) if key == name and value), None)
