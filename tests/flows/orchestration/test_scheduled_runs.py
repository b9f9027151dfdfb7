"""A real Prefect server and worker: a cron deployment fires by itself and ends in a release; drift
ends in a switched bundle; a killed run loses nothing.

With SQLAlchemy 2.1 cron schedules of Prefect 3.8 never fire, and nothing says so: this is the test
that would.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from uuid import UUID, uuid4

import pytest
import yaml
from prefect.client.schemas.actions import GlobalConcurrencyLimitCreate
from prefect.exceptions import PrefectHTTPStatusError

from draftwell.components.engines.process_group import free_port
from draftwell.flows.orchestration.deployments import CRASH_SILENT_RUNS, SILENCE
from draftwell.flows.orchestration.task_options import LEASE
from draftwell.flows.settings import PipelineSettings
from draftwell.registry.store import Store
from draftwell.serving.recording.trace import TraceSet
from tests.support.loop import secrets, traffic
from tests.support.loop.tiny_files import PROMPTS
from tests.support.paths import REPO

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not Path("/proc/self").is_dir(), reason="looks processes up in /proc"),
]

KEPT_LEASES = "prefect.server.concurrency.lease_storage.filesystem"
PATIENCE = 600.0
"""Seconds that anything may take on a busy machine."""
# the cloud's, instead of the next
SECRETS = {
    **{name: value for name, value in secrets.SECRETS.items() if name != "PREFECT_API_KEY"},
    "PREFECT_API_AUTH_STRING": "keeper:password-of-the-server",
}
"""What server and worker have in their environment; the last is asked for with every request."""
MANY = 160
"""Prompts of the run that is killed: five shards, of which the last comes long after the first."""
FEW = 24
"""Prompts of the others, as many as a comparison with traffic needs."""
ENOUGH = 72
"""Prompts of which the gate gets fourteen: its interval of a verifier is narrow then."""


def wait_for(what: str, found: Callable[[], Any], log: Path | None = None) -> Any:
    """The first result that is not empty."""
    end = time.monotonic() + PATIENCE
    while time.monotonic() < end:
        if result := found():
            return result
        time.sleep(0.1)
    raise AssertionError(
        f"{what}: not within {PATIENCE:.0f} s" + (f"\n{log.read_text()[-3000:]}" if log else "")
    )


def parents() -> dict[int, int]:
    """Process → its parent, of all that run now."""
    found = {}
    for status in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            found[int(status.parent.name)] = int(status.read_text().rpartition(")")[2].split()[1])
    return found


def descendants(pid: int) -> list[int]:
    """A process and all that it has started, directly or not."""
    tree, found = parents(), [pid]
    for process in found:
        found += [child for child, parent in tree.items() if parent == process]
    return found


def command_of(pid: int) -> str:
    with contextlib.suppress(OSError):
        return (
            Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        )
    return ""


@contextlib.contextmanager
def running(
    log: Path, environment: dict[str, str], *command: str
) -> Iterator[subprocess.Popen[bytes]]:
    """A process that ends with the block, and every process that it has started."""
    with log.open("wb") as file:
        process = subprocess.Popen(
            [sys.executable, "-m", *command],
            cwd=REPO,
            env=environment,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        yield process
    finally:
        family = descendants(process.pid)
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(15)
        for pid in family:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.wait(15)


class Place:
    """A server and a worker with state of their own, and what the tests ask of them."""

    def __init__(self, folder: Path, pair: Path):
        self.folder, self.pair, self.home = folder, pair, folder / "draftwell"
        self.url = f"http://127.0.0.1:{free_port()}"
        self.prompts = folder / "prompts.jsonl"
        self.prompts.write_text(
            "".join(
                json.dumps({"prompt": f"{PROMPTS[i % len(PROMPTS)]} {i}"}) + "\n"
                for i in range(MANY + 12)
            )
        )
        self.traces = self.home / "pairs" / "tiny" / "float32" / "traces"
        self.environment = {
            **os.environ,
            **SECRETS,
            "PREFECT_SERVER_API_AUTH_STRING": SECRETS["PREFECT_API_AUTH_STRING"],
            "PYTHONPATH": str(REPO),
            "OMP_NUM_THREADS": "1",
            "DO_NOT_TRACK": "1",
            "DRAFTWELL_HOME": str(self.home),
            "DRAFTWELL_MODELS": str(folder / "models"),
            "MLFLOW_TRACKING_URI": f"sqlite:///{folder / 'mlflow.db'}",
            "PREFECT_HOME": str(folder / "prefect"),
            "PREFECT_API_URL": f"{self.url}/api",
            "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
            "PREFECT_WORKER_QUERY_SECONDS": "2",
            # as under `make prefect-server`
            "PREFECT_SERVER_CONCURRENCY_LEASE_STORAGE": KEPT_LEASES,
            # commands that other tests have called in this process want less
            "PREFECT_LOGGING_LEVEL": "INFO",
        }
        self.server_log, self.worker_log = folder / "server.log", folder / "worker.log"
        self.worker: subprocess.Popen[bytes] | None = None

    def settings(self, prompts: int) -> PipelineSettings:
        """Small enough for a minute; so few prompts of the tuning choose plain decoding, whose gate
        no clock decides."""
        return PipelineSettings(
            pair=str(self.pair),
            prompts=self.prompts,
            source="traffic",
            out=self.folder / "dist",
            collect_prompts=prompts,
            max_tokens=traffic.TOKENS,
            calibrate_prompts=2,
            tune_prompts=2,
            trials=3,
            bench_prompts=8,
            sampled_prompts=4,
            threads=1,
        )

    def parameters(self, prompts: int, **more: Any) -> dict[str, Any]:
        settings = self.settings(prompts).model_copy(update=more)
        return {
            "settings": {
                "engine": "draftwell",
                **settings.model_dump(mode="json", exclude_unset=True),
            }
        }

    def deployments_file(self) -> Path:
        """prefect.yaml with the weekly run every minute, everything else on New Year, and settings
        that are small."""
        contents = yaml.safe_load((REPO / "prefect.yaml").read_text())
        mine = self.parameters(FEW)["settings"]
        for deployment in contents["deployments"]:
            weekly = deployment["name"].startswith("weekly-")
            if deployment.get("schedules"):
                deployment["schedules"] = [
                    {"cron": "* * * * *" if weekly else "0 0 1 1 *", "timezone": "UTC"}
                ]
            settings = deployment["parameters"]["settings"]
            if settings["engine"] == "draftwell":
                deployment["parameters"]["settings"] = {**mine, **settings}
        file = self.folder / "prefect.yaml"
        file.write_text(yaml.safe_dump(contents))
        return file

    def schedule(self) -> str:
        """`draftwell schedule`; returns what it printed."""
        command = [
            sys.executable,
            "-m",
            "draftwell.flows.cli.main",
            "schedule",
            "--pair",
            str(self.pair),
            "--settings",
            str(self.deployments_file()),
        ]
        done = subprocess.run(
            command,
            cwd=REPO,
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=PATIENCE,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def answers(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/api/health", timeout=5) as answer:
                return bool(answer.status == 200)
        except OSError:
            return False

    @contextlib.contextmanager
    def client(self) -> Iterator[Any]:
        from prefect.client.orchestration import get_client
        from prefect.settings import PREFECT_API_AUTH_STRING, PREFECT_API_URL, temporary_settings

        ours = {
            PREFECT_API_URL: f"{self.url}/api",
            PREFECT_API_AUTH_STRING: SECRETS["PREFECT_API_AUTH_STRING"],
        }
        with temporary_settings(ours), get_client(sync_client=True) as client:
            yield client

    def aliases(self) -> dict[str, int]:
        """Of the pair's releases, in MLflow as the worker sees it."""
        with pytest.MonkeyPatch.context() as patch:
            for name in ("DRAFTWELL_HOME", "MLFLOW_TRACKING_URI"):
                patch.setenv(name, self.environment[name])
            return Store().get_aliases("release", "tiny.cpu")

    def current(self) -> str:
        """Name of the bundle that is served."""
        return (self.folder / "dist" / "tiny" / "current").resolve().name

    def runs(self, deployment: UUID) -> list[Any]:
        """Flow runs of a deployment, by the time they are due."""
        from prefect.client.schemas.filters import DeploymentFilter, DeploymentFilterId

        with self.client() as client:
            found = client.read_flow_runs(
                deployment_filter=DeploymentFilter(id=DeploymentFilterId(any_=[deployment]))
            )
        return sorted(found, key=lambda run: run.expected_start_time)

    def ended(self, run: UUID) -> Any:
        """A flow run once it is over."""
        with self.client() as client:
            return wait_for(
                f"the end of run {run}", lambda: over(client.read_flow_run(run)), self.worker_log
            )

    def engine(self) -> int | None:
        """The process that runs a flow."""
        assert self.worker is not None
        return next(
            (
                pid
                for pid in descendants(self.worker.pid)
                if "prefect.engine" in command_of(pid) or "_workspace_supervisor" in command_of(pid)
            ),
            None,
        )


