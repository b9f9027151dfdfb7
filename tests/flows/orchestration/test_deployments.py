"""Schedules: what prefect.yaml deploys, turns, kept results, retries, and what a run shows; without
a worker."""

from __future__ import annotations

import errno
import inspect
import json
import os
import re
import shutil
import subprocess
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
import requests
import yaml
from prefect import Flow, Task, flow, task
from prefect.cache_policies import NO_CACHE
from prefect.exceptions import ObjectNotFound
from sqlalchemy.exc import OperationalError

from draftwell.flows.context import StepContext
from draftwell.flows.failures import DiskFull, disk_full_as_error, is_full, worth_retrying
from draftwell.flows.orchestration import (
    cached_steps,
)
from draftwell.flows.orchestration import (
    concurrency as concurrency_slots,
)
from draftwell.flows.orchestration import (
    deployments as schedules,
)
from draftwell.flows.orchestration import (
    learn_tasks as learn,
)
from draftwell.flows.orchestration import (
    prefect_artifacts as showing,
)
from draftwell.flows.orchestration import (
    release_tasks as release,
)
from draftwell.flows.orchestration import (
    scheduled_flows as scheduled,
)
from draftwell.flows.orchestration.automations import (
    CRASH_SILENT_RUNS,
    HEARTBEAT,
    SILENCE,
    TAG,
    make_automations,
)
from draftwell.flows.orchestration.cached_steps import once, run_once, standing
from draftwell.flows.orchestration.learn_tasks import RETRY, within
from draftwell.flows.settings import PipelineSettings, TrafficSettings
from draftwell.flows.steps.champion import champion_number
from draftwell.flows.steps.deploy import deploy_champion, promote_and_deploy
from draftwell.flows.steps.publish import run_publish
from draftwell.flows.workspace import Workspace
from draftwell.registry import gates
from draftwell.registry.gates import GateCheck
from draftwell.registry.promotion import promote, rollback
from draftwell.registry.releases import record_gate
from draftwell.serving.artifacts.pair_files import fingerprint
from draftwell.serving.errors import DraftwellError
from draftwell.serving.recording.trace import TraceSet
from draftwell.serving.recording.trace_schema import TraceError
from tests.support.errors import raises_code
from tests.support.loop.publishing import config, table, verdict
from tests.support.loop.publishing import release as make_release
from tests.support.loop.refusals import refused
from tests.support.loop.thresholds import ANY_SPEED
from tests.support.paths import REPO

FILE = REPO / "prefect.yaml"
DEPLOYMENTS = schedules.read_deployments(FILE)["deployments"]


