"""A device that has failed for good: clients are told, health turns to 503, and the process ends so
that it is started again."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
import uvicorn

from draftwell.serving.runtime.commands import Role
from draftwell.serving.server import lifecycle
from draftwell.serving.server.app import create_app
from draftwell.serving.server.lifecycle import DrainingServer
from draftwell.serving.server.main import main
from draftwell.serving.server.process import DEVICE_FAILED, HUNG, INTERRUPTED, TERMINATED
from tests.support.server.bundles import make_bundle
from tests.support.server.served_pair import served_pair, serving
from tests.support.server.server_process import wait_until

ILLEGAL = "CUDA error: an illegal memory access was encountered"
BODY = {"model": "tiny", "prompt": "hello", "max_tokens": 20, "temperature": 0}


def lose_device(models: Any) -> None:
    """From now on every forward pass fails as it does on a broken CUDA context."""

    def failing(rows: Any) -> Any:
        raise torch.AcceleratorError(ILLEGAL)

    for model in models.values():
        model.forward = failing


def test_the_client_gets_a_503_and_health_turns_to_503() -> None:
    served = served_pair("vanilla_sd")
    with serving(served) as (url, scheduler), httpx.Client(base_url=url, timeout=30) as http:
        assert http.get("/health").json()["status"] == "ok"
        lose_device(served.pair.models)
        answer = http.post("/v1/completions", json=BODY)
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "device_lost")
        assert "illegal" not in answer.text, "details are for the log"
        state = http.get("/health")
        assert (state.status_code, state.json()["status"]) == (503, "failed")
        scheduler._thread.join(60)
        assert http.get("/ready").status_code == 503
        assert http.post("/v1/completions", json=BODY).status_code == 503, (
            "what comes before the process has ended"
        )


def test_requests_that_wait_are_answered_too() -> None:
    served = served_pair("autoregressive", slots=1)
    answers: list[int] = []
    with serving(served) as (url, scheduler):
        hold = threading.Event()
        forward = served.pair.models["target"].forward
        served.pair.models["target"].forward = lambda rows: (hold.wait(30), forward(rows))[1]  # type: ignore[method-assign]
        asking = [
            threading.Thread(
                target=lambda: answers.append(
                    httpx.post(f"{url}/v1/completions", json=BODY, timeout=30).status_code
                )
            )
            for _ in range(4)
        ]
        for thread in asking:
            thread.start()
        wait_until(lambda: scheduler.running + scheduler.waiting == 4, "all have arrived")
        lose_device(served.pair.models)
        hold.set()
        for thread in asking:
            thread.join(30)
    assert answers == [503] * 4


def test_the_server_ends_by_itself(caplog: pytest.LogCaptureFixture) -> None:
    served = served_pair("vanilla_sd")
    web = create_app(served, drain_seconds=0)
    it = DrainingServer(
        uvicorn.Config(web, port=0, log_level="error", timeout_graceful_shutdown=5),
        web.state.deployments,
    )
    serving = threading.Thread(target=it.run, daemon=True)
    serving.start()
    wait_until(lambda: it.started, "the server starts")
    url = f"http://127.0.0.1:{it.servers[0].sockets[0].getsockname()[1]}/v1/completions"
    assert httpx.post(url, json=BODY, timeout=30).status_code == 200
    assert it.device_lost is None
    lose_device(served.pair.models)
    assert httpx.post(url, json=BODY, timeout=30).status_code == 503
    serving.join(30)
    assert not serving.is_alive()
    assert it.device_lost is not None
    assert "has failed" in caplog.text


def test_the_process_ends_with_a_code_of_its_own(
    tmp_path: Path, tiny_models: dict[Role, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In this process: the server's loop is replaced by one that finds the device lost, and by one
    that was asked to end."""
    bundle = make_bundle(tmp_path / "bundle", tiny_models, "vanilla_sd")
    monkeypatch.setattr(
        "sys.argv",
        [
            "draftwell-serve",
            "--bundle",
            str(bundle),
            "--port",
            "0",
            "--slots",
            "1",
            "--threads",
            "1",
        ],
    )
    for lost, code in ((True, DEVICE_FAILED), (False, 0)):

        class Ended(DrainingServer):
            def run(self, sockets: Any = None, lost: bool = lost) -> None:
                self.device_lost = lifecycle.DeviceLost("the device has failed") if lost else None

        monkeypatch.setattr(lifecycle, "DrainingServer", Ended)
        with pytest.raises(SystemExit) as ended:
            main()
        assert ended.value.code == code
    assert len({0, 1, 2, INTERRUPTED, TERMINATED, DEVICE_FAILED, HUNG}) == 7
