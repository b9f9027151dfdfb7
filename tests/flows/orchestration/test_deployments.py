"""Schedules: what prefect.yaml deploys, turns, kept results, retries, and what a run shows; without
a worker."""

from __future__ import annotations

import errno
import inspect
import json
import os
import shutil
import stat
import subprocess
import time
import uuid
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_type_hints

import httpx
import pytest
import requests
import yaml
from prefect import Flow, Task, flow, task
from prefect.concurrency.asyncio import ConcurrencySlotAcquisitionError
from prefect.exceptions import ObjectNotFound
from pydantic import TypeAdapter
from sqlalchemy.exc import OperationalError

from draftwell.flows.context import StepContext
from draftwell.flows.failures import DiskFull, disk_full_as_error, is_full, worth_retrying
from draftwell.flows.orchestration import (
    deployments as schedules,
    loop_flow as loop,
    monitor_flow,
    result_cache,
    run_artifacts,
    task_options,
)
from draftwell.flows.orchestration.deployments import CRASH_SILENT_RUNS, HEARTBEAT, SILENCE, TAG
from draftwell.flows.orchestration.result_cache import CACHED, believed, standing, timed
from draftwell.flows.orchestration.task_options import ANEW, GPU_SLOT, pair_limit, turn_of
from draftwell.flows.settings import PipelineSettings, pair_anywhere
from draftwell.flows.steps.champion import champion_number
from draftwell.flows.steps.deploy import promote_and_deploy
from draftwell.flows.steps.gate_parts.record import earlier_verdict
from draftwell.flows.steps.publish import run_publish
from draftwell.flows.workspace import Workspace
from draftwell.registry import gates
from draftwell.registry.promotion import promote, rollback
from draftwell.registry.promotion_log import history
from draftwell.registry.releases import record_gate
from draftwell.registry.store import Store
from draftwell.serving.artifacts.pair_files import draftwell_home, fingerprint
from draftwell.serving.bundle.verdict import Check
from draftwell.serving.errors import DraftwellError
from draftwell.serving.recording.trace import TraceSet
from draftwell.serving.recording.trace_schema import TraceError
from tests.support.errors import raises_code
from tests.support.loop.publishing import config, release as make_release, table, verdict
from tests.support.loop.refusals import refused
from tests.support.loop.thresholds import ANY_SPEED
from tests.support.patching import replace_everywhere
from tests.support.paths import REPO

pytestmark = pytest.mark.slow

FILE = REPO / "prefect.yaml"
DEPLOYMENTS = yaml.safe_load(FILE.read_text())["deployments"]
CHOICE = {"strategy": "spide", "parameters": {}, "reason": "fast", "sampled": None}
KEPT_LEASES = "prefect.server.concurrency.lease_storage.filesystem"


