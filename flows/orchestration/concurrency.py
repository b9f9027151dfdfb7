"""Concurrency: one flow at a time for a pair, in the order of the week, and one at a time on the
machine's accelerator.

Both are global concurrency limits on the Prefect server, made by `draftwell schedule`:
`pair-<name>`, and `gpu-slot`, which also stands for the cores of a machine without a GPU, because
two that measure at the same time disturb each other. A slot is a lease: that of a killed process
expires within `LEASE` seconds. Prefect does not hand out slots in order of arrival, so a flow of
the week asks for them when the earlier ones have ended.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from datetime import timedelta
from time import monotonic, sleep

from prefect.client.orchestration import get_client
from prefect.client.schemas import filters
from prefect.client.schemas.objects import TERMINAL_STATES, StateType
from prefect.concurrency.asyncio import ConcurrencySlotAcquisitionError
from prefect.concurrency.sync import concurrency
from prefect.runtime import deployment, flow_run

from draftwell.flows.failures import disk_full_as_error
from draftwell.serving.device import DEVICES
from draftwell.serving.errors import DraftwellError

GPU_SLOT = "gpu-slot"
LEASE = 60.0
"""Seconds; the server takes no less."""
ORDER = ("collection", "calibration", "tuning", "release")
"""Flows of a week: each reads what the earlier ones left in the workspace."""
WEEK = timedelta(days=7)
PATIENCE = 24.0
"""Hours that a flow waits for earlier ones, and for a slot: a run whose machine went down stays
unfinished until somebody cancels it."""
LOOK_AGAIN = 10.0
"""Seconds between two looks whether they have ended."""

_ours: ContextVar[frozenset[str]] = ContextVar(
    "pairs whose slots this flow holds", default=frozenset()
)


def pair_limit(pair: str) -> str:
    """The limit that lets one flow of a pair run at a time.

    >>> pair_limit("smollm2-135m")
    'pair-smollm2-135m'
    """
    return f"pair-{pair}"


def deployment_name(pair: str, device: str) -> str:
    """What the deployments of a pair on a device are called.

    >>> deployment_name("smollm2-135m", "cuda")
    'smollm2-135m-cuda'
    """
    return f"{pair}-{device}"


@contextmanager
def hold_slots(pair: str) -> Iterator[None]:
    """Wait for the earlier flows of the week, for the pair's slot and for the accelerator's, and
    hold both.

    A flow called by one that holds them has them too. A flow that somebody runs by hand, outside a
    deployment, does not wait: its ephemeral server knows of no other.

    Raises:
        DraftwellError: the server knows no such limits, an earlier flow has not ended within
            `PATIENCE`, or a slot is not free.
    """
    if pair in _ours.get() or deployment.id is None:
        yield
        return
    wait_for_earlier_flows(pair)
    print(f"waiting for a slot of {pair_limit(pair)}, and of {GPU_SLOT}")
    with ExitStack() as stack:
        # One call each: asked for both at once, `strict` would not notice that one of them is
        # missing. Always in this order, so that two flows never wait for each other.
        for name in (pair_limit(pair), GPU_SLOT):
            _take(stack, name, pair)
        token = _ours.set(_ours.get() | {pair})
        try:
            yield
        finally:
            _ours.reset(token)


def wait_for_earlier_flows(pair: str) -> None:
    """Wait until the earlier flows of the week have ended, well or not.

    Raises:
        DraftwellError: one has not ended within `PATIENCE`.
    """
    end, reported = monotonic() + 3600 * PATIENCE, list[str]()
    while before := unfinished_earlier_flows(pair):
        if monotonic() >= end:
            raise DraftwellError(
                f"{before[0]} precedes this flow and has not ended after {PATIENCE:g} "
                "hours: cancel it in Prefect's UI if "
                "it is dead, then run this again",
                code="earlier_flow_unfinished",
            )
        if reported != before:
            print(f"waiting for {', '.join(before)}")
            reported = before
        sleep(LOOK_AGAIN)


def unfinished_earlier_flows(pair: str) -> list[str]:
    """Runs of the pair's earlier flows that were due before this one, a week at most, and have not
    ended: under way, or late."""
    mine = flow_run.flow_name
    names = ORDER[: ORDER.index(mine)] if mine in ORDER else ()
    if not names:
        return []
    due = flow_run.scheduled_start_time
    open_states = [state for state in StateType if state not in TERMINAL_STATES]
    wanted = filters.FlowRunFilter(
        state=filters.FlowRunFilterState(type=filters.FlowRunFilterStateType(any_=open_states)),
        expected_start_time=filters.FlowRunFilterExpectedStartTime(after_=due - WEEK, before_=due),
    )
    # the first of earlier versions
    names_of_pair = [pair, *(deployment_name(pair, device) for device in DEVICES)]
    of_pair = filters.DeploymentFilter(name=filters.DeploymentFilterName(any_=names_of_pair))
    with get_client(sync_client=True) as client:
        return [
            f"{name}/{pair} ({run.name})"
            for name in names
            for run in client.read_flow_runs(
                flow_filter=filters.FlowFilter(name=filters.FlowFilterName(any_=[name])),
                flow_run_filter=wanted,
                deployment_filter=of_pair,
            )
        ]


@contextmanager
def pair_slots(pair: str) -> Iterator[None]:
    """Hold the pair's slots; a full disk is reported in one line."""
    with disk_full_as_error(), hold_slots(pair):
        yield


def _take(stack: ExitStack, name: str, pair: str) -> None:
    try:
        stack.enter_context(
            concurrency(name, strict=True, lease_duration=LEASE, timeout_seconds=3600 * PATIENCE)
        )
    except TimeoutError as error:
        raise DraftwellError(
            f"{name} has not been free for {PATIENCE:g} hours: if Prefect's UI shows no "
            "run under way, "
            f"`prefect gcl update {name} --active-slots 0` frees it",
            code="no_free_slot",
        ) from error
    except ConcurrencySlotAcquisitionError as error:
        raise DraftwellError(
            f"the Prefect server has no concurrency limit {name}: run `draftwell schedule "
            f"--pair {pair}` once, which "
            "creates it (scheduled flows need a server; `draftwell demo` and the commands do not)",
            code="no_concurrency_limit",
        ) from error