def over(run: Any) -> Any:
    return run if run.state is not None and run.state.is_final() else None


def ran(run: Any) -> Any:
    """A run that is over and was not turned away because the one before it was under way."""
    return over(run) and not run.state.is_cancelled()


def wait_for_quiet(place: Place, deployment: Any) -> None:
    """Until no run of a deployment is under way."""
    wait_for(
        "quiet",
        lambda: (
            not any(
                run.state.is_running() or run.state.is_pending()
                for run in place.runs(deployment.id)
            )
        ),
    )


def begun(shards: TraceSet, old: os.stat_result) -> bool:
    """Whether a collection has written its first shard in the place of an older one."""
    try:
        return shards.shard(0).stat().st_ino != old.st_ino
    except FileNotFoundError:
        return False


def serving(place: Place) -> contextlib.AbstractContextManager[subprocess.Popen[bytes]]:
    """The server of a place, while the block runs."""
    port = place.url.rpartition(":")[2]
    return running(
        place.server_log,
        place.environment,
        "prefect",
        "server",
        "start",
        "--host",
        "127.0.0.1",
        "--port",
        port,
    )


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory, pair_file: Path) -> Iterator[Place]:
    """Server, deployments and worker."""
    made = Place(tmp_path_factory.mktemp("scheduled"), pair_file)
    with contextlib.ExitStack() as stack:
        stack.enter_context(serving(made))
        wait_for("the server", made.answers, made.server_log)
        made.said = made.schedule()  # type: ignore[attr-defined]
        made.worker = stack.enter_context(
            running(
                made.worker_log,
                made.environment,
                "prefect",
                "worker",
                "start",
                "--pool",
                "draftwell",
                "--type",
                "process",
            )
        )
        yield made