@pytest.fixture
def place(own_stores: Path, empty_database: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder to work in, with stores of its own."""
    shutil.copyfile(empty_database, own_stores / "mlflow.db")
    (own_stores / "work").mkdir()
    monkeypatch.chdir(own_stores / "work")
    monkeypatch.setenv("DRAFTWELL_MODELS", str(own_stores / "models"))
    return own_stores


@pytest.fixture
def settings(place: Path, pair_file: Path, prompts_file: Path) -> PipelineSettings:
    return PipelineSettings(
        pair=str(pair_file),
        prompts=prompts_file,
        collect_prompts=6,
        max_tokens=8,
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
        for name in (pair_limit("tiny"), GPU_SLOT):
            try:
                client.delete_global_concurrency_limit_by_name(name)
            except ObjectNotFound:
                continue


# prefect.yaml


def test_the_loop_and_the_small_flows_beside_it_are_deployed() -> None:
    names = [
        (deployment["entrypoint"].partition(":")[2], deployment["name"].partition("-")[0])
        for deployment in DEPLOYMENTS
    ]
    assert names == [
        ("draftwell", "weekly"),
        ("draftwell", "drift"),
        ("draftwell", "vllm"),
        ("sync", "{{ $DRAFTWELL_PAIR }}"),
        ("monitor", "{{ $DRAFTWELL_PAIR }}"),
    ]


@pytest.mark.parametrize(
    "deployment", DEPLOYMENTS, ids=lambda each: each["name"] + each["entrypoint"]
)
def test_deployments_are_bound_to_their_pair(deployment: dict[str, Any]) -> None:
    assert deployment["name"].endswith("{{ $DRAFTWELL_PAIR }}-{{ $DRAFTWELL_DEVICE }}")
    assert deployment["parameters"]["settings"]["pair"] == "{{ $DRAFTWELL_SPEC }}"
    assert deployment["parameters"]["settings"]["device"] == "{{ $DRAFTWELL_DEVICE }}"
    assert {"pair:{{ $DRAFTWELL_PAIR }}", "device:{{ $DRAFTWELL_DEVICE }}"} <= set(
        deployment["tags"]
    )
    assert deployment["concurrency_limit"] == {"limit": 1, "collision_strategy": "CANCEL_NEW"}
    assert deployment["work_pool"] == {
        "name": "draftwell",
        "job_variables": {"env": {"PREFECT_FLOWS_HEARTBEAT_FREQUENCY": str(HEARTBEAT)}},
    }
    assert TAG in deployment["tags"], "the automation that ends runs without heartbeat goes by it"
    assert deployment["enforce_parameter_schema"] is True
    crons = [schedule["cron"] for schedule in deployment.get("schedules", ())]
    starts = "cron" if crons else "event" if deployment.get("triggers") else "by hand"
    kind = deployment["name"].partition("-")[0]
    assert starts == {"drift": "event", "vllm": "by hand"}.get(kind, "cron")


@pytest.mark.parametrize(
    "deployment", DEPLOYMENTS, ids=lambda each: each["name"] + each["entrypoint"]
)
def test_entrypoints_are_flows_with_validated_settings(deployment: dict[str, Any]) -> None:
    import importlib

    file, _, name = deployment["entrypoint"].partition(":")
    found = getattr(importlib.import_module(file.removesuffix(".py").replace("/", ".")), name)
    assert isinstance(found, Flow)
    assert found.should_validate_parameters
    assert found.result_serializer == "json"
    expected = get_type_hints(found.fn, include_extras=True)["settings"]
    TypeAdapter(expected).validate_python(
        {**deployment["parameters"]["settings"], "pair": "tiny", "device": "cpu"}
    )


def test_every_flow_and_task_has_a_time_limit() -> None:
    found = {
        name: value
        for module in (loop, monitor_flow)
        for name, value in vars(module).items()
        if isinstance(value, Flow | Task)
    }
    assert {"collect", "train", "tune", "gate"} <= set(found)
    assert {
        name: value.timeout_seconds for name, value in found.items() if not value.timeout_seconds
    } == {}
    brief = timed(PipelineSettings(step_hours=0.5), loop.tune)
    assert isinstance(brief, Task)
    assert (brief.timeout_seconds, brief.retries) == (1800, 3)


# both kinds of alarm are the process's one timer: pytest's would hold Prefect's back
@pytest.mark.timeout(120, method="thread")
def test_a_step_that_hangs_is_stopped_and_not_tried_again(prefect_server: None) -> None:
    tries = []

    @task(**ANEW)
    def hangs(settings: PipelineSettings) -> None:
        tries.append(1)
        time.sleep(300)

    @flow
    def whole(settings: PipelineSettings) -> None:
        timed(settings, hangs)(settings)

    with pytest.raises(TimeoutError):
        whole(PipelineSettings(step_hours=1 / 3600))
    assert tries == [1]


def test_the_automation_for_dead_runs_is_made_once(limits: Any) -> None:
    for _ in range(2):
        schedules.make_automation(limits)
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

    (deployment,) = [d for d in DEPLOYMENTS if d["name"].startswith("drift-")]
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


def test_a_pair_of_ones_own_is_named_by_its_absolute_path(
    pair_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker starts elsewhere."""
    monkeypatch.chdir(pair_file.parent)
    assert pair_anywhere("tiny.yaml") == str(pair_file)
    assert pair_anywhere("default") == "default"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("--device tpu", ("device",)),
        ("--pair smolm2-135m", ("unknown pair",)),
        ("--settings nowhere.yaml", ("nowhere.yaml", "checkout")),
    ],
)
def test_mistakes_are_told_before_anything_is_deployed(
    run: Any, place: Path, arguments: str, words: tuple[str, ...]
) -> None:
    refused(run(f"schedule --settings {FILE}", arguments), *words)


