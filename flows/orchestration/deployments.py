"""What `draftwell schedule` creates on a Prefect server: work pool, limits, automations, and the
deployments of `prefect.yaml` for a pair on a device.

It may run again: pool and limits stay as they are, changes made in the UI included. A deployment is
known by flow, pair and device, so an existing one is replaced: entrypoint, schedules and parameters
are those of the file then. One of an earlier version, which had no device in its name, is replaced
too where it was for the same device.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_type_hints

import yaml
from pydantic import BaseModel, ValidationError

from draftwell.registry.access import hidden
from draftwell.registry.pairs import find_pair
from draftwell.serving.artifacts.pair_files import draftwell_home
from draftwell.serving.device import VARIABLE
from draftwell.serving.errors import DraftwellError
from draftwell.serving.files import write_atomically

if TYPE_CHECKING:
    from prefect.client.orchestration import SyncPrefectClient
    from prefect.client.schemas.responses import DeploymentResponse

LOCAL_API = "http://127.0.0.1:4200/api"
"""The server of `make prefect-server`, where `PREFECT_API_URL` names no other."""
KEPT_LEASES = "prefect.server.concurrency.lease_storage.filesystem"
"""Where a Prefect server has to keep leases to know them after a restart."""
PAIR, DEVICE = "DRAFTWELL_PAIR", VARIABLE
"""What `prefect.yaml` calls the pair and the device."""


@dataclass(frozen=True)
class Deployed:
    """A deployment on the server.

    Args:
        name: `flow/pair-device`.
        when: its cron schedules, or the events that start it.
    """

    name: str
    when: str


@dataclass(frozen=True)
class Scheduled:
    """What is on the server now.

    Args:
        ui: address of the UI, without a password.
        pools: work pool → its type.
        limits: global concurrency limit → slots.
        deployments: in the order of the file.
        forgets_leases: the server loses who holds a concurrency slot when it restarts.
        replaced: deployments of an earlier version that were deleted, because these run in their
            place.
        automations: names of those that all pairs share.
    """

    ui: str
    pools: dict[str, str]
    limits: dict[str, int]
    deployments: list[Deployed]
    forgets_leases: bool = False
    replaced: tuple[str, ...] = ()
    automations: list[str] = field(default_factory=list)


def schedule(given: Mapping[str, Any], file: Path, *, gpu_slots: int | None = None) -> Scheduled:
    """Deploy every deployment of a file for a pair.

    Args:
        given: settings, `pair` and `device` among them; each flow gets those that it has, and keeps
            its defaults for the others.
        file: `prefect.yaml`.
        gpu_slots: flows that may compute at the same time; None keeps the server's limit, 1 where
            there is none.
    Raises:
        DraftwellError: no such pair or file, a setting that flows refuse, a server that does not
            answer: nothing is deployed then. Or Prefect refuses a deployment: those before it are
            deployed.
    """
    from prefect.client.orchestration import get_client
    from prefect.settings import PREFECT_API_URL, temporary_settings

    from draftwell.flows.failures import reaching_prefect
    from draftwell.flows.orchestration.automations import make_automations

    name, device = find_pair(str(given["pair"])).name, str(given["device"])
    contents = for_pair(
        read_deployments(file),
        {**given, "pair": absolute_pair(str(given["pair"]), name)},
        settings_class,
    )
    address = PREFECT_API_URL.value() or LOCAL_API
    shown = hidden(address)
    with (
        temporary_settings({PREFECT_API_URL: address}),
        reaching_prefect(),
        get_client(sync_client=True) as client,
    ):
        if (error := client.api_healthcheck()) is not None:
            raise DraftwellError(
                f"no Prefect server answers at {shown} ({type(error).__name__}): start one "
                "with `make prefect-server`, "
                "or name yours in PREFECT_API_URL",
                code="no_prefect_server",
            )
        pools = {pool: make_pool(client, pool) for pool in pools_of(contents)}
        limits = make_limits(client, name, gpu_slots)
        deploy_all(contents, name, device, address)
        drop_schedules(client, contents, name, device)
        automations = make_automations(client)
        deployed = found(client, contents, name, device)
        return Scheduled(
            shown.removesuffix("/api"),
            pools,
            limits,
            deployed,
            forgets_leases(client),
            replaced(client, contents, name, device),
            automations,
        )


def absolute_pair(pair: str, name: str) -> str:
    """How flows name a pair: a YAML file by its absolute path, because a worker may start
    elsewhere; any other by its own name."""
    return str(Path(pair).expanduser().absolute()) if pair.endswith((".yaml", ".yml")) else name


def read_deployments(file: Path) -> dict[str, Any]:
    """A file of deployments."""
    try:
        contents = yaml.safe_load(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise DraftwellError(
            f"there is no {file} here: run this in Draftwell's checkout, or name the file with "
            f"--file",
            code="no_deployments_file",
        ) from None
    except yaml.YAMLError as error:
        raise DraftwellError(
            f"{file} is not valid YAML: {error}", code="bad_deployments_file"
        ) from error
    deployments = contents.get("deployments") if isinstance(contents, dict) else None
    if (
        not isinstance(deployments, list)
        or not deployments
        or not all(isinstance(d, dict) and "entrypoint" in d for d in deployments)
    ):
        raise DraftwellError(
            f"{file} names no deployments: it should have a list `deployments`, each with an "
            f"entrypoint",
            code="bad_deployments_file",
        )
    return dict(contents)


def for_pair(
    contents: Mapping[str, Any],
    given: Mapping[str, Any],
    class_of: Callable[[str], type[BaseModel]],
) -> dict[str, Any]:
    """The same deployments, with these settings in the parameters of each, as far as its flow has
    them.

    A flow whose setting means something else than that of the other flows names it in `OWN`: such a
    one is set in the file alone.

    Args:
        class_of: entrypoint → settings of that flow.
    Raises:
        DraftwellError: a setting that no flow has, or a value that one refuses.
    """
    classes = [class_of(deployment["entrypoint"]) for deployment in contents["deployments"]]
    names = {
        name: None
        for each in classes
        for name in each.model_fields
        if name in shared_settings(each)
    }
    if unknown := [name for name in given if name not in names]:
        if any(unknown[0] in each.model_fields for each in classes):
            raise DraftwellError(
                f"{unknown[0]} is set in the file of deployments alone (prefect.yaml, "
                "under the deployment's parameters): "
                "it means something else in other flows",
                code="unknown_setting",
            )
        raise DraftwellError(
            f"no flow has a setting {unknown[0]}: they have {', '.join(names)}",
            code="unknown_setting",
        )
    deployments = []
    for deployment, each in zip(contents["deployments"], classes, strict=True):
        parameters = deployment.get("parameters") or {}
        mine = checked(
            each, {name: value for name, value in given.items() if name in shared_settings(each)}
        )
        deployments.append(
            {
                **deployment,
                "parameters": {
                    **parameters,
                    "settings": {**(parameters.get("settings") or {}), **mine},
                },
            }
        )
    return {**contents, "deployments": deployments}


def shared_settings(each: type[BaseModel]) -> set[str]:
    """Names of a flow's settings that mean the same in all flows."""
    return set(each.model_fields) - getattr(each, "OWN", frozenset())