@pytest.fixture(scope="module")
def deployment(place: Place) -> Any:
    """The weekly run of the tiny pair."""
    with place.client() as client:
        return client.read_deployment_by_name("draftwell/weekly-tiny-cpu")


@pytest.fixture(scope="module")
def first(place: Place, deployment: Any) -> Any:
    """The first run that the cron schedule created, once it is over; the schedule rests then."""
    run = wait_for(
        "a run", lambda: next(filter(ran, place.runs(deployment.id)), None), place.worker_log
    )
    with place.client() as client:
        client.pause_deployment(deployment.id)
    return run


def test_a_cron_deployment_fires_by_itself_and_ends_in_a_release(
    place: Place, deployment: Any, first: Any
) -> None:
    assert [schedule.schedule.cron for schedule in deployment.schedules] == ["* * * * *"]
    assert first.auto_scheduled is True
    assert first.created_by.type == "SCHEDULE"
    assert first.state.is_completed(), place.worker_log.read_text()[-3000:]
    assert first.expected_start_time.second == 0
    assert first.parameters["settings"]["collect_prompts"] == FEW
    rows = TraceSet(place.traces).read(["prompt_id"]).to_pylist()
    assert len({row["prompt_id"] for row in rows}) == FEW
    aliases = place.aliases()
    assert aliases["candidate"] == aliases["champion"]
    assert place.current() == f"{aliases['champion']}-cpu"


