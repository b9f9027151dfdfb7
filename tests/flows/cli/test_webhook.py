"""`draftwell release webhook` with a real MLflow server: an alias that is set there, as its UI
does, is deployed by the webhook."""

from __future__ import annotations

import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from cryptography.fernet import Fernet

from draftwell.flows.steps.deploy import promote_and_deploy
from draftwell.flows.workspace import Workspace
from draftwell.registry.releases import record_gate
from draftwell.registry.store import Store
from draftwell.registry.webhooks import SECRET
from draftwell.serving.bundle.bundle import open_bundle
from tests.support.loop.publishing import release, verdict
from tests.support.loop.refusals import refused
from tests.support.paths import REPO
from tests.support.server.processes import answers, free_port, mlflow_server, running

OURS = "the secret of this test"
SECONDS = 10.0
"""In which a webhook deploys."""


@pytest.fixture
def mlflow(
    own_stores: Path, empty_database: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[str]:
    """A server as docs/webhooks.md sets one up on one machine; the environment names
    it."""
    folder = tmp_path / "mlflow"
    folder.mkdir()
    shutil.copyfile(empty_database, folder / "mlflow.db")
    settings = {
        "MLFLOW_BACKEND_STORE_URI": f"sqlite:///{folder / 'mlflow.db'}",
        "MLFLOW_ARTIFACTS_DESTINATION": str(folder / "files"),
        "MLFLOW_WEBHOOK_ALLOWED_SCHEMES": "http,https",
        "MLFLOW_WEBHOOK_ALLOW_PRIVATE_IPS": "true",
        "MLFLOW_WEBHOOK_SECRET_ENCRYPTION_KEY": Fernet.generate_key().decode(),
        "MLFLOW_WEBHOOK_CACHE_TTL": "1",  # a minute by default
    }
    monkeypatch.delenv("MLFLOW_TRACKING_URI")
    with mlflow_server(folder, settings) as address:
        monkeypatch.setenv("MLFLOW_TRACKING_URI", address)
        monkeypatch.setenv(SECRET, OURS)
        monkeypatch.chdir(tmp_path)
        yield address


@contextmanager
def receiving(pair: Path, port: int, log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """The command in a process of its own, from when it has looked once: it has imported MLflow
    then."""
    command = [sys.executable, "-m", "draftwell.flows.cli.main", "release", "webhook"]
    options = ["--pair", str(pair), "--set", "device=cpu", "--set", f"port={port}"]
    lines = len(log.read_text().splitlines()) if log.exists() else 0

    def ready() -> bool:
        looked = [line for line in log.read_text().splitlines()[lines:] if line.startswith("rel")]
        return bool(looked) and answers(f"http://127.0.0.1:{port}/health")()

    path = {"PYTHONPATH": str(REPO)}
    with running([*command, *options], log, ready, cwd=Path.cwd(), environment=path) as process:
        yield process


def seconds_until(condition: Callable[[], bool], most: float) -> float:
    """How long it took; fails after that long."""
    began = time.monotonic()
    while not condition():
        assert time.monotonic() - began < most, f"not within {most:.0f} s"
        time.sleep(0.02)
    return time.monotonic() - began


def set_champion(address: str, version: int) -> None:
    """Set the alias as MLflow's page does."""
    done = httpx.post(
        f"{address}/api/2.0/mlflow/registered-models/alias",
        json={"name": "release.tiny.cpu", "alias": "champion", "version": str(version)},
        timeout=60,
    )
    assert done.status_code == 200, done.text


@pytest.mark.slow
def test_an_alias_set_in_mlflow_is_deployed_and_a_wrong_signature_does_nothing(
    run: Any, pair_file: Path, mlflow: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slow: it starts MLflow's server once and the receiver twice."""
    space, store, port = Workspace(str(pair_file)), Store(), free_port()
    log, home = tmp_path / "receiver.log", Path("dist/tiny")
    url = f"http://127.0.0.1:{port}/mlflow"
    register = (
        "release webhook",
        "--pair",
        pair_file,
        "--set device=cpu",
        "--set",
        f"register_at={url}",
    )

    def current() -> str:
        return (home / "current").resolve().name

    def seconds_to_deploy(version: int) -> float:
        set_champion(mlflow, version)
        return seconds_until(lambda: current() == f"{version}-cpu", SECONDS)

    with receiving(pair_file, port, log):
        for _ in range(2):  # the second changes what the first made
            done = run(*register)
            assert done.exit_code == 0, done.output
            assert "did not reach" not in done.output
        assert [hook.name for hook in store.client.list_webhooks()] == [
            "draftwell.release.tiny.cpu"
        ]
        made = [
            release(store, space.spec, space.files(), tmp_path / f"made{n}", accepted=n)
            for n in (1, 2, 3)
        ]
        record_gate(store, verdict(made[0]))
        assert promote_and_deploy(space, "cpu", 1, Path("dist")) is not None
        record_gate(store, verdict(made[1], beside=1))

    with receiving(pair_file, port, log) as receiver:
        # killed while it builds
        set_champion(mlflow, 2)
        seconds_until(lambda: any(home.glob(".build.*")), 60)
        receiver.kill()
        receiver.wait()
    assert current() == "1-cpu"
    open_bundle(home / "current")

    with receiving(pair_file, port, log):
        seconds_until(lambda: current() == "2-cpu", 60)  # at its start it makes up for that
        open_bundle(home / "current")
        for version in (1, 2, 1):
            assert seconds_to_deploy(version) < SECONDS
        # no gate
        set_champion(mlflow, 3)
        seconds_until(lambda: "version 3, which is not deployed" in log.read_text(), 60)
        assert current() == "1-cpu"
        # MLflow signs with another secret
        monkeypatch.setenv(SECRET, "another secret of this test")
        assert "401" in run(*register).output
        time.sleep(2)  # MLflow signs with the secret that it knew for a second more
        set_champion(mlflow, 2)
        time.sleep(3)  # what had been taken would be deployed by now
        assert current() == "1-cpu"
        assert OURS not in log.read_text()


def test_wrong_calls_are_refused_before_anything_listens(
    run: Any, pair_file: Path, own_stores: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(SECRET, raising=False)
    command = f"release webhook --pair {pair_file} --set device=cpu"
    refused(run(command), "openssl rand")
    monkeypatch.setenv(SECRET, OURS)
    refused(run(f"{command} --set register_at=nonsense"), "http://host")
    refused(
        run(f"{command} --set register_at=http://127.0.0.1:8100/mlflow"), "draftwell release ui"
    )
    assert OURS not in run(f"{command} --set register_at=nonsense").output
