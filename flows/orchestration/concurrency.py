"""Turns: one flow at a time for a pair, in the order of the week, and one at a time on the machine's accelerator.

Both are global concurrency limits on the Prefect server, made by `draftwell schedule`: `pair-<name>`, and `gpu-slot`, which also stands
for the cores of a machine without a GPU, because two that measure at once measure each other. A turn is a lease: a process that
was killed gives it back within `LEASE` seconds. Slots are not given first come, first served, so a flow of the week asks for them when
those before it are over.
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

from flows.failures import disk_full_as_error
from serving.errors import DraftwellError

GPU_SLOT = "gpu-slot"
LEASE = 60.0
"""Seconds; the server takes no less."""
ORDER = ("collection", "calibration", "tuning", "release")
"""Flows of a week: each goes on from what those before it left in the workspace."""
WEEK = timedelta(days=7)
PATIENCE = 24.0
"""Hours that a flow waits for those before it, and for a turn: a run that its machine took with it stays unfinished until somebody
cancels it."""
LOOK_AGAIN = 10.0
"""Seconds between two questions whether they are over."""

_ours: ContextVar[frozenset[str]] = ContextVar("turns that this flow has", default=frozenset())


def pair_slot(pair: str) -> str:
    """The limit that lets one flow of a pair run at a time.

    >>> pair_slot("smollm2-135m")
    'pair-smollm2-135m'
    """
    return f"pair-{pair}"


@contextmanager
def turn(pair: str) -> Iterator[None]:
    """Wait for the flows of the week before this one, for this pair's turn and for the accelerator, and keep both.

    A flow called by one that has them has them too. A flow that somebody runs by hand, outside a deployment, waits for nobody: the
    ephemeral server that it runs on knows of nobody.

    Raises:
        DraftwellError: the server knows no such limits, a flow before this one is not over within `PATIENCE`, or a turn is not free.
    """
    if pair in _ours.get() or deployment.id is None:
        yield
        return
    wait_for_those_before(pair)
    print(f"waiting for the turn of {pair}, and for {GPU_SLOT}")
    with ExitStack() as stack:
        # One call each: asked for both at once, `strict` would not notice that one of them is missing. Always in this order, so
        # that two flows never wait for each other.
        for name in (pair_slot(pair), GPU_SLOT):
            _take(stack, name, pair)
        token = _ours.set(_ours.get() | {pair})
        try:
            yield
        finally:
            _ours.reset(token)


def wait_for_those_before(pair: str) -> None:
    """Wait until the flows of the week that come before this one are over, well or not.

    Raises:
        DraftwellError: one is not over within `PATIENCE`.
    """
    end, told = monotonic() + 3600 * PATIENCE, list[str]()
    while before := unfinished_before(pair):
        if monotonic() >= end:
            raise DraftwellError(f"{before[0]} comes before this flow and is not over after {PATIENCE:g} hours: cancel it in Prefect's UI "
                                 "if it is dead, then run this again")
        if told != before:
            print(f"waiting for {', '.join(before)}")
            told = before
        sleep(LOOK_AGAIN)


def unfinished_before(pair: str) -> list[str]:
    """Runs of the pair's flows before this one that were due before it, a week at most, and are not over: under way, or late."""
    mine = flow_run.flow_name
    names = ORDER[: ORDER.index(mine)] if mine in ORDER else ()
    if not names:
        return []
    due = flow_run.scheduled_start_time
    open_states = [state for state in StateType if state not in TERMINAL_STATES]
    wanted = filters.FlowRunFilter(
        state=filters.FlowRunFilterState(type=filters.FlowRunFilterStateType(any_=open_states)),
        expected_start_time=filters.FlowRunFilterExpectedStartTime(after_=due - WEEK, before_=due))
    of_pair = filters.DeploymentFilter(name=filters.DeploymentFilterName(any_=[pair]))  # deployments have the pair's name
    with get_client(sync_client=True) as client:
        return [f"{name}/{pair} ({run.name})" for name in names
                for run in client.read_flow_runs(flow_filter=filters.FlowFilter(name=filters.FlowFilterName(any_=[name])),
                                                 flow_run_filter=wanted, deployment_filter=of_pair)]


@contextmanager
def pair_turn(pair: str) -> Iterator[None]:
    """The pair's turn; a full disk is told in one line."""
    with disk_full_as_error(), turn(pair):
        yield


def _take(stack: ExitStack, name: str, pair: str) -> None:
    try:
        stack.enter_context(concurrency(name, strict=True, lease_duration=LEASE, timeout_seconds=3600 * PATIENCE))
    except TimeoutError as error:
        raise DraftwellError(f"{name} has not been free for {PATIENCE:g} hours: if Prefect's UI shows no run under way, "
                             f"`prefect gcl update {name} --active-slots 0` frees it") from error
    except ConcurrencySlotAcquisitionError as error:
        raise DraftwellError(f"the Prefect server gives no turn of {name}: run `draftwell schedule --pair {pair}` once, which makes it "
                             "(scheduled flows need a server; `draftwell demo` and the commands do not)") from error