def checked(settings: type[BaseModel], given: Mapping[str, Any]) -> dict[str, Any]:
    """Settings as a flow takes them, in JSON."""
    try:
        return settings.model_validate(given).model_dump(mode="json", exclude_unset=True)
    except ValidationError as error:
        first = error.errors()[0]
        raise DraftwellError(
            f"setting {'.'.join(map(str, first['loc']))}: {first['msg']}, not {first['input']!r}",
            code="bad_setting",
        ) from error


def settings_class(entrypoint: str) -> type[BaseModel]:
    """What the parameter `settings` of a flow is; the flow is named as in
    `flows/orchestration/scheduled_flows.py:tuning`."""
    from prefect import Flow

    file, _, name = entrypoint.partition(":")
    try:
        flow = getattr(
            import_module("draftwell." + file.removesuffix(".py").replace("/", ".")), name
        )
    except (ImportError, AttributeError) as error:
        raise DraftwellError(
            f"there is no flow {entrypoint} ({error}): correct the entrypoint in the file "
            "of deployments, or take the "
            "prefect.yaml of this version",
            code="no_such_flow",
        ) from error
    found = get_type_hints(flow.fn).get("settings") if isinstance(flow, Flow) else None
    if not isinstance(found, type) or not issubclass(found, BaseModel):
        raise DraftwellError(
            f"{entrypoint} is no flow with a parameter `settings` that is a pydantic model"
        )
    return found


def pools_of(contents: Mapping[str, Any]) -> list[str]:
    """The work pools that deployments name, each once."""
    return list(
        dict.fromkeys(d["work_pool"]["name"] for d in contents["deployments"] if "work_pool" in d)
    )


def make_pool(client: SyncPrefectClient, name: str) -> str:
    """Make a pool of processes, unless there is one of any type; returns its type."""
    from prefect.client.schemas.actions import WorkPoolCreate
    from prefect.exceptions import ObjectAlreadyExists
    from prefect.workers.process import ProcessWorker

    template = ProcessWorker.get_default_base_job_template()
    with suppress(ObjectAlreadyExists):
        client.create_work_pool(
            WorkPoolCreate(name=name, type="process", base_job_template=template)
        )
    return client.read_work_pool(name).type


def make_limits(client: SyncPrefectClient, pair: str, gpu_slots: int | None) -> dict[str, int]:
    """Create the concurrency limits of a pair, unless they exist; returns limit → slots."""
    from prefect.client.schemas.actions import GlobalConcurrencyLimitCreate
    from prefect.exceptions import ObjectAlreadyExists

    from draftwell.flows.orchestration.concurrency import GPU_SLOT, pair_limit

    for name, limit in ((pair_limit(pair), 1), (GPU_SLOT, gpu_slots or 1)):
        with suppress(ObjectAlreadyExists):
            client.create_global_concurrency_limit(
                GlobalConcurrencyLimitCreate(name=name, limit=limit)
            )
    if gpu_slots is not None:
        client.upsert_global_concurrency_limit_by_name(GPU_SLOT, gpu_slots)
    return {
        name: client.read_global_concurrency_limit_by_name(name).limit
        for name in (pair_limit(pair), GPU_SLOT)
    }


