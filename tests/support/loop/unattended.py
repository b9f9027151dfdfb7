"""A server with the drift loop's deployments, and traffic for it."""

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

from draftwell.components.prompts.prompt import Prompt
from draftwell.flows.context import StepContext
from draftwell.flows.loading import open_pair
from draftwell.flows.orchestration.loop_flow import draftwell
from draftwell.flows.settings import PipelineSettings
from draftwell.flows.steps import collect as collect_step
from draftwell.flows.steps.monitor import DriftSettings
from draftwell.registry.releases import find_release, gate_record
from draftwell.registry.store import Store
from draftwell.serving.bundle.verdict import Check
from draftwell.serving.device import lacks_bfloat16
from tests.support.collecting import small
from tests.support.paths import REPO

TOKENS = 48

SERVE = """
from prefect import serve
from prefect.events import DeploymentEventTrigger
from draftwell.flows.orchestration.monitor_flow import monitor
from draftwell.flows.orchestration.loop_flow import draftwell

drift = DeploymentEventTrigger(expect={"draftwell.drift"}, match={"prefect.resource.id": "draftwell.pair.*"},
                               parameters={"settings": "{{ event.payload.settings }}"})
serve(monitor.to_deployment("hands-off"), draftwell.to_deployment("hands-off", triggers=[drift]), pause_on_shutdown=False)
"""  # noqa: E501


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
    return DriftSettings(
        pair="default", dtype=quick_dtype(), spool=spool, out=place / "dist", threads=cores
    )


def answer(settings: DriftSettings) -> dict[str, Any]:
    """What the flow makes of the traffic in this process, as an answer to drift."""
    given = {
        **settings.model_dump(exclude={"reference"}),
        "collect_prompts": settings.collect_prompts,
        "source": "drift",
    }
    outcome: dict[str, Any] = draftwell(PipelineSettings(**given))
    return outcome


def over_champion() -> Check:
    """What the gate found of the champion's speed beside the one before."""
    record = gate_record(find_release(Store(), "smollm2-135m", "cpu", "champion"))
    assert record is not None
    (check,) = [check for check in record.checks if check.name == "regression"]
    return check


def serve(step: StepContext, folder: Path, asked: Sequence[Prompt]) -> Path:
    """The target's answers and the requests, as a server spools them."""
    collect_step.run_collect(
        step, asked, small(max_tokens=TOKENS, rollout=1, batch=16), folder=folder
    )
    bodies = [
        json.dumps({"messages": [{"role": "user", "content": prompt.prompt}]}, ensure_ascii=False)
        for prompt in asked
    ]
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
    with (
        pytest.MonkeyPatch.context() as patch,
        running(
            [sys.executable, "-m", "prefect", "server", "start", "--port", str(port)],
            place / "server.log",
        ) as server,
    ):
        patch.setenv("PREFECT_API_URL", address)
        wait(lambda: answers(httpx, address), 120, server)
        with (
            running([sys.executable, "-c", SERVE], place / "serve.log") as served,
            temporary_settings({PREFECT_API_URL: address}),
        ):
            make_limits()
            wait(lambda: deployments() == {"monitor", "draftwell"}, 120, served)
            yield


def wait(ready: Any, seconds: float, process: subprocess.Popen[bytes] | None = None) -> None:
    """Until something is so; a process that it depends on must live."""
    end = time.monotonic() + seconds
    while not ready():
        assert process is None or process.poll() is None, (
            "the process that was waited for has ended"
        )
        assert time.monotonic() < end, f"not ready within {seconds:.0f} s"
        time.sleep(1)


def answers(httpx: Any, address: str) -> bool:
    try:
        return bool(httpx.get(f"{address}/health", timeout=2).is_success)
    except httpx.HTTPError:
        return False


def deployments() -> set[str]:
    """Flows that have a deployment on the server."""
    from prefect.client.orchestration import get_client

    with get_client(sync_client=True) as client:
        found = [
            deployment for deployment in client.read_deployments() if deployment.name == "hands-off"
        ]
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


def make_limits() -> None:
    """The turns that deployed flows wait for: of the pair, and of the machine."""
    from prefect.client.orchestration import get_client
    from prefect.client.schemas.actions import GlobalConcurrencyLimitCreate

    with get_client(sync_client=True) as client:
        for name in ("pair-smollm2-135m", "gpu-slot"):
            client.create_global_concurrency_limit(GlobalConcurrencyLimitCreate(name=name, limit=1))