@pytest.fixture
def place(own_stores: Path, empty_database: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder to work in, with stores of its own."""
    shutil.copyfile(empty_database, own_stores / "mlflow.db")
    (own_stores / "work").mkdir()
    monkeypatch.chdir(own_stores / "work")
    monkeypatch.setenv("DRAFTWELL_MODELS", str(own_stores / "models"))
    return own_stores


@pytest.fixture
def settings(place: Path, pair_file: Path, prompts_file: Path) -> TrafficSettings:
    return TrafficSettings(
        pair=str(pair_file),
        prompts=prompts_file,
        collect_prompts=6,
        collect_tokens=8,
        bench_prompts=2,
        sampled_prompts=3,
        threads=1,
    )


@pytest.fixture
def space(settings: PipelineSettings) -> Workspace:
    return Workspace(settings.pair)


@pytest.fixture
def deployed(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a run of a deployment."""
    monkeypatch.setenv("PREFECT__RUNTIME__DEPLOYMENT__ID", str(uuid.uuid4()))


@pytest.fixture
def limits(prefect_server: None, deployed: None) -> Iterator[Any]:
    """A client of the test server; the limits that a test makes go with it."""
    from prefect.client.orchestration import get_client

    with get_client(sync_client=True) as client:
        yield client
        for name in (concurrency_slots.pair_limit("tiny"), concurrency_slots.GPU_SLOT):
            try:
                client.delete_global_concurrency_limit_by_name(name)
            except ObjectNotFound:
                continue


# prefect.yaml


def test_every_stage_is_deployed() -> None:
    names = [deployment["entrypoint"].partition(":")[2] for deployment in DEPLOYMENTS]
    assert names == [
        "weekly",
        "collection",
        "calibration",
        "tuning",
        "release",
        "sync",
        "monitor",
        "engine_recalibration",
        "recalibrate",
    ]


@pytest.mark.parametrize("deployment", DEPLOYMENTS, ids=lambda deployment: deployment["entrypoint"])
def test_deployments_are_bound_to_their_pair(deployment: dict[str, Any]) -> None:
    assert deployment["name"] == "{{ $DRAFTWELL_PAIR }}-{{ $DRAFTWELL_DEVICE }}"
    assert deployment["parameters"]["settings"]["pair"] == "{{ $DRAFTWELL_PAIR }}"
    assert deployment["concurrency_limit"] == {"limit": 1, "collision_strategy": "CANCEL_NEW"}
    assert deployment["work_pool"] == {
        "name": "draftwell",
        "job_variables": {"env": {"PREFECT_FLOWS_HEARTBEAT_FREQUENCY": str(HEARTBEAT)}},
    }
    assert TAG in deployment["tags"], "the automation that ends runs without heartbeat goes by it"
    assert deployment["enforce_parameter_schema"] is True
    crons = [schedule["cron"] for schedule in deployment.get("schedules", ())]
    starts = "cron" if crons else "event" if deployment.get("triggers") else "by hand"
    expected = {"weekly": "cron", "sync": "cron", "monitor": "cron", "recalibrate": "event"}
    assert starts == expected.get(deployment["entrypoint"].partition(":")[2], "by hand"), (
        "parts of the weekly flow start with it"
    )


@pytest.mark.parametrize("deployment", DEPLOYMENTS, ids=lambda deployment: deployment["entrypoint"])
def test_entrypoints_are_flows_with_validated_settings(deployment: dict[str, Any]) -> None:
    import importlib

    file, _, name = deployment["entrypoint"].partition(":")
    found = getattr(importlib.import_module(file.removesuffix(".py").replace("/", ".")), name)
    assert isinstance(found, Flow)
    assert found.should_validate_parameters
    assert found.result_serializer == "json"
    assert "settings" in inspect.signature(found.fn).parameters


def test_every_flow_and_task_has_a_time_limit() -> None:
    import importlib

    modules = [
        importlib.import_module(f"draftwell.flows.orchestration.{name}")
        for name in (
            "learn_tasks",
            "release_tasks",
            "scheduled_flows",
            "monitor_flow",
            "recalibrate_flow",
            "pipeline_flow",
            "engine_flow",
        )
    ]
    found = {
        f"{module.__name__}.{name}": value
        for module in modules
        for name, value in vars(module).items()
        if isinstance(value, Flow | Task)
    }
    assert len(found) > 25
    assert {
        name: value.timeout_seconds for name, value in found.items() if not value.timeout_seconds
    } == {}
    brief = within(PipelineSettings(step_hours=0.5), learn.tune_task)
    assert isinstance(brief, Task)
    assert (brief.timeout_seconds, brief.retries) == (1800, 3)


# both kinds of alarm are the process's one timer: pytest's would hold Prefect's back
@pytest.mark.timeout(120, method="thread")
def test_a_step_that_hangs_is_stopped_and_not_tried_again(prefect_server: None) -> None:
    tries = []

    @task(**RETRY)
    def hangs(settings: PipelineSettings) -> None:
        tries.append(1)
        time.sleep(300)

    @flow
    def whole(settings: PipelineSettings) -> None:
        within(settings, hangs)(settings)

    with pytest.raises(TimeoutError):
        whole(PipelineSettings(step_hours=1 / 3600))
    assert tries == [1]


def test_the_weekly_flow_runs_the_four_in_order_and_stops_at_what_fails(
    settings: TrafficSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[str] = []

    def part(name: str, fails: bool = False) -> Callable[[TrafficSettings], dict[str, Any]]:
        def run(given: TrafficSettings) -> dict[str, Any]:
            assert given == settings
            ran.append(name)
            if fails:
                raise DraftwellError("no")
            return {"of": name}

        return run

    for name in ("collection", "calibration", "tuning", "release"):
        monkeypatch.setattr(scheduled, name, part(name))
    assert scheduled.weekly.fn(settings) == {"of": "release"}
    assert ran == ["collection", "calibration", "tuning", "release"]
    monkeypatch.setattr(scheduled, "calibration", part("calibration", fails=True))
    ran.clear()
    with pytest.raises(DraftwellError):
        scheduled.weekly.fn(settings)
    assert ran == ["collection", "calibration"]


def test_a_schedule_that_an_earlier_file_gave_is_removed() -> None:
    """Prefect would keep it: the parts of the weekly flow would run twice a week."""
    gone: list[tuple[str, str]] = []
    names = ("weekly", "tuning")
    on_server = [
        SimpleNamespace(
            id=name, entrypoint=f"flows.py:{name}", schedules=[SimpleNamespace(id="old")]
        )
        for name in names
    ]
    client: Any = SimpleNamespace(
        read_deployments=lambda **filters: on_server,
        delete_deployment_schedule=lambda *ids: gone.append(ids),
    )
    contents = {
        "deployments": [
            {"entrypoint": "flows.py:weekly", "schedules": [{"cron": "0 1 * * 0"}]},
            {"entrypoint": "flows.py:tuning"},
        ]
    }
    schedules.drop_schedules(client, contents, "tiny", "cpu")
    assert gone == [("tuning", "old")]


def test_the_automation_for_dead_runs_is_made_once(limits: Any) -> None:
    assert make_automations(limits) == make_automations(limits) == [CRASH_SILENT_RUNS]
    (made,) = limits.read_automations_by_name(CRASH_SILENT_RUNS)
    assert made.trigger.within.total_seconds() == SILENCE >= 3 * HEARTBEAT
    assert [action.type for action in made.actions] == ["change-flow-run-state"]


def test_the_template_of_alerts_is_what_prefect_takes() -> None:
    from prefect.events.schemas.automations import AutomationCore

    (alert,) = yaml.safe_load((REPO / "deploy" / "alerts.yaml").read_text())["automations"]
    made = AutomationCore.model_validate(alert)
    assert {
        "prefect.flow-run.Failed",
        "prefect.flow-run.Crashed",
        "prefect.flow-run.TimedOut",
    } == set(made.trigger.expect)


def test_drift_of_a_pair_on_a_device_starts_its_recalibration_alone() -> None:
    from prefect.server.events.schemas.automations import EventTrigger
    from prefect.server.events.schemas.events import ReceivedEvent

    (deployment,) = [d for d in DEPLOYMENTS if d["entrypoint"].endswith(":recalibrate")]
    (spec,) = deployment["triggers"]
    assert spec["type"] == "event"
    of_tiny = json.loads(
        json.dumps({key: spec[key] for key in ("posture", "expect", "match", "threshold")})
        .replace("{{ $DRAFTWELL_PAIR }}", "tiny")
        .replace("{{ $DRAFTWELL_DEVICE }}", "cuda")
    )
    trigger = EventTrigger.model_validate({**of_tiny, "type": "event"})
    assert trigger.immediate

    def event(name: str, pair: str, device: str = "cuda") -> ReceivedEvent:
        resource = {"prefect.resource.id": f"draftwell.pair.{pair}", "draftwell.device": device}
        return ReceivedEvent(
            occurred=datetime.now(UTC),
            event=name,
            resource=resource,
            id=uuid.uuid4(),
            received=datetime.now(UTC),
        )

    assert trigger.covers(event("draftwell.drift", "tiny"))
    assert not trigger.covers(event("draftwell.drift", "tiny-2"))
    assert not trigger.covers(event("draftwell.drift", "tiny", "cpu"))
    assert not trigger.covers(event("draftwell.checked", "tiny"))


def test_deployments_of_an_earlier_version_are_replaced_on_their_device_alone() -> None:
    """Named after the pair; both would run otherwise."""

    def old(name: str, entrypoint: str, **settings: str) -> SimpleNamespace:
        return SimpleNamespace(
            id=f"{name} {entrypoint}",
            flow_id=entrypoint,
            name=name,
            entrypoint=entrypoint,
            parameters={"settings": settings},
        )

    there = [
        old("tiny", "a"),
        old("tiny", "b", device="cuda"),
        old("tiny", "c"),
        old("tiny-cpu", "a"),
    ]
    deleted: list[str] = []
    client: Any = SimpleNamespace(
        read_deployments=lambda deployment_filter: [
            each for each in there if each.name in deployment_filter.name.any_
        ],
        read_flow=lambda flow: SimpleNamespace(name=f"flow {flow}"),
        delete_deployment=deleted.append,
    )
    contents = {"deployments": [{"entrypoint": "a"}, {"entrypoint": "b"}]}
    assert schedules.replaced(client, contents, "tiny", "cpu") == ("flow a/tiny",)
    assert deleted == ["tiny a"]
    assert schedules.replaced(client, contents, "tiny", "cuda") == ("flow b/tiny",)


class More(PipelineSettings):
    spool: str | None = None


def test_given_settings_reach_the_flows_that_have_them_and_leave_the_file_as_it_is() -> None:
    contents = {
        "name": "x",
        "deployments": [
            {"entrypoint": "a", "parameters": {"settings": {"pair": "p", "trials": 3}, "other": 1}},
            {"entrypoint": "b"},
        ],
    }
    before, classes = json.dumps(contents), {"a": PipelineSettings, "b": More}
    done = schedules.for_pair(
        contents,
        {"pair": "tiny", "threads": "1", "spool": "here"},
        lambda entrypoint: classes[entrypoint],
    )
    assert [d["parameters"] for d in done["deployments"]] == [
        {"settings": {"pair": "tiny", "trials": 3, "threads": 1}, "other": 1},
        {"settings": {"pair": "tiny", "threads": 1, "spool": "here"}},
    ]
    assert json.dumps(contents) == before
    with raises_code("unknown_setting", "spoll"):
        schedules.for_pair(
            contents, {"pair": "tiny", "spoll": "here"}, lambda entrypoint: classes[entrypoint]
        )


def test_prompts_of_other_flows_are_none_of_an_engines_recalibration() -> None:
    """`--prompts` was taken for its recorded requests, and with `collect_prompts=200` its window
    never held enough of them."""
    from draftwell.flows.steps.engine.recalibrate import EngineDriftSettings

    contents = {
        "deployments": [
            {"entrypoint": "a", "parameters": {"settings": {"prompts": "/recorded"}}},
            {"entrypoint": "b"},
        ]
    }
    given = {
        "pair": "tiny",
        "out": "/dist",
        "prompts": "traffic.jsonl",
        "collect_prompts": "200",
        "minutes": "9",
    }
    done = schedules.for_pair(
        contents, given, {"a": EngineDriftSettings, "b": PipelineSettings}.__getitem__
    )
    assert [d["parameters"]["settings"] for d in done["deployments"]] == [
        {"pair": "tiny", "out": "/dist", "minutes": 9.0, "prompts": "/recorded"},
        {"pair": "tiny", "out": "/dist", "prompts": "traffic.jsonl", "collect_prompts": 200},
    ]
    # it was set nowhere
    with raises_code(
        "unknown_setting", "collect_prompts is set in the file of deployments alone (prefect.yaml"
    ):
        schedules.for_pair(
            {"deployments": [{"entrypoint": "a"}]},
            {"pair": "tiny", "collect_prompts": "30"},
            {"a": EngineDriftSettings}.__getitem__,
        )


def test_a_pair_of_ones_own_is_named_by_its_absolute_path(
    pair_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker starts elsewhere."""
    monkeypatch.chdir(pair_file.parent)
    assert schedules.absolute_pair("tiny.yaml", "tiny") == str(pair_file)
    assert schedules.absolute_pair("default", "smollm2-135m") == "smollm2-135m"


def test_folders_are_named_by_their_absolute_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from draftwell.flows.cli.schedule import read_settings

    monkeypatch.chdir(tmp_path)
    given = read_settings("default", None, "cpu", None, ["spool=spool", "out=~/dist", "trials=3"])
    assert given == {
        "pair": "default",
        "device": "cpu",
        "spool": str(tmp_path / "spool"),
        "out": str(Path("~/dist").expanduser()),
        "trials": "3",
    }


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--set", "trails=3"), ("trails", "trials")),
        (("--set", "trials=0"), ("trials", "greater than or equal to 1", "'0'")),
        (("--set", "trials"), ("key=value",)),
        (("--device", "tpu"), ("device",)),
        (("--prompts", "nowhere.jsonl"), ("nowhere.jsonl",)),
        (("--pair", "smolm2-135m"), ("unknown pair",)),
        (("--file", "nowhere.yaml"), ("nowhere.yaml", "checkout")),
        (("--file", REPO / "registry" / "gates.yaml"), ("gates.yaml", "deployments")),
        (("--file", REPO / "Makefile"), ("Makefile", "YAML")),
    ],
)
def test_mistakes_are_told_before_anything_is_deployed(
    run: Any, place: Path, arguments: tuple[Any, ...], words: tuple[str, ...]
) -> None:
    refused(run("schedule", "--file", FILE, *arguments), *words)


def test_no_server_is_told_with_the_mend(run: Any, place: Path, pair_file: Path) -> None:
    from prefect.settings import PREFECT_API_URL, temporary_settings

    with temporary_settings({PREFECT_API_URL: "http://127.0.0.1:9/api"}):
        refused(
            run("schedule", "--pair", pair_file, "--file", FILE),
            "127.0.0.1:9",
            "make prefect-server",
            "PREFECT_API_URL",
        )


def test_a_server_that_turns_us_away_is_told_without_a_password(
    run: Any, place: Path, pair_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A wrong PREFECT_API_AUTH_STRING: the health check answers, the first question does not. No
    traceback."""
    import httpx
    from prefect.settings import PREFECT_API_URL, temporary_settings

    def answer(client: Any, request: httpx.Request, **options: Any) -> httpx.Response:
        return httpx.Response(
            200 if request.url.path.endswith(("/health", "/version")) else 401,
            json={},
            request=request,
        )

    monkeypatch.setattr(httpx.Client, "send", answer)
    with temporary_settings({PREFECT_API_URL: "http://user:secret@127.0.0.1:9/api"}):
        done = run("schedule", "--pair", pair_file, "--file", FILE)
    refused(done, "//127.0.0.1:9", "PREFECT_API_AUTH_STRING")
    assert "secret" not in done.output


def test_no_server_is_told_without_a_password(run: Any, place: Path, pair_file: Path) -> None:
    from prefect.settings import PREFECT_API_URL, temporary_settings

    with temporary_settings({PREFECT_API_URL: "http://user:secret@127.0.0.1:9/api"}):
        done = run("schedule", "--pair", pair_file, "--file", FILE)
    refused(done, "no Prefect server answers at http://127.0.0.1:9/api")
    assert "secret" not in done.output


def test_what_is_published_names_no_place_of_this_machine(pair_file: Path, tmp_path: Path) -> None:
    from draftwell.flows.steps.monitor import DriftSettings

    given = DriftSettings(
        pair=str(pair_file),
        prompts=tmp_path / "p.jsonl",
        spool=tmp_path,
        reference=tmp_path,
        out=tmp_path,
        trials=7,
    )
    kept = given.evidence("tiny")
    assert (kept["pair"], kept["trials"]) == ("tiny", 7)
    assert [name for name, value in kept.items() if "/" in str(value)] == []
    places = {
        name
        for name, field in DriftSettings.model_fields.items()
        if "Path" in str(field.annotation)
    }
    assert not places & set(kept)


def test_a_gate_on_a_full_disk_says_so_in_its_files(tmp_path: Path) -> None:
    """An error without a file's name, as of a library that hides it, is no fault of ours."""
    from draftwell.flows.cli import release as commands

    path = tmp_path / "gate.md"
    with pytest.raises(DiskFull, match="free some space"), commands.errors_are_reported(path, None):
        raise FULL
    assert "free some space" in path.read_text()


# Turns


def test_without_limits_no_slot_is_held(limits: Any) -> None:
    with (
        raises_code("no_concurrency_limit", "draftwell schedule --pair tiny"),
        concurrency_slots.hold_slots("tiny"),
    ):
        pass


def test_a_single_missing_limit_is_noticed(limits: Any) -> None:
    """Asked for both limits in one call, Prefect is content with either."""
    from prefect.concurrency.sync import concurrency

    schedules.make_limits(limits, "tiny", None)
    limits.delete_global_concurrency_limit_by_name(concurrency_slots.GPU_SLOT)
    with concurrency(
        [concurrency_slots.pair_limit("tiny"), concurrency_slots.GPU_SLOT], strict=True
    ):
        pass  # the naive way
    with (
        raises_code("no_concurrency_limit", concurrency_slots.GPU_SLOT),
        concurrency_slots.hold_slots("tiny"),
    ):
        pass


def test_a_slot_keeps_others_waiting(limits: Any) -> None:
    from prefect.concurrency.sync import concurrency

    assert schedules.make_limits(limits, "tiny", None) == {"pair-tiny": 1, "gpu-slot": 1}
    with concurrency_slots.hold_slots("tiny"):
        for name in ("pair-tiny", "gpu-slot"):
            with pytest.raises(TimeoutError), concurrency(name, strict=True, timeout_seconds=0.5):
                pass
    with (
        concurrency("pair-tiny", strict=True, timeout_seconds=5),
        concurrency("gpu-slot", strict=True, timeout_seconds=5),
    ):
        pass


@pytest.mark.slow
def test_a_slot_that_never_gets_free_is_reported_with_the_fix(
    limits: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from prefect.concurrency.sync import concurrency

    schedules.make_limits(limits, "tiny", None)
    with monkeypatch.context() as patch, concurrency("gpu-slot", strict=True):
        patch.setattr(concurrency_slots, "PATIENCE", 5 / 3600)
        with (
            raises_code("no_free_slot", "gpu-slot", "--active-slots 0"),
            concurrency_slots.hold_slots("tiny"),
        ):
            pass
    with concurrency_slots.hold_slots("tiny"):
        pass


def test_servers_keep_leases_over_a_restart() -> None:
    """Prefect keeps them in memory unless told otherwise; test_scheduled_runs.py starts a server
    again."""
    name = "PREFECT_SERVER_CONCURRENCY_LEASE_STORAGE"
    made = subprocess.run(
        ["make", "--dry-run", "prefect-server"],
        cwd=REPO,
        capture_output=True,
        text=True,
        check=True,
        env={key: value for key, value in os.environ.items() if key != name},
    )
    assert f'{name}="${{{name}:-{schedules.KEPT_LEASES}}}"' in made.stdout
    server = yaml.safe_load((REPO / "deploy" / "compose.yaml").read_text())["services"]["prefect"]
    assert server["environment"][name] == schedules.KEPT_LEASES
    assert f"prefect:{server['environment']['PREFECT_HOME']}" in server["volumes"]


def test_a_server_that_forgets_leases_is_told(limits: Any) -> None:
    from prefect.settings import PREFECT_SERVER_CONCURRENCY_LEASE_STORAGE

    memory = schedules.KEPT_LEASES.replace("filesystem", "memory")
    assert PREFECT_SERVER_CONCURRENCY_LEASE_STORAGE.value() == memory
    assert schedules.forgets_leases(limits)

    def server(told: Any, status: int = 200) -> Any:
        return SimpleNamespace(
            request=lambda *words: httpx.Response(
                status, json=told, request=httpx.Request(*words)
            ).raise_for_status()
        )

    assert not schedules.forgets_leases(
        server({"server": {"concurrency": {"lease_storage": schedules.KEPT_LEASES}}})
    )
    assert not schedules.forgets_leases(server({}, 404)), "Prefect Cloud does not say"


def test_limits_that_somebody_changed_stay(limits: Any) -> None:
    schedules.make_limits(limits, "tiny", 3)
    assert schedules.make_limits(limits, "tiny", None)["gpu-slot"] == 3
    assert schedules.make_limits(limits, "tiny", 2)["gpu-slot"] == 2


def test_a_flow_run_by_hand_waits_for_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        concurrency_slots,
        "concurrency",
        lambda name, **options: pytest.fail(f"it waits for {name}"),
    )
    with concurrency_slots.hold_slots("tiny"):
        pass


def due(client: Any, name: str, pair: str, hours: float, *, running: bool = False) -> Any:
    """A run of a deployment that is due in so many hours; returns its id."""
    from prefect.states import Running, Scheduled

    deployment = client.create_deployment(client.create_flow_from_name(name), pair)
    run = client.create_flow_run_from_deployment(
        deployment, state=Scheduled(scheduled_time=datetime.now(UTC) + timedelta(hours=hours))
    )
    if running:
        client.set_flow_run_state(run.id, Running(), force=True)
    return run.id


def test_a_flow_of_the_week_waits_for_those_before_it(
    limits: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The slots are free, but collection is under way and calibration late: slots are not first
    come, first served."""
    from prefect.states import Completed, Failed

    schedules.make_limits(limits, "tiny", None)
    first, second = (
        due(limits, "collection", "tiny", -2, running=True),
        due(limits, "calibration", "tiny", -1),
    )
    others = [
        due(limits, *other)
        for other in (
            ("release", "tiny", -1),
            ("collection", "another", -2),
            ("collection", "tiny", -8 * 24),
            ("collection", "tiny", 1),
        )
    ]
    events: list[str] = []

    def later(seconds: float) -> None:
        events.append("waited")
        run, state = {1: (first, Failed()), 2: (second, Completed())}[len(events)]
        limits.set_flow_run_state(run, state, force=True)

    monkeypatch.setattr(concurrency_slots, "sleep", later)

    @flow(name="tuning")
    def tuning() -> None:
        with concurrency_slots.hold_slots("tiny"):
            events.append("computed")

    try:
        tuning()
        assert events == ["waited", "waited", "computed"]
        dead = due(limits, "collection", "tiny", -1, running=True)
        monkeypatch.setattr(concurrency_slots, "PATIENCE", 0.0)
        state = tuning(return_state=True)
        assert state.is_failed()
        assert re.search(
            r"collection/tiny \(.+\) precedes this flow and has not ended after 0 hours: cancel it",
            state.message,
        )
        assert len(events) == 3
        others.append(dead)
    finally:
        for run in (first, second, *others):
            limits.delete_flow_run(run)


def test_a_flow_within_a_flow_has_its_slots_already(
    prefect_server: None, deployed: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would wait for itself for ever; and all take pair before accelerator."""
    taken: list[str] = []

    @contextmanager
    def take(name: str, **options: Any) -> Iterator[None]:
        assert options["strict"] is True
        taken.append(name)
        yield

    monkeypatch.setattr(concurrency_slots, "concurrency", take)
    with concurrency_slots.hold_slots("tiny"), concurrency_slots.hold_slots("tiny"):
        assert taken == ["pair-tiny", "gpu-slot"]
    with concurrency_slots.hold_slots("tiny"):
        assert len(taken) == 4

    @flow
    def part() -> None:
        with concurrency_slots.hold_slots("tiny"):
            pass

    @flow
    def whole() -> None:
        with concurrency_slots.hold_slots("tiny"):
            part()

    whole()
    assert len(taken) == 6, "as the weekly flow and its parts"


# Retries


FULL = OSError(errno.ENOSPC, "No space left on device")


def caused(error: Exception, cause: Exception) -> Exception:
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    ("error", "again"),
    [
        (caused(DraftwellError("the registry failed"), ConnectionError("refused")), True),
        (
            caused(
                DraftwellError("the registry failed"),
                caused(RuntimeError("request"), requests.ConnectionError("refused")),
            ),
            True,
        ),
        (
            caused(
                DraftwellError("the registry failed"),
                OperationalError("select", {}, Exception("database is locked")),
            ),
            True,
        ),
        (
            caused(DraftwellError("no prompts"), FileNotFoundError(errno.ENOENT, "No such file")),
            False,
        ),
        (ConnectionError("reset"), True),
        (RuntimeError("unexpected"), True),
        (ValueError("a fault of ours"), False),
        (DraftwellError("no traces"), False),
        (TraceError("broken"), False),
        (FULL, False),
        (
            caused(
                DraftwellError("the registry failed"),
                OperationalError("insert", {}, Exception("database or disk is full")),
            ),
            False,
        ),
        ("no exception", True),
    ],
    ids=repr,
)
def test_what_is_tried_again(error: Any, again: bool) -> None:
    assert worth_retrying(None, None, SimpleNamespace(data=error)) is again


@pytest.mark.parametrize(
    "module", [learn, release, scheduled], ids=lambda module: str(module.__name__)
)
def test_delays_double_with_jitter(module: Any) -> None:
    found = [value for value in vars(module).values() if isinstance(value, Task) and value.retries]
    assert found
    for each in found:
        assert (each.retries, each.retry_delay_seconds, each.retry_jitter_factor) == (
            3,
            [10, 20, 40],
            0.5,
        )
        # Prefect takes any other callable for "never"
        assert inspect.isfunction(each.retry_condition_fn)
        assert each.result_serializer == "json"


def test_lines_are_in_the_log_of_the_run_that_says_them(
    prefect_server: None, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    from draftwell.flows.progress import announce

    announce("said outside")
    flow(announce)("said inside")
    assert [record.message for record in caplog.records if record.message.startswith("said")] == [
        "said inside"
    ]
    assert "said outside\n" in capsys.readouterr().err


def test_a_full_disk_is_seen_through_other_errors() -> None:
    with (
        pytest.raises(DiskFull, match=r"free some space .* what was finished is kept"),
        disk_full_as_error(),
    ):
        raise caused(RuntimeError("cannot save"), FULL)
    with pytest.raises(RuntimeError, match="cannot save"), disk_full_as_error():
        raise RuntimeError("cannot save")
    assert is_full(RuntimeError("I/O error: No space left on device (os error 28)"))
    assert not is_full(FileNotFoundError(errno.ENOENT, "No such file"))


# Kept results


def test_a_step_runs_once_for_what_it_is_made_of(
    prefect_server: None,
    settings: PipelineSettings,
    space: Workspace,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    of_pair, runs, keys = fingerprint(space.files(), space.dtype), list[str](), set[str]()

    @task(name=f"a step {uuid.uuid4().hex}", **RETRY)
    def step(settings: PipelineSettings) -> dict[str, Any]:
        runs.append("run")
        space.save(table(of_pair, accepted=len(runs) % 5))
        return {"made": standing(space, ["acceptance_table"]), "run": len(runs)}

    def again(before: str = "7", given: PipelineSettings = settings) -> int:
        found = int(once(step, given, space, {"traces": before})["run"])
        keys.add(json.loads((space.device_root / "steps" / f"{step.name}.json").read_text())["key"])
        return found

    @flow
    def all_in_one() -> None:  # a flow run for each call would take a second each
        assert (again(), again()) == (1, 1)
        assert again("8") == 2  # other traces
        # the first result is kept, but what stands now was made of other traces
        assert again() == 3
        assert again() == 3
        shutil.rmtree(space.artifacts / "acceptance_table")
        assert again() == 4  # emptied by hand
        assert again(given=settings.model_copy(update={"trials": 7})) == 5
        # changes no result
        assert (
            again(given=settings.model_copy(update={"trials": 7, "workers": 2, "runner": "ray"}))
            == 5
        )
        monkeypatch.setattr(
            "draftwell.components.report.provenance.code_digest", lambda: "other sources"
        )
        assert again() == 6

    all_in_one()
    assert len(keys) == 4
    assert all("/" not in key and str(space.root) not in key for key in keys)


def test_two_devices_of_one_pair_do_not_replace_each_others_results(
    settings: PipelineSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With one file for both, the flows of two devices on one machine computed again in turn."""
    from draftwell.flows.orchestration.learn_tasks import within

    runs = list[str]()

    def step(given: PipelineSettings) -> dict[str, Any]:
        runs.append(given.device)
        return {"made": {}}

    step.name = "a step"  # type: ignore[attr-defined]
    monkeypatch.setattr(
        "draftwell.components.report.provenance.device_class", lambda device: f"{device}-of-a-test"
    )
    assert within(settings, step) is step  # type: ignore[arg-type]  # a plain function in the place of a task
    for device in ("cpu", "cuda", "cpu", "cuda"):
        once(
            step,
            settings.model_copy(update={"device": device}),
            Workspace(settings.pair, device=device),
            {},
        )  # type: ignore[arg-type]
    assert runs == ["cpu", "cuda"]


def test_what_is_broken_does_not_stand(space: Workspace) -> None:
    table("f" * 64).save(space.artifacts / "acceptance_table")
    space.traces.mkdir(parents=True)
    space.traces.joinpath("shard-00000.parquet").write_bytes(b"PAR1 half")
    assert set(
        standing(
            space, ["acceptance_table", "verifier", *cached_steps.traces_of(PipelineSettings())]
        )
    ) == {"acceptance_table"}


@pytest.mark.parametrize(
    "step",
    [scheduled.collection_step, scheduled.calibration_step, scheduled.tuning_step],
    ids=lambda step: step.name,
)
def test_prefect_keeps_no_result_of_a_step(step: Task[Any, Any]) -> None:
    assert step.cache_policy is NO_CACHE
    assert step.result_serializer == "json"


def test_a_result_that_is_too_old_or_of_another_form_is_made_again(tmp_path: Path) -> None:
    file, runs = tmp_path / "step.json", list[int]()

    def step() -> int:
        runs.append(1)
        return len(runs)

    file.write_text('{"state": "of an older version"}')
    assert (run_once(file, "k", step, seconds=60.0), run_once(file, "k", step, seconds=60.0)) == (
        1,
        1,
    )
    os.utime(file, (0, 0))
    assert (run_once(file, "k", step), run_once(file, "k", step, seconds=60.0)) == (1, 2)


# A flow


@pytest.mark.slow
def test_collection(
    prefect_server: None,
    settings: PipelineSettings,
    space: Workspace,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A full disk, then room, then nothing to do, then a broken shard: no shard by half, one
    attempt each, no computing twice."""
    from draftwell.serving import files

    tried: list[str] = []
    written: list[int] = []
    real = learn.collect_step.run_collect

    def counted(*arguments: Any, **options: Any) -> TraceSet:
        tried.append("collect")
        return real(*arguments, **options)

    def full(handle: int) -> None:
        written.append(handle)
        if len(written) > 1:  # the plan is the first
            raise FULL

    monkeypatch.setattr(learn.collect_step, "run_collect", counted)
    with monkeypatch.context() as patch:
        patch.setattr(files.os, "fsync", full)
        with pytest.raises(DiskFull, match="free some space"):
            scheduled.collection(settings)
    assert (len(tried), list(space.traces.glob("*shard*"))) == (1, [])
    done = scheduled.collection(settings)
    sampled = TraceSet(space.traces_at(1.0))
    assert done["made"] == {
        "traces": TraceSet(space.traces).digest(),
        "traces_sampled": sampled.digest(),
    }
    assert (
        sampled.header.temperature,
        len(set(sampled.read(["prompt_id"]).column(0).to_pylist())),
    ) == (1.0, 3)
    assert min(done["report"]["positions"].values()) > 6
    assert len(tried) == 3
    assert scheduled.collection(settings) == done
    assert len(tried) == 3
    shown = shown_in_prefect("collection-tiny")
    assert [row["digest"] for row in json.loads(shown[0].data)] == [
        digest[:12] for digest in done["made"].values()
    ]
    (shard,) = TraceSet(space.traces).shards
    shard.write_bytes(shard.read_bytes()[:100])
    with raises_code("unreadable_trace", shard.name):
        scheduled.collection(settings)
    assert len(tried) == 5
    shard.unlink()
    assert scheduled.collection(settings)["made"] == done["made"]


@pytest.mark.slow
def test_two_weeks(
    prefect_server: None,
    settings: PipelineSettings,
    space: Workspace,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The four flows, from prompts to a verdict; a week later, with nothing changed, nothing is
    computed and nothing is judged again."""
    small = settings.model_copy(
        update={
            "collect_prompts": 8,
            "collect_tokens": 16,
            "calibrate_prompts": 2,
            "tune_prompts": 2,
            "tune_tokens": 8,
            "trials": 3,
            "bench_tokens": 8,
        }
    )
    let_any_speed_pass(monkeypatch, space.root / "registry")
    week = [
        each(small)
        for each in (
            scheduled.collection,
            scheduled.calibration,
            scheduled.tuning,
            scheduled.release,
        )
    ]
    traces, learned, chosen, released = week
    assert learned["versions"] == dict.fromkeys(scheduled.CALIBRATED, 1)
    assert chosen["versions"] == {"decoding_config": 1}
    assert (released["release"], released["passed"]) == (1, True)
    assert (Path("dist") / "tiny" / "current").resolve() == Path(released["bundle"]).resolve()
    assert {
        row["config"].endswith("chosen")
        for row in json.loads(shown_in_prefect("tuning-tiny")[0].data)
    } >= {True}
    assert {row["name"] for row in json.loads(shown_in_prefect("gate-tiny")[0].data)} >= {"speedup"}
    assert shown_in_prefect("mlflow-tiny-release")
    steps = (
        (learn.collect_step, "run_collect"),
        (learn.train_step, "run_train"),
        (learn.tune_step, "run_tune"),
        (release, "gate_release"),
    )
    for module, name in steps:
        monkeypatch.setattr(
            module, name, lambda *arguments, **options: pytest.fail("computed again")
        )
    assert scheduled.collection(small) == traces
    assert scheduled.calibration(small) == learned
    # it is measured beside the next choice: another question
    assert champion_number(space, "cpu") == 1
    again = scheduled.release(small)
    assert (again["release"], again["passed"]) == (1, True)


def let_any_speed_pass(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """Thresholds in a folder, under which the speed of tiny random models decides nothing."""
    folder.mkdir(parents=True)
    (folder / "gates.yaml").write_text(json.dumps(gates.load_gates().model_dump() | ANY_SPEED))
    monkeypatch.setattr(gates, "HERE", folder)


def shown_in_prefect(key: str) -> list[Any]:
    """Artifacts with a key."""
    from prefect.client.orchestration import get_client
    from prefect.client.schemas.filters import ArtifactFilter, ArtifactFilterKey

    with get_client(sync_client=True) as client:
        return list(
            client.read_artifacts(artifact_filter=ArtifactFilter(key=ArtifactFilterKey(any_=[key])))
        )


def test_what_is_registered_is_linked_and_drawn(
    prefect_server: None, settings: PipelineSettings, space: Workspace
) -> None:
    table(fingerprint(space.files(), space.dtype)).save(space.artifacts / "acceptance_table")
    space.reports.mkdir(parents=True)
    (space.reports / "acceptance_by_confidence.png").write_bytes(b"\x89PNG\r\n")

    @flow
    def registering() -> dict[str, int]:
        return scheduled.register_task(settings, ["acceptance_table"])

    assert registering() == {"acceptance_table": 1}
    run = scheduled_store().resolve("acceptance_table", "tiny", 1).run_id
    links = [link.data for link in shown_in_prefect("mlflow-tiny-acceptance-table")]
    assert sum(f"http://127.0.0.1:5000/#/experiments/1/runs/{run}" in link for link in links) == 1
    drawn = [
        picture.data
        for picture in shown_in_prefect("acceptance-table-tiny-acceptance-by-confidence")
    ]
    assert "data:image/png;base64,iVBORw0K" in drawn


def scheduled_store() -> Any:
    from draftwell.registry.store import Store

    return Store()


@pytest.mark.parametrize(
    ("uri", "named", "address"),
    [
        ("sqlite:////x/mlflow.db", None, "http://127.0.0.1:5000"),
        ("https://user:secret@mlflow.example/", None, "https://mlflow.example"),
        ("http://user:secret@inside:5000", "https://mlflow.example/", "https://mlflow.example"),
    ],
)
def test_links_lead_to_mlflow_without_its_password(
    uri: str, named: str | None, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("DRAFTWELL_MLFLOW_UI", raising=False)
    if named:
        monkeypatch.setenv("DRAFTWELL_MLFLOW_UI", named)
    assert showing.ui_address(uri) == address


def test_a_refused_release_is_not_measured_until_it_passes_by_luck(
    place: Path, settings: PipelineSettings, space: Workspace
) -> None:
    """Week after week the same candidate; beside another champion it is a new question."""
    store, seen = scheduled_store(), []
    champion, candidate = (
        make_release(store, space.spec, space.files(), place / f"made{n}", accepted=n)
        for n in (2, 3)
    )

    def judged() -> Any:
        seen.append(scheduled.earlier_verdict(settings, space, candidate.version))
        return seen[-1] and seen[-1]["passed"]

    assert judged() is None
    record_gate(store, verdict(candidate, value=0.9))
    assert judged() is False
    assert seen[-1]["checks"][0]["name"] == "min_speedup_lower_bound"
    refused = verdict(candidate, value=0.9)
    unmeasured = GateCheck(
        name="champion measured", value=0, threshold=1, passed=False, transient=True
    )
    for checks, again in (
        ((unmeasured,), True),
        ((*verdict(candidate).checks, unmeasured), True),
        ((*refused.checks, unmeasured), False),
    ):
        record_gate(store, refused.model_copy(update={"checks": checks}))
        assert (judged() is None) is again, checks
    record_gate(store, refused)
    record_gate(store, verdict(champion))
    promote(store, "tiny", "cpu", champion.version)
    assert judged() is None
    record_gate(store, verdict(candidate, value=1.2, beside=champion.version))
    assert judged() is True


def test_what_was_rolled_back_is_neither_judged_nor_promoted(
    place: Path, settings: PipelineSettings, space: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The workspace still holds it, so each week publishes it again."""
    ask_without_prefect(monkeypatch)
    store, seen = scheduled_store(), []
    good, bad = (
        make_release(store, space.spec, space.files(), place / f"made{n}", accepted=n)
        for n in (2, 3)
    )
    for each, beside in ((good, None), (bad, good.version)):
        record_gate(store, verdict(each, beside=beside))
        promote(store, "tiny", "cpu", each.version)
    rollback(store, "tiny", "cpu", "answers are cut")
    for name in ("gate_task", "deploy_task"):
        monkeypatch.setattr(scheduled, name, lambda *arguments: seen.append(arguments))
    monkeypatch.setattr(scheduled, "publish_task", lambda settings: bad.version)
    shown = list[str]()
    monkeypatch.setattr(scheduled.prefect_artifacts, "links", lambda *arguments: None)
    monkeypatch.setattr(
        scheduled.prefect_artifacts, "table", lambda *arguments: shown.append(arguments[-1])
    )
    done = scheduled.release.fn(settings)
    assert (done["passed"], done["bundle"], seen) == (False, None, [])
    assert champion_number(space, "cpu") == good.version
    (line,) = shown
    assert "neither judged nor promoted, it was rolled back" in line
    assert "failed" not in line, "it passed its gate when it was judged"


def test_a_hands_change_of_the_champion_is_not_undone(
    place: Path, settings: PipelineSettings, space: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In MLflow's UI the champion before is named again; the workspace still holds the other, with
    a verdict beside just that one."""
    ask_without_prefect(monkeypatch)
    store, seen = scheduled_store(), []
    one, two = (
        make_release(store, space.spec, space.files(), place / f"made{n}", accepted=n)
        for n in (1, 2)
    )
    for each, beside in ((one, None), (two, one.version)):
        record_gate(store, verdict(each, beside=beside))
        promote(store, "tiny", "cpu", each.version)
    store.set_alias(one.published, "champion")
    for name in ("gate_task", "deploy_task"):
        monkeypatch.setattr(scheduled, name, lambda *arguments: seen.append(arguments))
    monkeypatch.setattr(scheduled, "publish_task", lambda settings: two.version)
    for name in ("table", "links"):
        monkeypatch.setattr(scheduled.prefect_artifacts, name, lambda *arguments: None)
    done = scheduled.release.fn(settings)
    assert (done["passed"], done["bundle"], seen) == (False, None, [])
    assert champion_number(space, "cpu") == one.version


def test_a_promotion_without_its_bundle_is_deployed_by_the_next_run(
    place: Path, settings: PipelineSettings, space: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk was full between the two: the release is champion, `current` leads to the one
    before."""
    ask_without_prefect(monkeypatch)
    store, out = scheduled_store(), Path("dist")
    one, two = (
        make_release(store, space.spec, space.files(), place / f"made{n}", accepted=n)
        for n in (1, 2)
    )
    record_gate(store, verdict(one))
    promote_and_deploy(space, "cpu", one.version, out)
    record_gate(store, verdict(two, beside=one.version))
    with monkeypatch.context() as patch:
        patch.setattr("draftwell.registry.bundles.build.build_bundle", full_disk)
        with pytest.raises(OSError, match="No space left"):
            promote_and_deploy(space, "cpu", two.version, out)
    assert (champion_number(space, "cpu"), (out / "tiny" / "current").resolve().name) == (
        two.version,
        "1-cpu",
    )
    monkeypatch.setattr(scheduled, "publish_task", lambda settings: two.version)
    monkeypatch.setattr(
        scheduled, "deploy_champion_task", lambda settings: deploy_champion(space, "cpu", out)
    )
    since = store.resolve("release", "tiny.cpu", two.version).tags["champion_since"]
    for _ in range(2):  # the second finds it there
        done = scheduled.release.fn(settings)
        assert (done["passed"], done["bundle"].name) == (True, "2-cpu")
        assert sorted(each.name for each in (out / "tiny").iterdir()) == [
            "1-cpu",
            "2-cpu",
            "current",
        ]
        assert (out / "tiny" / "current").resolve().name == "2-cpu"
    assert store.resolve("release", "tiny.cpu", two.version).tags["champion_since"] == since
    store.set_tag(two.published, "gate_record", "")
    assert deploy_champion(space, "cpu", out) is None, (
        "what a person named without a gate is left alone"
    )


def ask_without_prefect(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a flow's plain function ask the registry itself: tasks outside of a run want a server."""
    for name in ("champion_task", "earlier_verdict_task", "link_task"):
        monkeypatch.setattr(scheduled, name, getattr(scheduled, name).fn)


def full_disk(*arguments: Any, **options: Any) -> Path:
    raise FULL


def test_what_a_killed_run_left_is_not_published(
    settings: PipelineSettings, space: Workspace
) -> None:
    space.save(config(fingerprint(space.files(), space.dtype)))
    (space.artifacts / ".verifier.k1ll3d").mkdir(parents=True)
    (space.artifacts / ".verifier.k1ll3d" / "weights.safetensors").write_bytes(b"half")
    made = run_publish(StepContext(space, None), {})  # type: ignore[arg-type]  # no model is needed
    assert made.pins == {"decoding_config": 1}


def test_not_enough_evidence_is_called_that_in_the_release_flow(
    place: Path, settings: PipelineSettings, space: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    ask_without_prefect(monkeypatch)
    made = make_release(scheduled_store(), space.spec, space.files(), place / "made")
    monkeypatch.setattr(scheduled, "publish_task", lambda settings: made.version)
    shown = list[str]()
    monkeypatch.setattr(scheduled.prefect_artifacts, "links", lambda *arguments: None)
    monkeypatch.setattr(
        scheduled.prefect_artifacts, "table", lambda *arguments: shown.append(arguments[-1])
    )
    for enough, verdict_of, word in (
        (False, "not enough evidence", "had not enough evidence"),
        (True, "failed", "failed"),
    ):
        gated = {
            "passed": False,
            "checks": [{"name": "speedup", "passed": False, "enough": enough, "detail": "1.1"}],
        }
        monkeypatch.setattr(scheduled, "gate_task", lambda settings, number, found=gated: found)
        done = scheduled.release.fn(settings)
        assert (done["verdict"], done["passed"], done["bundle"]) == (verdict_of, False, None)
        assert shown.pop() == f"Release {made.version}: the gate {word}, the champion stays."
