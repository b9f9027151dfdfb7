"""Hands off, for real: the default pair, its own tuner and gate, a Prefect server, an event, an automation.

Sums are served until the prompts change to Spanish. Nobody does anything: the monitor finds it, its event starts the recalibration, and
a new champion stands deployed. About a quarter of an hour on 2 idle cores; `-s` shows how far it is.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from components.prompts.prompt import Prompt
from flows.context import StepContext
from flows.loading import open_pair
from flows.orchestration import recalibrate_flow as recalibrate
from flows.progress import announce
from flows.steps import collect as collect_step
from flows.steps import monitor as monitor_step
from flows.steps.monitor import DriftSettings
from registry.store import Store
from serving.device import lacks_bfloat16
from serving.recording.trace import TraceSet
from tests.support.collecting import small
from tests.support.loop import languages, traffic
from tests.support.paths import REPO

pytestmark = [pytest.mark.slow, pytest.mark.soak]

BAR = 15 * 60
"""Seconds from the change of prompts, as the monitor sees it, to the deployed champion."""
TOKENS = 48
SERVE = """
from prefect import serve
from prefect.events import DeploymentEventTrigger
from flows.orchestration.monitor_flow import monitor
from flows.orchestration.recalibrate_flow import recalibrate

drift = DeploymentEventTrigger(expect={"draftwell.drift"}, match={"prefect.resource.id": "draftwell.pair.*"},
                               parameters={"settings": "{{ event.payload.settings }}"})
serve(monitor.to_deployment("hands-off"), recalibrate.to_deployment("hands-off", triggers=[drift]), pause_on_shutdown=False)
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("work")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(REPO))
        yield folder


def quick_dtype() -> str:
    """What this machine computes in."""
    return "float32" if lacks_bfloat16() else "bfloat16"


def settings_of(place: Path, spool: Path) -> DriftSettings:
    cores = len(os.sched_getaffinity(0))
    return DriftSettings(pair="default", dtype=quick_dtype(), spool=spool, out=place / "dist", threads=cores)


def serve(step: StepContext, folder: Path, asked: Sequence[Prompt]) -> Path:
    """The target's answers and the requests, as a server spools them."""
    collect_step.run_collect(step, asked, small(max_tokens=TOKENS, rollout=1, batch=16), folder=folder)
    bodies = [json.dumps({"messages": [{"role": "user", "content": prompt.prompt}]}, ensure_ascii=False) for prompt in asked]
    (folder / "requests.jsonl").write_text("\n".join(bodies) + "\n", encoding="utf-8")
    return folder


