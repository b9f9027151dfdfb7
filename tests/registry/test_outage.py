"""A real MLflow server that is away for a minute: what was begun waits and is done once, or nothing
was done and a line says so."""

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from draftwell.registry.pairs import PairSpec
from draftwell.registry.promotion import promote, rollback
from draftwell.registry.releases import find_release
from draftwell.registry.store import Store
from draftwell.serving.artifacts.pair_files import PairFiles
from tests.support.errors import raises_code
from tests.support.loop.publishing import release, verdict

pytestmark = pytest.mark.slow
AWAY = 60
"""Seconds."""
SOONEST = 35
"""Seconds: behind the try that comes half a minute after the first, before the one of a minute."""
START = 300
"""Seconds that a server may take to start on a busy machine."""


class Server:
    """`mlflow server` on a port of its own, which can go and come back with all it had."""

    def __init__(self, folder: Path):
        self.folder = folder
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = int(free.getsockname()[1])
        self.uri = f"http://127.0.0.1:{self.port}"
        self.process: subprocess.Popen[bytes] | None = None
        self.took = 0.0

    def start(self, *, wait: bool = True) -> None:
        command = [
            sys.executable,
            "-m",
            "mlflow",
            "server",
            "--backend-store-uri",
            f"sqlite:///{self.folder / 'mlflow.db'}",
            "--artifacts-destination",
            str(self.folder / "files"),
            "--host",
            "127.0.0.1",
            "--port",
            str(self.port),
            "--workers",
            "1",
        ]
        environment = {**os.environ, "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}
        environment.pop("MLFLOW_TRACKING_URI", None)
        with (self.folder / "server.log").open("ab") as log:
            self.process = subprocess.Popen(
                command, env=environment, stdout=log, stderr=log, start_new_session=True
            )
        began = time.monotonic()
        while wait and not self.answers():
            assert time.monotonic() < began + START, (self.folder / "server.log").read_text()
            time.sleep(0.2)
        if wait:
            self.took = time.monotonic() - began

    def answers(self) -> bool:
        try:
            return httpx.get(f"{self.uri}/health", timeout=5).status_code == 200
        except httpx.HTTPError:
            return False

    def stop(self) -> None:
        if self.process is not None:
            os.killpg(self.process.pid, signal.SIGKILL)  # the group that it leads, which we made
            self.process.wait()
            self.process = None


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    (tmp_path / "server").mkdir()
    one = Server(tmp_path / "server")
    one.start()
    yield one
    one.stop()


def counted(store: Store) -> dict[str, int]:
    """Versions of every kind."""
    return {
        kind: len(store.versions(kind, "tiny.cpu" if kind == "release" else "tiny"))
        for kind in ("acceptance_table", "decoding_config", "release")
    }


def test_a_minute_without_the_server(
    server: Server,
    spec: PairSpec,
    files: PairFiles,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store = Store(server.uri)
    one = release(store, spec, files, tmp_path / "one", accepted=1)
    promote(store, "tiny", "cpu", 1, verdict(one))

    server.stop()
    # where a start takes long, it begins earlier: the last try comes after two minutes
    start = max(SOONEST, AWAY - server.took)
    back = threading.Timer(start, server.start, kwargs={"wait": False})
    back.start()
    begin = time.monotonic()
    two = release(store, spec, files, tmp_path / "two", accepted=2)
    promote(store, "tiny", "cpu", two.version, verdict(two, beside=1))
    back.join()
    assert time.monotonic() - begin >= AWAY
    assert counted(store) == {"acceptance_table": 2, "decoding_config": 1, "release": 2}, (
        "tried again, registered once"
    )
    assert find_release(store, "tiny", "cpu", "champion").version == 2

    server.stop()
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")
    for action in (
        lambda: promote(store, "tiny", "cpu", 1),
        lambda: rollback(store, "tiny", "cpu", "slow"),
        lambda: release(store, spec, files, tmp_path / "three", accepted=3),
    ):
        with raises_code("registry_unreachable", "MLFLOW_TRACKING_URI") as caught:
            action()
        assert "\n" not in str(caught.value)
    server.start()
    assert counted(store) == {"acceptance_table": 2, "decoding_config": 1, "release": 2}
    assert store.get_aliases("release", "tiny.cpu")["champion"] == 2
    assert rollback(store, "tiny", "cpu", "slow")[1].version == 1
