"""The stat logger (`vllm.stat_logger_plugins`): vLLM's counters of drafts go into the folder that
`DRAFTWELL_SPOOL` names.

vLLM loads it in the process of its API server. Without the variable it does nothing. A line counts
a minute or more; `DRAFTWELL_SPOOL_SECONDS` is another time, for trials that want their lines
sooner.
"""

from __future__ import annotations

import atexit
import os
from pathlib import Path
from typing import Any

from vllm.v1.metrics.loggers import StatLoggerBase

from . import installed_version
from .spool import BUNDLE, SECONDS, AcceptanceSpool

FOLDER, EVERY = "DRAFTWELL_SPOOL", "DRAFTWELL_SPOOL_SECONDS"


class AcceptanceLogger(StatLoggerBase):
    """Counts of one engine core."""

    def __init__(self, vllm_config: Any, engine_index: int = 0):
        folder = os.environ.get(FOLDER)
        self.spool = (
            AcceptanceSpool(Path(folder), about(vllm_config, engine_index), line_seconds())
            if folder
            else None
        )
        if self.spool is not None:
            atexit.register(self.spool.write)

    def record(
        self,
        scheduler_stats: Any,
        iteration_stats: Any,
        mm_cache_stats: Any = None,
        engine_idx: int = 0,
    ) -> None:
        """What vLLM counted in a step; either may be None."""
        if self.spool is None:
            return
        self._follow_bundle(self.spool)
        drafts = getattr(scheduler_stats, "spec_decoding_stats", None)
        counted: dict[str, Any] = (
            {}
            if drafts is None
            else {
                "rounds": drafts.num_drafts,
                "drafted": drafts.num_draft_tokens,
                "accepted": drafts.num_accepted_tokens,
                "accepted_at": drafts.num_accepted_tokens_per_pos,
            }
        )
        if iteration_stats is not None:
            counted |= {
                "tokens": iteration_stats.num_generation_tokens,
                "requests": len(iteration_stats.finished_requests),
            }
        if counted.get("tokens") or counted.get("rounds"):
            self.spool.add(**counted, running=getattr(scheduler_stats, "num_running_reqs", 0))
            self.spool.write_if_due()

    def _follow_bundle(self, spool: AcceptanceSpool) -> None:
        """Another draft may have been loaded (`draft_route`): what is counted from now on is of
        another bundle."""
        if spool.about["bundle"] != os.environ.get(BUNDLE):
            spool.write()
            spool.about["bundle"] = os.environ.get(BUNDLE)

    def log(self) -> None:
        """vLLM calls this every few seconds."""
        if self.spool is not None:
            self.spool.write_if_due()

    def log_engine_initialized(self) -> None:
        """Nothing to say."""


def line_seconds() -> float:
    """Seconds that a line counts, at least; a minute where the variable is missing or no number
    from 1 on."""
    try:
        seconds = float(os.environ.get(EVERY) or SECONDS)
    except ValueError:
        return SECONDS
    return seconds if seconds >= 1 else SECONDS


def about(vllm_config: Any, engine_index: int) -> dict[str, Any]:
    """What every line says of the engine: its version, how it speculates, and the bundle that it
    was started from."""
    config = vllm_config.speculative_config
    name = vllm_config.model_config.served_model_name
    return {
        "engine": "vllm",
        "engine_version": installed_version(),
        "engine_index": engine_index,
        "bundle": os.environ.get(BUNDLE),
        "model": name[0] if isinstance(name, list) else name,
        "method": None if config is None else config.method,
        "num_speculative_tokens": None if config is None else config.num_speculative_tokens,
    }