def test_no_server_is_told_with_the_mend_and_without_a_password(
    run: Any, place: Path, pair_file: Path
) -> None:
    from prefect.settings import PREFECT_API_URL, temporary_settings

    with temporary_settings({PREFECT_API_URL: "http://user:secret@127.0.0.1:9/api"}):
        done = run(f"schedule --pair {pair_file} --settings {FILE}")
    said = ("no Prefect server answers at http://127.0.0.1:9/api", "make prefect-server")
    refused(done, *said, "PREFECT_API_URL")
    assert "secret" not in done.output


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
            json="3.0.0",
            request=request,
        )

    monkeypatch.setattr(httpx.Client, "send", answer)
    with temporary_settings({PREFECT_API_URL: "http://user:secret@127.0.0.1:9/api"}):
        done = run(f"schedule --pair {pair_file} --settings {FILE}")
    refused(done, "//127.0.0.1:9", "PREFECT_API_AUTH_STRING")
    assert "secret" not in done.output


def test_an_answer_to_drift_collects_as_many_prompts_as_are_compared() -> None:
    from draftwell.flows.orchestration.monitor_flow import answer_settings
    from draftwell.flows.steps.monitor import DriftSettings

    asked = [DriftSettings(), DriftSettings(collect_prompts=9)]
    given = [answer_settings(one, Path("spool"), "d" * 64) for one in asked]
    assert [PipelineSettings(**one).collect_prompts for one in given] == [24, 9]
    assert PipelineSettings().collect_prompts == 16, "of other runs"


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
    from draftwell.flows.cli import gate_run as commands

    path = tmp_path / "gate.md"
    with pytest.raises(DiskFull, match="free some space"), commands.errors_are_reported([path]):
        raise FULL
    assert "free some space" in path.read_text()


# Turns


def test_without_limits_no_slot_is_held(limits: Any) -> None:
    with (
        pytest.raises(ConcurrencySlotAcquisitionError, match=r"pair-tiny.* must be created"),
        turn_of("tiny"),
    ):
        pass


def test_a_single_missing_limit_is_noticed(limits: Any) -> None:
    """Asked for both limits in one call, Prefect is content with either."""
    from prefect.concurrency.sync import concurrency

    schedules.make_limits(limits, "tiny")
    limits.delete_global_concurrency_limit_by_name(GPU_SLOT)
    with concurrency([pair_limit("tiny"), GPU_SLOT], strict=True):
        pass  # the naive way
    with (
        pytest.raises(ConcurrencySlotAcquisitionError, match=GPU_SLOT),
        turn_of("tiny"),
    ):
        pass


def test_a_slot_keeps_others_waiting(limits: Any) -> None:
    from prefect.concurrency.sync import concurrency

    assert schedules.make_limits(limits, "tiny") == {"pair-tiny": 1, "gpu-slot": 1}
    with turn_of("tiny"):
        for name in ("pair-tiny", "gpu-slot"):
            with pytest.raises(TimeoutError), concurrency(name, strict=True, timeout_seconds=0.5):
                pass
    with (
        concurrency("pair-tiny", strict=True, timeout_seconds=60),
        concurrency("gpu-slot", strict=True, timeout_seconds=60),
    ):
        pass


