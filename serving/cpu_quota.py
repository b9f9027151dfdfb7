"""Processor time that a container may use: `cpu.max` of cgroup v2, `cpu.cfs_quota_us` of v1 (Linux,
Documentation/admin-guide).

A quota limits time, not cores: a process that may use 1.5 cores of 64 sees 64, and stands still for
a part of every tenth of a second if more threads than that compute.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path


def cpu_quota(root: Path = Path("/")) -> float | None:
    """Cores' worth of time: the least of the limits of this process's groups and of the groups
    around them; None: no limit.

    Args:
        root: of the file system.
    """
    limits = [limit for folder in group_folders(root) if (limit := limit_of(folder)) is not None]
    return min(limits, default=None)


def group_folders(root: Path, controller: str = "cpu") -> Iterator[Path]:
    """Folders of the groups that limit what this process may take of `controller`: "cpu" or
    "memory".

    In a container /proc may name a path of the host, while the container's own group is mounted as
    the top: the top is always among them.
    """
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:  # not Linux, or /proc is hidden
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if not controllers:
            mounts = {"", "unified"}
        elif controller in controllers.split(","):
            mounts = {controller, controllers}
        else:
            continue
        for mount in mounts:
            top = root / "sys/fs/cgroup" / mount
            inner = top.joinpath(*(part for part in path.split("/") if part not in ("", "..")))
            yield from (inner, *(folder for folder in inner.parents if folder.is_relative_to(top)))


def limit_of(folder: Path) -> float | None:
    """Cores' worth of time that one group may use; None: no limit, or no such group."""
    try:
        if (folder / "cpu.max").is_file():
            quota, period = (folder / "cpu.max").read_text().split()
        else:
            quota, period = (
                (folder / f"cpu.cfs_{name}_us").read_text() for name in ("quota", "period")
            )
        limit = float(quota) / float(period)  # without a limit v2 writes "max", v1 writes -1
    except (OSError, ValueError, ZeroDivisionError):
        return None
    return limit if limit > 0 else None
