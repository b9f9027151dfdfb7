"""What flows and tasks share: JSON results, time limits, retries, and turns.

Every flow and task has a time limit: one that hangs fails, and gives its slots back. Where the
process is gone too, an automation of the server ends the run (`deployments`).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from prefect.cache_policies import NO_CACHE
from prefect.concurrency.sync import concurrency
from prefect.runtime import deployment
from prefect.tasks import exponential_backoff

from draftwell.flows.failures import disk_full_as_error, worth_retrying

QUICK = 3600.0
"""Seconds that a task may take that measures nothing: a question to the registry, a bundle."""
PATIENCE = 24 * 3600.0
"""Seconds that a run waits for its turn."""
LONGEST = 3 * PATIENCE
"""Seconds that a flow may take, its turn and a day of work among them. The time of its tasks is not
counted, because each has its own limit (Prefect suspends the outer alarm)."""
LEASE = 60.0
"""Seconds after which the slot of a killed process is free; the server takes no less."""
GPU_SLOT = "gpu-slot"
"""The limit of runs that compute on a machine, with or without a GPU: two disturb each other's
timings."""
FLOW: dict[str, Any] = {
    "result_serializer": "json",  # Prefect's default is pickle
    "log_prints": True,
    "validate_parameters": True,
    "timeout_seconds": LONGEST,
}
# 10, 20 and 40 s, each up to half as long again, so that flows that failed together do not come
# back together. What a person must fix is not tried again.
RETRY: dict[str, Any] = {
    "retries": 3,
    "retry_delay_seconds": exponential_backoff(10),
    "retry_jitter_factor": 0.5,
    "retry_condition_fn": worth_retrying,
    "timeout_seconds": QUICK,
    "result_serializer": "json",
}
ANEW: dict[str, Any] = {**RETRY, "cache_policy": NO_CACHE, "persist_result": False}
"""A task that runs each time: what it asks or does may have changed."""


def pair_limit(pair: str) -> str:
    """The limit that lets one flow of a pair run at a time.

    >>> pair_limit("smollm2-135m")
    'pair-smollm2-135m'
    """
    return f"pair-{pair}"


@contextmanager
def turn_of(pair: str) -> Iterator[None]:
    """Hold a slot of the pair, then one of the machine, in a run of a deployment; by hand nobody is
    waited for. A full disk is reported in one line.

    Raises:
        ConcurrencySlotAcquisitionError: the server has no such limit: `draftwell schedule`.
        TimeoutError: a slot was not free within `PATIENCE`.
    """
    with disk_full_as_error():
        if deployment.id is None:
            yield
            return
        held: dict[str, Any] = {
            "strict": True,
            "lease_duration": LEASE,
            "timeout_seconds": PATIENCE,
        }
        # one call each: asked for both, `strict` does not notice that one of them is missing
        with concurrency(pair_limit(pair), **held), concurrency(GPU_SLOT, **held):
            yield