@pytest.mark.slow
def test_a_slot_that_never_gets_free_ends_the_run(
    limits: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from prefect.concurrency.sync import concurrency

    schedules.make_limits(limits, "tiny")
    with monkeypatch.context() as patch, concurrency("gpu-slot", strict=True):
        patch.setattr(task_options, "PATIENCE", 5.0)
        with (
            pytest.raises(TimeoutError, match="timed out after 5"),
            turn_of("tiny"),
        ):
            pass
    with turn_of("tiny"):
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
    assert f'{name}="${{{name}:-{KEPT_LEASES}}}"' in made.stdout
    server = yaml.safe_load((REPO / "deploy" / "compose.yaml").read_text())["services"]["prefect"]
    assert server["environment"][name] == KEPT_LEASES
    assert f"prefect:{server['environment']['PREFECT_HOME']}" in server["volumes"]


def test_limits_that_somebody_changed_stay(limits: Any) -> None:
    from prefect.client.schemas.actions import GlobalConcurrencyLimitUpdate

    schedules.make_limits(limits, "tiny")
    limits.update_global_concurrency_limit(GPU_SLOT, GlobalConcurrencyLimitUpdate(limit=3))
    assert schedules.make_limits(limits, "tiny") == {"pair-tiny": 1, "gpu-slot": 3}


def test_a_flow_run_by_hand_waits_for_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        task_options,
        "concurrency",
        lambda name, **options: pytest.fail(f"it waits for {name}"),
    )
    with turn_of("tiny"):
        pass


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


@pytest.mark.parametrize("module", [loop, monitor_flow], ids=lambda module: str(module.__name__))
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
    of_pair, runs = fingerprint(space.files(), space.dtype), list[str]()
    traces = {"digest": "7"}
    monkeypatch.setattr(
        result_cache, "TraceSet", lambda folder: SimpleNamespace(digest=lambda: traces["digest"])
    )

    @task(name=f"step-{uuid.uuid4().hex}", **CACHED)
    def step(settings: PipelineSettings) -> dict[str, Any]:
        runs.append("run")
        space.save(table(of_pair, accepted=len(runs) % 5))
        return {"made": standing(space, ["acceptance_table"]), "run": len(runs)}

    def again(digest: str = "7", **given: Any) -> int:
        traces["digest"] = digest
        return int(believed(settings.model_copy(update=given), step)["run"])

    @flow
    def all_in_one() -> None:  # a flow run for each call would take a second each
        assert (again(), again()) == (1, 1)
        assert again("8") == 2  # other traces
        # the first result is kept, but what stands now was made of other traces
        assert again() == 3
        assert again() == 3
        shutil.rmtree(space.artifacts / "acceptance_table")
        assert again() == 4  # emptied by hand
        assert again(trials=7) == 5
        # changes no result
        assert again(trials=7, workers=2, runner="ray", drift="f" * 64) == 5
        monkeypatch.setattr(result_cache, "code_digest", lambda: "other sources")
        assert again(trials=7) == 6
        assert again(trials=7, device="cuda") == 7  # another machine class, in the tests' words
        assert again(trials=7, device="cuda") == 7

    monkeypatch.setattr(result_cache, "device_class", lambda device: f"{device}-of-a-test")
    all_in_one()
    kept = list((draftwell_home() / "results").iterdir())
    assert kept
    assert all("/" not in path.name for path in kept)
    assert all(json.loads(path.read_text()) for path in kept), "no pickle"