def forgets_leases(client: SyncPrefectClient) -> bool:
    """Whether the server keeps leases in memory, as Prefect does by default: one that is held while
    the server is started again is never given back, because the slots are counted in the database.
    False where a server does not say (Prefect Cloud)."""
    from httpx import HTTPStatusError
    from prefect.exceptions import PrefectHTTPStatusError

    try:
        answer = client.request("GET", "/admin/settings").json()
    except (PrefectHTTPStatusError, HTTPStatusError):
        return False
    return str(answer.get("server", {}).get("concurrency", {}).get("lease_storage", "")).endswith(
        ".memory"
    )


def deploy_all(contents: Mapping[str, Any], pair: str, device: str, address: str) -> None:
    """Let Prefect's own command deploy them all; a copy of the file, as it was deployed, stays in
    the home."""
    copy = draftwell_home() / "schedules" / f"{pair}-{device}.yaml"
    write_atomically(copy, yaml.safe_dump(dict(contents), sort_keys=False).encode())
    environment = {
        **os.environ,
        PAIR: pair,
        DEVICE: device,
        "PREFECT_API_URL": address,
        "COLUMNS": "200",
    }
    command = [
        sys.executable,
        "-m",
        "prefect",
        "--no-prompt",
        "deploy",
        "--all",
        "--prefect-file",
        str(copy),
    ]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        lines = [line.strip() for line in (done.stdout + done.stderr).splitlines() if line.strip()]
        raise DraftwellError(
            f"Prefect refused {copy}: {hidden(' '.join(lines[-3:]))[-400:]}",
            code="deployment_refused",
        )


def drop_schedules(
    client: SyncPrefectClient, contents: Mapping[str, Any], pair: str, device: str
) -> None:
    """Remove the schedules of deployments that have none in the file: Prefect keeps those that an
    earlier file gave them."""
    from draftwell.flows.orchestration.concurrency import deployment_name

    unscheduled = {
        wanted["entrypoint"] for wanted in contents["deployments"] if not wanted.get("schedules")
    }
    for deployment in deployments_named(client, deployment_name(pair, device)):
        for schedule in deployment.schedules if deployment.entrypoint in unscheduled else ():
            client.delete_deployment_schedule(deployment.id, schedule.id)


def found(
    client: SyncPrefectClient, contents: Mapping[str, Any], pair: str, device: str
) -> list[Deployed]:
    """The deployments as the server has them now.

    Raises:
        DraftwellError: one of the file is not there.
    """
    from draftwell.flows.orchestration.concurrency import deployment_name

    name = deployment_name(pair, device)
    known = {d.entrypoint: d for d in deployments_named(client, name)}
    rows = []
    for wanted in contents["deployments"]:
        deployment = known.get(wanted["entrypoint"])
        if deployment is None:
            raise DraftwellError(
                f"the server has no deployment of {wanted['entrypoint']} named {name}: its "
                "name in the file must be that "
                f'of pair and device, "{{{{ ${PAIR} }}}}-{{{{ ${DEVICE} }}}}"',
                code="deployment_misnamed",
            )
        crons = [
            getattr(each.schedule, "cron", str(each.schedule))
            for each in deployment.schedules
            if each.active
        ]
        events = [
            event for trigger in wanted.get("triggers") or () for event in trigger.get("expect", ())
        ]
        flow = client.read_flow(deployment.flow_id).name
        when = (
            ", ".join([f"cron {cron}" for cron in crons] + [f"event {event}" for event in events])
            or "by hand"
        )
        rows.append(Deployed(f"{flow}/{name}", when))
    return rows


def deployments_named(client: SyncPrefectClient, name: str) -> list[DeploymentResponse]:
    """All deployments of a name, of whichever flow."""
    from prefect.client.schemas.filters import DeploymentFilter, DeploymentFilterName

    return client.read_deployments(
        deployment_filter=DeploymentFilter(name=DeploymentFilterName(any_=[name]))
    )


def replaced(
    client: SyncPrefectClient, contents: Mapping[str, Any], pair: str, device: str
) -> tuple[str, ...]:
    """Delete the deployments of the same flows that an earlier version named after the pair alone;
    returns their names.

    Both would run otherwise. Those for another device stay until that is scheduled.
    """
    mine, gone = {wanted["entrypoint"] for wanted in contents["deployments"]}, []
    for old in deployments_named(client, pair):
        if (
            old.entrypoint in mine
            and (old.parameters or {}).get("settings", {}).get("device", "cpu") == device
        ):
            gone.append(f"{client.read_flow(old.flow_id).name}/{old.name}")
            client.delete_deployment(old.id)
    return tuple(gone)
