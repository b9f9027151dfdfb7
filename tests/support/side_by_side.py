"""The order of tests that run in several processes at once: what takes longest begins first, and
costly things are started once.

`pytest -n 3 --dist loadfile` hands out files by their number of tests. The longest files here have
few, would begin last, and the others would wait for one of them.
"""

from __future__ import annotations

from typing import Any

import pytest
from xdist.scheduler import LoadFileScheduling

ONE_PREFECT_SERVER = tuple(
    f"tests/flows/{name}.py"
    for name in (
        "orchestration/test_assets",
        "orchestration/test_pipeline",
        "orchestration/test_deployments",
        "steps/test_recalibrate",
        "test_library",
    )
)
"""Quick tests that need Prefect's server, whose start takes ten seconds: they share a process, and
with it the server."""
LONG = (
    *ONE_PREFECT_SERVER,
    "tests/flows/",
    "tests/test_operations.py",
    "tests/components/",
    "tests/registry/",
    "tests/serving/server/",
)
"""What begins first, in this order: most seconds for a test."""


def place_of(name: str) -> int:
    """Place of a test's file in the order; equal places keep theirs.

    >>> sorted(
    ...     [
    ...         "tests/test_a.py",
    ...         "tests/flows/cli/test_b.py",
    ...         "tests/flows/orchestration/test_pipeline.py",
    ...     ],
    ...     key=place_of,
    ... )[0]
    'tests/flows/orchestration/test_pipeline.py'
    """
    return next((place for place, start in enumerate(LONG) if name.startswith(start)), len(LONG))


class SharedServer(LoadFileScheduling):
    """Files stay together, and those that need Prefect's server are one."""

    def _split_scope(self, nodeid: str) -> str:
        return (
            "prefect"
            if nodeid.startswith(ONE_PREFECT_SERVER)
            else str(super()._split_scope(nodeid))
        )


def scheduler(config: pytest.Config, log: Any) -> SharedServer | None:
    """For `--dist loadfile`; every other way is left to xdist."""
    if config.getoption("dist") != "loadfile":
        return None
    config.option.loadscopereorder = False
    return SharedServer(config, log)