def test_the_run_is_visible_in_prefect(place: Place, first: Any) -> None:
    from prefect.client.schemas.filters import (
        ArtifactFilter,
        ArtifactFilterKey,
        FlowRunFilter,
        FlowRunFilterId,
    )

    with place.client() as client:
        tasks = client.read_task_runs(
            flow_run_filter=FlowRunFilter(id=FlowRunFilterId(any_=[first.id]))
        )
        shown = client.read_artifacts(
            artifact_filter=ArtifactFilter(key=ArtifactFilterKey(any_=["collection-tiny"]))
        )
    assert {task.name.rpartition("-")[0] for task in tasks} == {
        *("collect", "train", "calibrate", "tune", "publish", "gate", "deploy")
    }
    assert json.loads(shown[-1].data)[0]["digest"]


def test_the_command_says_what_it_made(place: Place) -> None:
    said = place.said  # type: ignore[attr-defined]
    for words in (
        "draftwell/weekly-tiny-cpu",
        "draftwell/drift-tiny-cpu",
        "draftwell/vllm-tiny-cpu",
        "sync/tiny-cpu",
        "monitor/tiny-cpu",
        "work pool draftwell",
        "pair-tiny = 1, gpu-slot = 1",
        f"UI: {place.url}",
    ):
        assert words in said


def test_scheduling_again_changes_nothing(place: Place, first: Any) -> None:
    def state() -> Any:
        with place.client() as client:
            deployments = {d.name + d.entrypoint: d.id for d in client.read_deployments()}
            return (
                deployments,
                {a.name for a in client.read_automations()},
                [p.name for p in client.read_work_pools()],
            )

    before = state()
    assert len(before[0]) == len(yaml.safe_load((REPO / "prefect.yaml").read_text())["deployments"])
    assert before[1] == {"recalibrate tiny-cpu on drift", CRASH_SILENT_RUNS}
    place.schedule()
    with place.client() as client:
        client.pause_deployment(client.read_deployment_by_name("draftwell/weekly-tiny-cpu").id)
    assert state() == before


def test_a_killed_run_loses_nothing_and_the_next_goes_on(
    place: Place, deployment: Any, first: Any, pair_file: Path
) -> None:
    from draftwell.components.collect.settings import CollectionSettings
    from draftwell.flows.loading import open_pair, prompts_of
    from draftwell.flows.steps import collect as collect_step

    wait_for_quiet(place, deployment)
    settings = place.settings(MANY)
    parameters = place.parameters(MANY)
    shards = TraceSet(place.traces)
    old = shards.shard(0).stat()
    with place.client() as client:
        killed = client.create_flow_run_from_deployment(deployment.id, parameters=parameters).id
    wait_for("the first shard", lambda: begun(shards, old), place.worker_log)
    engine = place.engine()
    assert engine is not None
    os.kill(engine, signal.SIGKILL)
    assert place.ended(killed).state.is_crashed()
    before = {path.name: path.stat().st_mtime_ns for path in shards.shards}
    assert 1 <= len(before) < MANY // 32, "the run was over before it was killed"
    with place.client() as client:
        resumed = client.create_flow_run_from_deployment(deployment.id, parameters=parameters).id
    assert place.ended(resumed).state.is_completed(), place.worker_log.read_text()[-3000:]
    assert {name: (place.traces / name).stat().st_mtime_ns for name in before} == before
    unbroken = collect_step.run_collect(
        open_pair(str(pair_file)),
        prompts_of(settings)["collect"],
        CollectionSettings(max_tokens=settings.max_tokens),
        folder=place.folder / "unbroken",
    )
    assert len(shards.shards) == MANY // 32
    assert shards.digest() == unbroken.digest()