@contextmanager
def running(command: Sequence[str], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A process for as long as the block."""
    with log.open("wb") as output:
        process = subprocess.Popen(command, cwd=REPO, stdout=output, stderr=subprocess.STDOUT)
        try:
            yield process
        finally:
            process.terminate()
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


@contextmanager
def prefect_at_work(place: Path) -> Iterator[None]:
    """A server with both deployments, served by a process."""
    import httpx
    from prefect.settings import PREFECT_API_URL, temporary_settings

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    address = f"http://127.0.0.1:{port}/api"
    with pytest.MonkeyPatch.context() as patch, running([sys.executable, "-m", "prefect", "server", "start", "--port", str(port)],
                                                        place / "server.log") as server:
        patch.setenv("PREFECT_API_URL", address)
        wait(lambda: answers(httpx, address), 120, server)
        with running([sys.executable, "-c", SERVE], place / "serve.log") as served, temporary_settings({PREFECT_API_URL: address}):
            make_limits()
            wait(lambda: deployments() == {"monitor", "recalibrate"}, 120, served)
            yield


def wait(ready: Any, seconds: float, process: subprocess.Popen[bytes] | None = None) -> None:
    """Until something is so; a process that it depends on must live."""
    end = time.monotonic() + seconds
    while not ready():
        assert process is None or process.poll() is None, "the process that was waited for has ended"
        assert time.monotonic() < end, f"not ready within {seconds:.0f} s"
        time.sleep(1)


def answers(httpx: Any, address: str) -> bool:
    try:
        return bool(httpx.get(f"{address}/health", timeout=2).is_success)
    except httpx.HTTPError:
        return False


def make_limits() -> None:
    """The turns that deployed flows wait for: of the pair, and of the machine."""
    from prefect.client.orchestration import get_client
    from prefect.client.schemas.actions import GlobalConcurrencyLimitCreate

    with get_client(sync_client=True) as client:
        for name in ("pair-smollm2-135m", "gpu-slot"):
            client.create_global_concurrency_limit(GlobalConcurrencyLimitCreate(name=name, limit=1))


def deployments() -> set[str]:
    """Flows that have a deployment on the server."""
    from prefect.client.orchestration import get_client

    with get_client(sync_client=True) as client:
        found = [deployment for deployment in client.read_deployments() if deployment.name == "hands-off"]
        return {client.read_flow(deployment.flow_id).name for deployment in found}


def runs() -> list[Any]:
    """All flow runs of the server, the oldest first."""
    from prefect.client.orchestration import get_client
    from prefect.client.schemas.sorting import FlowRunSort

    with get_client(sync_client=True) as client:
        return list(client.read_flow_runs(sort=FlowRunSort.START_TIME_ASC))


@pytest.fixture(scope="module")
def step(place: Path) -> StepContext:
    import torch

    torch.set_num_threads(len(os.sched_getaffinity(0)))
    return open_pair("default", quick_dtype())


@pytest.fixture(scope="module")
def champion(prefect_server: None, step: StepContext, place: Path) -> dict[str, Any]:
    """Sums are served: a first champion, made of a spool by the same flow, run in this process."""
    announce(f"hands off: sums are served, in {quick_dtype()}; a first champion for them")
    spool = serve(step, place / "sums", languages.maths(40, seed=1))
    made: dict[str, Any] = recalibrate.recalibrate(settings_of(place, spool))
    announce(f"hands off: {made['strategy']} {made['parameters']} in {made['seconds']:.0f} s")
    assert made["state"] == "deployed", made["checks"]
    return made


def test_ten_checks_on_unchanged_traffic_raise_nothing(champion: dict[str, Any], step: StepContext, place: Path) -> None:
    pool = TraceSet(serve(step, place / "pool", languages.maths(150, seed=2))).read()
    for day in range(10):
        report, _ = monitor_step.check(step.workspace, spool=traffic.spool(place / f"day-{day}", traffic.some(pool, 40, seed=day)))
        assert report.verdict == "steady", report.reasons


def test_another_language_brings_a_new_champion_without_a_hand(champion: dict[str, Any], step: StepContext, place: Path) -> None:
    from prefect.deployments import run_deployment

    spool = serve(step, place / "spanish", languages.spanish(60, seed=3))
    settings = settings_of(place, spool)
    first = Store().get_aliases("release", "smollm2-135m.cpu")["champion"]
    with prefect_at_work(place):
        announce("hands off: the prompts are Spanish now; the monitor looks")
        started = time.monotonic()
        given = {"settings": settings.model_dump(mode="json", exclude_unset=True)}
        seen = run_deployment("monitor/hands-off", parameters=given, timeout=300)
        assert seen.state is not None
        assert seen.state.is_completed(), seen.state
        wait(lambda: [run for run in runs() if run.name != seen.name], 60)
        wait(lambda: all(run.state is not None and run.state.is_final() for run in runs()), BAR)
        took = time.monotonic() - started
        assert [run.state_name for run in runs()] == ["Completed", "Completed"], (place / "serve.log").read_text()[-3000:]
    (folder,) = [path for path in (step.workspace.root / "recalibrations").iterdir() if (path / "prompts.jsonl").is_file()
                 and "¿" in (path / "prompts.jsonl").read_text(encoding="utf-8")]
    outcome = json.loads((folder / "outcome.json").read_text(encoding="utf-8"))
    announce(f"hands off: {outcome['strategy']} {outcome['parameters']}, {outcome['over_champion']} over the old champion, in {took:.0f} s")
    assert outcome["state"] == "deployed", outcome["checks"]
    assert Store().get_aliases("release", "smollm2-135m.cpu")["champion"] == outcome["release"] > first
    assert (place / "dist" / "smollm2-135m" / "current").resolve().name == f"{outcome['release']}-cpu"
    assert outcome["over_champion"]["low"] > 1, outcome["over_champion"]
    assert took < BAR
