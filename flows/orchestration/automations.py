"""Automations of the Prefect server: a run whose process is gone ends as crashed, without a person.

A flow sends a heartbeat every `HEARTBEAT` seconds (`PREFECT_FLOWS_HEARTBEAT_FREQUENCY`, which
`prefect.yaml` sets for its runs). A worker marks a killed flow by itself; where worker and flow are
killed together, or the machine goes down, nobody does, so the server waits for the next heartbeat.
Source: Prefect's guide "How to detect and respond to zombie flows".
"""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from prefect.client.orchestration import SyncPrefectClient
    from prefect.events.schemas.automations import AutomationCore

HEARTBEAT = 30
"""Seconds between two heartbeats of a flow; Prefect takes no less."""
SILENCE = 120.0
"""Seconds without one after which a run has crashed: three missed and some time for the server."""
TAG = f"heartbeat-{HEARTBEAT}s"
"""On every deployment whose runs send heartbeats this often. Others are left alone: those of an
older `prefect.yaml` and of other projects send one in three minutes, and would be taken for dead
between two."""
CRASH_SILENT_RUNS = "draftwell: runs without heartbeat have crashed"


def crash_silent_runs(silence: float = SILENCE) -> AutomationCore:
    """Ends a run that sent a heartbeat and then neither another nor a final state for `silence`
    seconds."""
    from prefect.client.schemas.objects import StateType
    from prefect.events.actions import ChangeFlowRunState
    from prefect.events.schemas.automations import AutomationCore, EventTrigger, Posture
    from prefect.events.schemas.events import ResourceSpecification

    heartbeat, ended = (
        "prefect.flow-run.heartbeat",
        ("Completed", "Failed", "Cancelled", "Crashed", "TimedOut"),
    )
    return AutomationCore(
        name=CRASH_SILENT_RUNS,
        description=(
            f"A flow sends a heartbeat every {HEARTBEAT} s; a run that has sent none for "
            f"{silence:g} s has no process any more."
        ),
        trigger=EventTrigger(
            after={heartbeat},
            expect={heartbeat, *(f"prefect.flow-run.{state}" for state in ended)},
            for_each={"prefect.resource.id"},
            match=ResourceSpecification({"prefect.resource.id": "prefect.flow-run.*"}),
            match_related=ResourceSpecification(
                {"prefect.resource.role": "tag", "prefect.resource.id": f"prefect.tag.{TAG}"}
            ),
            posture=Posture.Proactive,
            threshold=1,
            within=timedelta(seconds=silence),
        ),
        actions=[
            ChangeFlowRunState(
                state=StateType.CRASHED,
                message=f"No heartbeat for {silence:g} s: the process is gone. The next run "
                "resumes what was finished.",
            )
        ],
    )


def make_automations(client: SyncPrefectClient) -> list[str]:
    """Create the automations that every pair shares, unless they exist (changes made in the UI
    stay); returns their names."""
    wanted = [crash_silent_runs()]
    for automation in wanted:
        if not client.read_automations_by_name(automation.name):
            client.create_automation(automation)
    return [automation.name for automation in wanted]