def test_drift_ends_in_a_switched_bundle(place: Place, deployment: Any, first: Any) -> None:
    """Nobody does anything: the check finds it, its event starts the flow for this pair alone, and
    what comes of it is served."""
    before, step = place.aliases()["champion"], traffic.station_of(place.pair)
    asked = traffic.prompts(3 * ENOUGH, seed=3, words=traffic.OTHERS)
    rows = traffic.serve(step, place.folder / "served", asked).read()
    spool = traffic.spool(place.folder / "spool", traffic.elsewhere(rows), asked)
    with place.client() as client:
        stray = {
            "id": str(uuid4()),
            "occurred": datetime.now(UTC).isoformat(),
            "event": "draftwell.drift",
            "resource": {
                "prefect.resource.id": "draftwell.pair.another",
                "draftwell.device": "cpu",
            },
            "payload": {"settings": {"pair": "another"}},
        }
        client.request("POST", "/events", json=[stray])
        drift = client.read_deployment_by_name("draftwell/drift-tiny-cpu")
        monitor = client.read_deployment_by_name("monitor/tiny-cpu")
        checked = client.create_flow_run_from_deployment(
            monitor.id, parameters=place.parameters(ENOUGH, source="prompts", spool=spool)
        )
    assert place.ended(checked.id).state.is_completed(), place.worker_log.read_text()[-3000:]
    run = wait_for(
        "a recalibration", lambda: next(iter(place.runs(drift.id)), None), place.server_log
    )
    assert place.ended(run.id).state.is_completed(), place.worker_log.read_text()[-3000:]
    asked_for = run.parameters["settings"]
    assert (asked_for["source"], asked_for["spool"]) == ("drift", str(spool))
    assert len(place.runs(drift.id)) == 1
    assert place.aliases()["champion"] > before
    assert place.current() == f"{place.aliases()['champion']}-cpu"
    assert (place.traces.parent / "recalibrations" / asked_for["drift"][:12] / "traces").is_dir()


def test_parameters_that_nobody_knows_are_refused(place: Place, deployment: Any) -> None:
    from prefect.exceptions import PrefectHTTPStatusError

    with place.client() as client, pytest.raises(PrefectHTTPStatusError, match=r"409|422"):
        client.create_flow_run_from_deployment(
            deployment.id,
            parameters={"settings": {"engine": "draftwell", "pair": "tiny", "trails": 3}},
        )


def test_a_run_that_dies_with_its_worker_ends_as_crashed_without_a_person(
    place: Place, deployment: Any, first: Any
) -> None:
    """As when the machine goes down: nobody is left to say so but the server, which misses the
    heartbeat. No worker is left after it."""
    wait_for_quiet(place, deployment)
    shards = TraceSet(place.traces)
    old = shards.shard(0).stat()
    parameters = place.parameters(MANY, max_tokens=23)
    with place.client() as client:
        lost = client.create_flow_run_from_deployment(deployment.id, parameters=parameters).id
    wait_for("its process", place.engine, place.worker_log)
    wait_for("the first shard", lambda: begun(shards, old), place.worker_log)
    assert place.worker is not None
    for pid in (family := descendants(place.worker.pid)):
        os.kill(pid, signal.SIGKILL)
    assert len(family) > 1
    killed = time.monotonic()
    with place.client() as client:
        assert client.read_flow_run(lost).state.is_running()
    ended = place.ended(lost)
    assert ended.state.is_crashed()
    assert "No heartbeat" in ended.state.message
    assert time.monotonic() - killed < 2 * SILENCE


def test_secrets_are_in_no_log_and_no_state(place: Place, first: Any) -> None:
    """Of server, worker and the runs before; that the search finds what there is is
    test_secrets.py's."""
    with place.client() as client:
        assert client.read_flow_run(first.id).state.is_completed(), "with the password"
    with pytest.raises(urllib.error.HTTPError, match="401"):
        urllib.request.urlopen(f"{place.url}/api/admin/version", timeout=60)
    assert {"server.log", "worker.log", "prefect", "draftwell"} <= {
        path.name for path in place.folder.iterdir()
    }
    assert secrets.leaks(place.folder, SECRETS) == []


def test_a_turn_that_is_held_while_the_server_dies_comes_back(
    tmp_path: Path, pair_file: Path
) -> None:
    """Slots are counted in the database; with leases in memory nobody would know, after a restart,
    that one is to be given back."""
    place = Place(tmp_path, pair_file)

    def take() -> bool:
        with place.client() as client, contextlib.suppress(PrefectHTTPStatusError):  # 423: held
            client.increment_concurrency_slots_with_lease(["pair-tiny"], 1, "concurrency", LEASE)
            return True
        return False

    with serving(place) as server:
        wait_for("the server", place.answers, place.server_log)
        with place.client() as client:
            client.create_global_concurrency_limit(
                GlobalConcurrencyLimitCreate(name="pair-tiny", limit=1)
            )
        assert take()
        assert not take()
        for pid in descendants(server.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    with serving(place):
        wait_for("the server", place.answers, place.server_log)
        wait_for("the turn", take, place.server_log)