def test_what_each_task_reads_is_in_its_key(
    settings: PipelineSettings, space: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    champion: dict[str, Any] = {"number": None, "head": False}
    monkeypatch.setattr(result_cache, "TraceSet", lambda folder: SimpleNamespace(digest=str))
    monkeypatch.setattr(result_cache, "champion_number", lambda space, device: champion["number"])
    replace_everywhere(monkeypatch, result_cache, "serves_head", lambda space: champion["head"])

    def keys() -> dict[str, str]:
        return {
            name: result_cache.result_key(
                SimpleNamespace(task=SimpleNamespace(name=name)),  # type: ignore[arg-type]
                {"settings": settings},
            )
            for name in ("train", "calibrate", "tune")
        }

    def changed() -> set[str]:
        nonlocal before
        after = keys()
        found = {name for name in after if after[name] != before[name]}
        before = after
        return found

    before = keys()
    assert changed() == set()
    champion["number"] = 2
    assert changed() == {"tune"}
    champion["head"] = True
    assert changed() == {"train"}
    space.save(table(fingerprint(space.files(), space.dtype)))
    assert changed() == {"tune"}
    assert all(str(space.root) not in key and "tiny" not in key for key in before.values())


def test_what_is_broken_does_not_stand(space: Workspace) -> None:
    table("f" * 64).save(space.artifacts / "acceptance_table")
    (space.artifacts / "verifier").mkdir()
    (space.artifacts / "verifier" / "artifact.json").write_text("half")
    assert set(standing(space, ["acceptance_table", "verifier"])) == {"acceptance_table"}


# A flow


@pytest.mark.slow
def test_collection(
    prefect_server: None,
    settings: PipelineSettings,
    space: Workspace,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A full disk, then room, then nothing to do, then a broken shard: no shard by half, one
    attempt each, and what stands is not collected again."""
    from draftwell.serving import files

    tried: list[str] = []
    written: list[int] = []
    real = loop.collect_step.run_collect

    def counted(*arguments: Any, **options: Any) -> TraceSet:
        tried.append("collect")
        return real(*arguments, **options)

    def full(handle: int) -> None:
        if stat.S_ISREG(os.fstat(handle).st_mode):  # folders are synced, too
            written.append(handle)
        if len(written) > 1:  # the plan is the first
            raise FULL

    @flow
    def collection() -> dict[str, Any]:
        with turn_of("tiny"):
            return dict(loop.collect(settings))

    monkeypatch.setattr(loop.collect_step, "run_collect", counted)
    with monkeypatch.context() as patch:
        patch.setattr(files.os, "fsync", full)
        with pytest.raises(DiskFull, match="free some space"):
            collection()
    assert (len(tried), list(space.traces.glob("*shard*"))) == (1, [])
    done = collection()
    sampled = TraceSet(space.traces_at(1.0))
    assert done["traces"] == {
        "traces": TraceSet(space.traces).digest(),
        "traces_sampled": sampled.digest(),
    }
    assert (
        sampled.header.temperature,
        len(set(sampled.read(["prompt_id"]).column(0).to_pylist())),
    ) == (1.0, 3)
    shown = json.loads(shown_in_prefect("collection-tiny")[0].data)
    assert {row["traces"]: row["digest"] for row in shown} == done["traces"]
    assert min(row["positions"] for row in shown) > 6
    stood = [path.stat().st_mtime_ns for path in TraceSet(space.traces).shards]
    assert collection() == done
    assert [path.stat().st_mtime_ns for path in TraceSet(space.traces).shards] == stood
    (shard,) = TraceSet(space.traces).shards
    shard.write_bytes(shard.read_bytes()[:100])
    tried.clear()
    with raises_code("unreadable_trace", shard.name):
        collection()
    assert len(tried) <= 2, "a mistake is not tried again"
    shard.unlink()
    assert collection() == done


@pytest.mark.slow
def test_two_weeks(
    prefect_server: None,
    settings: PipelineSettings,
    space: Workspace,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """From prompts to a verdict; a week later, with nothing changed, nothing is learnt again and
    nothing is judged again."""
    small = settings.model_copy(
        update={
            "source": "traffic",
            "collect_prompts": 8,
            "max_tokens": 16,
            "calibrate_prompts": 2,
            "tune_prompts": 2,
            "trials": 3,
        }
    )
    let_any_speed_pass(monkeypatch, space.root / "registry")
    week = loop.draftwell(small)
    assert (week["state"], week["release"], week["champion"]) == ("deployed", 1, None)
    assert (Path("dist") / "tiny" / "current").resolve() == Path(week["bundle"]).resolve()
    assert {
        row["config"].endswith("chosen")
        for row in json.loads(shown_in_prefect("tuning-tiny")[0].data)
    } >= {True}
    assert {row["name"] for row in json.loads(shown_in_prefect("gate-tiny")[0].data)} >= {"speedup"}
    assert len(json.loads(shown_in_prefect("collection-tiny")[0].data)) == 2
    assert shown_in_prefect("mlflow-tiny-release")
    drawn = shown_in_prefect("acceptance-table-tiny-acceptance-by-confidence")
    assert "data:image/png;base64,iVBORw0K" in drawn[0].data
    run = Store().resolve("release", "tiny.cpu", 1).run_id
    assert f"/#/experiments/1/runs/{run}" in shown_in_prefect("mlflow-tiny-release")[0].data
    for module, name in (
        (loop.train_step, "run_train"),
        (loop.train_step, "calibrate_as"),
        (loop.gate_step, "gate_release"),
    ):
        monkeypatch.setattr(
            module, name, lambda *arguments, **options: pytest.fail("computed again")
        )
    # it is measured beside the champion now: another question
    tuned = list[str]()
    monkeypatch.setattr(
        loop.tune_step, "tune_as", lambda *arguments: tuned.append("again") or choice_of(week)
    )
    again = loop.draftwell(small)
    assert (tuned, again["state"], again["release"], again["checks"]) == (
        ["again"],
        "deployed",
        1,
        [],
    )
    assert loop.draftwell(small)["release"] == 1
    assert tuned == ["again"], "the third week chooses beside the same champion"


def choice_of(outcome: dict[str, Any]) -> dict[str, Any]:
    return {name: outcome[name] for name in ("strategy", "parameters", "reason", "sampled")}


def let_any_speed_pass(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """Thresholds in a folder, under which the speed of tiny random models decides nothing."""
    folder.mkdir(parents=True)
    (folder / "gates.yaml").write_text(json.dumps(gates.load_gates().model_dump() | ANY_SPEED))
    monkeypatch.setattr(gates, "HERE", folder)


def shown_in_prefect(key: str) -> list[Any]:
    """Artifacts with a key, the newest first: other modules' runs may have made some, too."""
    from prefect.client.orchestration import get_client
    from prefect.client.schemas.filters import ArtifactFilter, ArtifactFilterKey
    from prefect.client.schemas.sorting import ArtifactSort

    with get_client(sync_client=True) as client:
        return list(
            client.read_artifacts(
                artifact_filter=ArtifactFilter(key=ArtifactFilterKey(any_=[key])),
                sort=ArtifactSort.CREATED_DESC,
            )
        )


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
    assert run_artifacts.ui_address(uri) == address


def test_a_refused_release_is_not_measured_until_it_passes_by_luck(
    place: Path, settings: PipelineSettings, space: Workspace
) -> None:
    """Week after week the same candidate; beside another champion it is a new question."""
    store, seen = Store(), []
    champion, candidate = (
        make_release(store, space.spec, space.files(), place / f"made{n}", accepted=n)
        for n in (2, 3)
    )

    def judged() -> Any:
        seen.append(earlier_verdict(space, "cpu", candidate.version, champion_number(space, "cpu")))
        return seen[-1] and seen[-1]["passed"]

    assert judged() is None
    record_gate(store, verdict(candidate, value=0.9))
    assert judged() is False
    assert seen[-1]["checks"][0]["name"] == "min_speedup_lower_bound"
    refused = verdict(candidate, value=0.9)
    unmeasured = Check(name="champion measured", value=0, threshold=1, passed=False, transient=True)
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


def release_without_prefect(
    monkeypatch: pytest.MonkeyPatch, number: int, gated: dict[str, Any] | None = None
) -> list[str]:
    """Let the flow's plain functions publish a release, ask the registry themselves, and never
    measure; returns the words of the gate's table."""
    words = list[str]()
    monkeypatch.setattr(loop, "timed", lambda settings, step: step)
    monkeypatch.setattr(loop, "publish", lambda settings: number)
    monkeypatch.setattr(
        loop, "gate", loop.gate.fn if gated is None else lambda *given, **more: gated
    )
    monkeypatch.setattr(loop, "deploy", lambda *given, **more: pytest.fail("deployed"))
    monkeypatch.setattr(
        loop.gate_step, "gate_release", lambda *given, **more: pytest.fail("measured")
    )
    monkeypatch.setattr(loop.shown, "table", lambda *given: words.append(given[-1]))
    return words


def test_what_was_rolled_back_is_neither_judged_nor_promoted(
    place: Path, settings: PipelineSettings, space: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The workspace still holds it, so each week publishes it again."""
    store = Store()
    good, bad = (
        make_release(store, space.spec, space.files(), place / f"made{n}", accepted=n)
        for n in (2, 3)
    )
    for each, beside in ((good, None), (bad, good.version)):
        record_gate(store, verdict(each, beside=beside))
        promote(store, "tiny", "cpu", each.version)
    rollback(store, "tiny", "cpu", "answers are cut")
    words = release_without_prefect(monkeypatch, bad.version)
    done = loop.release_choice(settings.model_copy(update={"source": "traffic"}), CHOICE)
    assert (done["passed"], done["bundle"], done["state"]) == (False, None, "refused")
    assert champion_number(space, "cpu") == good.version
    (line,) = words
    assert "neither judged nor promoted, it was rolled back" in line
    assert "failed" not in line, "it passed its gate when it was judged"


def test_a_hands_change_of_the_champion_is_not_undone(
    place: Path, settings: PipelineSettings, space: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In MLflow's UI the champion before is named again; the workspace still holds the other, with
    a verdict beside just that one."""
    store = Store()
    one, two = (
        make_release(store, space.spec, space.files(), place / f"made{n}", accepted=n)
        for n in (1, 2)
    )
    for each, beside in ((one, None), (two, one.version)):
        record_gate(store, verdict(each, beside=beside))
        promote(store, "tiny", "cpu", each.version)
    store.set_alias(one.published, "champion")
    release_without_prefect(monkeypatch, two.version)
    done = loop.release_choice(settings.model_copy(update={"source": "traffic"}), CHOICE)
    assert (done["passed"], done["bundle"]) == (False, None)
    assert champion_number(space, "cpu") == one.version


def test_a_promotion_without_its_bundle_is_deployed_by_the_next_run(
    place: Path, settings: PipelineSettings, space: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk was full between the two: the release is champion, `current` leads to the one
    before."""
    store, out = Store(), Path("dist")
    one, two = (
        make_release(store, space.spec, space.files(), place / f"made{n}", accepted=n)
        for n in (1, 2)
    )
    record_gate(store, verdict(one))
    promote_and_deploy(space, "cpu", one.version, out)
    record_gate(store, verdict(two, beside=one.version))
    with monkeypatch.context() as patch:
        replace_everywhere(patch, "draftwell.registry.bundles.build.build_bundle", full_disk)
        with pytest.raises(OSError, match="No space left"):
            promote_and_deploy(space, "cpu", two.version, out)
    assert (champion_number(space, "cpu"), (out / "tiny" / "current").resolve().name) == (
        two.version,
        "1-cpu",
    )
    changes = history(store, "tiny", "cpu")
    for _ in range(2):  # the second finds it there
        assert Path(loop.deploy.fn(settings, two.version)["bundle"]).name == "2-cpu"
        assert sorted(each.name for each in (out / "tiny").iterdir()) == [
            "1-cpu",
            "2-cpu",
            "current",
        ]
        assert (out / "tiny" / "current").resolve().name == "2-cpu"
    assert history(store, "tiny", "cpu") == changes, "deployed is not promoted again"
    store.set_tag(two.published, "gate_record", "")
    assert loop.deploy.fn(settings, two.version) == {"bundle": None}, (
        "what a person named without a gate is left alone"
    )


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


def test_not_enough_evidence_is_called_that_in_the_outcome(
    place: Path, settings: PipelineSettings, space: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = make_release(Store(), space.spec, space.files(), place / "made")
    for enough, state, verdict_of, word in (
        (False, "undecided", "not enough evidence", "had not enough evidence"),
        (True, "refused", "failed", "failed"),
    ):
        gated = {
            "passed": False,
            "checks": [vars(Check("speedup", 1.1, 1.0, False, "1.1", enough=enough))],
            "champion": 7,
        }
        words = release_without_prefect(monkeypatch, made.version, gated)
        done = loop.release_choice(settings, CHOICE)
        assert (done["state"], done["verdict"], done["bundle"]) == (state, verdict_of, None)
        assert words == [f"release {made.version}: the gate {word}, release 7, the champion, stays"]


def test_a_greedy_choice_is_not_measured_again_where_the_sampled_one_gives_way(
    settings: PipelineSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []

    def gated(name: str, report: Any, *, passed: bool = False) -> dict[str, Any]:
        check = vars(Check(name, 1.1, 1.0, passed, "1.1", enough=passed))
        return {"report": report, "passed": passed, "checks": [check], "champion": None}

    later = [gated("speedup", "the first report"), gated("speedup", "two prompts", passed=True)]

    def gate(*of: Any, greedy: Any, **given: Any) -> dict[str, Any]:
        asked.append(greedy)
        return later.pop(0)

    monkeypatch.setattr(loop, "timed", lambda settings, step: step)
    monkeypatch.setattr(loop, "publish", lambda settings: 2)
    monkeypatch.setattr(loop, "gate", gate)
    monkeypatch.setattr(loop, "open_from_settings", lambda settings: None)
    plain = {"strategy": "autoregressive", "parameters": {}, "reason": "not enough evidence"}
    monkeypatch.setattr(loop.tune_step, "choose_plain", lambda *of, **given: plain)
    first = gated("sampled speedup", "the first report")
    choice, _, found = loop.give_way_to_plain(settings, CHOICE, 1, first)
    assert asked == ["the first report", None]
    assert (found["report"], found["passed"]) == ("the first report", True)
    assert (choice["strategy"], choice["refused"]["strategy"]) == ("autoregressive", "spide")
    assert choice["refused"]["verdict"] == "not enough evidence"


def test_another_engines_check_is_part_of_the_flow(
    pair_file: Path, prefect_server: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[Any, ...]] = []

    def instead(*of: Any) -> dict[str, Any]:
        asked.append(of)
        return {
            "state": "deployed",
            "why": "a bundle is deployed",
            "bundle": "dist/vllm/tiny/2-cpu",
            "report": {"long": 1},
        }

    monkeypatch.setattr(loop, "space_of", lambda settings: "the space")
    monkeypatch.setattr(loop, "recalibrate", instead)
    given = {"engine": "vllm", "source": "drift", "pair": str(pair_file), "device": "cpu"}
    found = loop.draftwell(given)
    assert found == {
        "state": "deployed",
        "why": "a bundle is deployed",
        "bundle": "dist/vllm/tiny/2-cpu",
    }
    (space, settings, *_, steps), *_ = asked
    assert (space, settings, steps) == ("the space", PipelineSettings(**given), loop.run_steps)
    assert "a bundle is deployed" in str(shown_in_prefect("engine-tiny")[0].data)
