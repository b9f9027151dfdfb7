"""The process of a vLLM bundle that a restart has asked to end and that nothing has followed yet,
in a file beside the bundles.

Once it has ended, Linux does not list it any more: without the file, a restart that failed or was
killed then would leave one replica less.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from draftwell.flows.steps.engine.processes import Replica
from draftwell.serving.files import write_atomically

BOOT = Path("/proc/sys/kernel/random/boot_id")


def write_record(file: Path, old: Replica) -> None:
    """Note a process before it is asked to end. Its variables may hold secrets: nobody else may
    read the file."""
    fields = {
        **asdict(old),
        "bundle": str(old.bundle),
        "cores": sorted(old.cores),
        "environment": dict(old.environment),
    }
    write_atomically(file, json.dumps({"boot": boot(), "replica": fields}).encode(), mode=0o600)


def read_record(file: Path) -> Replica | None:
    """The process that was noted; None where there is none since the machine's start."""
    try:
        found: dict[str, Any] = json.loads(file.read_bytes())
        fields = found["replica"]
        fields |= {
            "bundle": Path(fields["bundle"]),
            "options": tuple(fields["options"]),
            "cores": frozenset(fields["cores"]),
        }
        return Replica(**fields) if found["boot"] == boot() else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def boot() -> str:
    """What Linux calls the time since the machine's start; empty where it is no Linux."""
    try:
        return BOOT.read_text().strip()
    except OSError:
        return ""
