"""What `draftwell schedule` puts on a Prefect server for a pair on a device: work pool, limits, an
automation for dead runs, and the deployments of `prefect.yaml`, which Prefect's own command applies
as they stand.

It may run again: pool, limits and automation stay as they are, changes made in the UI included.
"""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import yaml
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.actions import GlobalConcurrencyLimitCreate, WorkPoolCreate
from prefect.events.schemas.automations import AutomationCore
from prefect.exceptions import ObjectAlreadyExists
from prefect.settings import PREFECT_API_URL, temporary_settings
from prefect.workers.process import ProcessWorker

from draftwell.flows.failures import reaching_prefect
from draftwell.flows.orchestration.task_options import GPU_SLOT, pair_limit
from draftwell.flows.settings import pair_anywhere
from draftwell.registry.access import hidden
from draftwell.registry.pairs import find_pair
from draftwell.serving.errors import DraftwellError
from draftwell.serving.files import read_text

LOCAL_API = "http://127.0.0.1:4200/api"
"""The server of `make prefect-server`, where `PREFECT_API_URL` names no other."""
POOL = "draftwell"
HEARTBEAT = 30
"""Seconds between two heartbeats of a flow, which `prefect.yaml` asks for; the least there is."""
SILENCE = 120
"""Seconds without one after which a run has crashed: three missed and some time for the server."""
TAG = f"heartbeat-{HEARTBEAT}s"
"""On every deployment whose runs send heartbeats this often; others would be taken for dead."""
CRASH_SILENT_RUNS = "draftwell: runs without heartbeat have crashed"


@dataclass(frozen=True)
class Scheduled:
    """What is on the server now.

    Args:
        ui: address of the UI, without a password.
        limits: global concurrency limit → slots.
        deployments: as `flow/name`.
    """

    ui: str
    limits: dict[str, int]
    deployments: list[str]


def schedule(pair: str, device: str, file: Path) -> Scheduled:
    """Deploy every deployment of a file for a pair.

    Args:
        file: `prefect.yaml`, which may name `DRAFTWELL_PAIR` (the pair's name), `DRAFTWELL_SPEC`
            (the name, or the YAML file of the pair) and `DRAFTWELL_DEVICE`.
    Raises:
        DraftwellError: no such pair or file, a server that does not answer, or Prefect refuses a
            deployment: those before it are deployed.
    """
    name = find_pair(pair).name
    check_file(file)
    address = PREFECT_API_URL.value() or LOCAL_API
    shown = hidden(address)
    with (
        temporary_settings({PREFECT_API_URL: address}),
        reaching_prefect(),
        get_client(sync_client=True) as client,
    ):
        if (error := client.api_healthcheck()) is not None:
            raise DraftwellError(
                f"no Prefect server answers at {shown} ({type(error).__name__}): start one with "
                "`make prefect-server`, or name yours in PREFECT_API_URL",
                code="no_prefect_server",
            )
        make_pool(client)
        limits = make_limits(client, name)
        make_automation(client)
        apply(
            file,
            {
                "DRAFTWELL_PAIR": name,
                "DRAFTWELL_SPEC": pair_anywhere(pair),
                "DRAFTWELL_DEVICE": device,
                "PREFECT_API_URL": address,
            },
        )
        flows = {flow.id: flow.name for flow in client.read_flows()}
        deployed = [
            f"{flows[each.flow_id]}/{each.name}"
            for each in client.read_deployments()
            if {f"pair:{name}", f"device:{device}"} <= set(each.tags)
        ]
    return Scheduled(shown.removesuffix("/api"), limits, sorted(deployed))


def check_file(file: Path) -> None:
    """Refuse a file of deployments that is not there."""
    if not file.is_file():
        raise DraftwellError(
            f"there is no {file} here: run this in Draftwell's checkout, or name the file with "
            "--settings",
            code="no_deployments_file",
        )


def planned(pair: str, device: str, file: Path) -> list[str]:
    """The deployments that `schedule` would make, as `flow/name`; no server is asked.

    Raises:
        DraftwellError: no such pair or file, or the file names no deployments
            (`deployment_refused`).
    """
    check_file(file)
    text = read_text(file)
    for key, value in (("DRAFTWELL_PAIR", find_pair(pair).name), ("DRAFTWELL_DEVICE", device)):
        text = text.replace("{{ $" + key + " }}", value)
    try:
        rows = yaml.safe_load(text)["deployments"]
        return [f"{row['entrypoint'].rpartition(':')[2]}/{row['name']}" for row in rows]
    except (yaml.YAMLError, TypeError, KeyError, AttributeError) as error:
        raise DraftwellError(
            f"{file} names no deployments with an entrypoint and a name: see prefect.yaml",
            code="deployment_refused",
        ) from error


def apply(file: Path, environment: dict[str, str]) -> None:
    """Let Prefect's own command deploy all deployments of a file."""
    command = [sys.executable, "-m", "prefect", "--no-prompt", "deploy", "--all"]
    done = subprocess.run(
        [*command, "--prefect-file", str(file)],
        env={**os.environ, **environment, "COLUMNS": "200"},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        lines = [line.strip() for line in (done.stdout + done.stderr).splitlines() if line.strip()]
        raise DraftwellError(
            f"Prefect refused {file}: {hidden(' '.join(lines[-3:]))[-400:]}",
            code="deployment_refused",
        )


def make_pool(client: SyncPrefectClient) -> None:
    """Make a pool of processes, unless there is one of any type."""
    template = ProcessWorker.get_default_base_job_template()
    with suppress(ObjectAlreadyExists):
        client.create_work_pool(
            WorkPoolCreate(name=POOL, type="process", base_job_template=template)
        )


def make_limits(client: SyncPrefectClient, pair: str) -> dict[str, int]:
    """Create the concurrency limits of a pair, unless they exist; returns limit → slots. More than
    one computes at a time where a person raises `prefect gcl update`'s limit."""
    names = (pair_limit(pair), GPU_SLOT)
    for name in names:
        with suppress(ObjectAlreadyExists):
            client.create_global_concurrency_limit(GlobalConcurrencyLimitCreate(name=name, limit=1))
    return {name: client.read_global_concurrency_limit_by_name(name).limit for name in names}


def make_automation(client: SyncPrefectClient) -> None:
    """Create what ends a run whose process is gone, unless it exists.

    A worker marks a killed flow by itself; where both are killed, or the machine goes down, the
    server waits for the next heartbeat (Prefect's guide "How to detect and respond to zombie
    flows").
    """
    if client.read_automations_by_name(CRASH_SILENT_RUNS):
        return
    beat, ends = "prefect.flow-run.heartbeat", ("Completed", "Failed", "Cancelled", "Crashed")
    automation = AutomationCore.model_validate(
        {
            "name": CRASH_SILENT_RUNS,
            "trigger": {
                "type": "event",
                "posture": "Proactive",
                "after": [beat],
                "expect": [beat, *(f"prefect.flow-run.{end}" for end in (*ends, "TimedOut"))],
                "for_each": ["prefect.resource.id"],
                "match": {"prefect.resource.id": "prefect.flow-run.*"},
                "match_related": {
                    "prefect.resource.role": "tag",
                    "prefect.resource.id": f"prefect.tag.{TAG}",
                },
                "threshold": 1,
                "within": SILENCE,
            },
            "actions": [
                {
                    "type": "change-flow-run-state",
                    "state": "CRASHED",
                    "message": f"No heartbeat for {SILENCE} s: the process is gone. The next run "
                    "resumes what was finished.",
                }
            ],
        }
    )
    client.create_automation(automation)
