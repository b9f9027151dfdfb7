"""Real servers for tests, each in a temporary folder and gone behind its `with`: PostgreSQL,
MLflow, Prefect, S3."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

STARTUP = 300


def free_port() -> int:
    """A port that nobody listened on a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def running(
    command: list[str],
    log: Path,
    ready: Callable[[], bool],
    *,
    user: str | None = None,
    cwd: Path,
    environment: Mapping[str, str] | None = None,
    politely: signal.Signals = signal.SIGTERM,
) -> Iterator[subprocess.Popen[bytes]]:
    """A server as a process group of its own, from the moment that it is ready; its output goes to
    `log`."""
    with log.open("ab") as output:
        process = subprocess.Popen(
            command,
            cwd=cwd,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            user=user,
            group=user and primary_group(user),
            extra_groups=[] if user else None,
            env={**os.environ, **(environment or {})},
        )
    try:
        until = time.monotonic() + STARTUP
        while not ready():
            assert process.poll() is None, f"{command[0]} ended at once:\n{log.read_text()[-3000:]}"
            assert time.monotonic() < until, (
                f"{command[0]} is not ready after {STARTUP} s:\n{log.read_text()[-3000:]}"
            )
            time.sleep(0.2)
        yield process
    finally:
        stop(process, politely)


def stop(process: subprocess.Popen[bytes], politely: signal.Signals = signal.SIGTERM) -> None:
    """End a server and what it started: politely, then not."""
    for number in (politely, signal.SIGKILL):
        if process.poll() is None:
            os.killpg(process.pid, number)
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                continue


def answers(url: str) -> Callable[[], bool]:
    """Whether an address answers with anything but a server's error."""

    def ask() -> bool:
        try:
            with urllib.request.urlopen(url, timeout=10):
                return True
        except urllib.error.HTTPError as error:
            return error.code < 500
        except OSError:
            return False

    return ask


@dataclass(frozen=True)
class Postgres:
    """A running server with the superuser `postgres`; programs of its own version lie in
    `programs`."""

    programs: Path
    port: int
    password: str

    @property
    def environment(self) -> dict[str, str]:
        """What libpq's programs and drivers read: nobody writes the password into an address."""
        return {
            "PGHOST": "127.0.0.1",
            "PGPORT": str(self.port),
            "PGUSER": "postgres",
            "PGPASSWORD": self.password,
            "PATH": f"{self.programs}:{os.environ['PATH']}",
        }

    def sql(self, statement: str, database: str = "postgres") -> str:
        """What psql prints for a statement."""
        done = subprocess.run(
            ["psql", "-X", "-A", "-t", "-v", "ON_ERROR_STOP=1", "-d", database, "-c", statement],
            check=True,
            capture_output=True,
            text=True,
            env={**os.environ, **self.environment},
        )
        return done.stdout.strip()


def postgres_programs() -> Path | None:
    """The folder of PostgreSQL's server programs; Debian keeps them off the PATH."""
    found = shutil.which("initdb")
    folders = [
        *Path("/usr/lib/postgresql").glob("*/bin"),
        *([Path(found).resolve().parent] if found else []),
    ]
    needed = ("initdb", "postgres", "psql", "pg_dump", "pg_restore")
    fit = [folder for folder in folders if all((folder / name).exists() for name in needed)]
    return max(
        fit,
        key=lambda folder: int("".join(filter(str.isdigit, folder.parent.name)) or 0),
        default=None,
    )


def primary_group(user: str) -> int:
    import pwd

    return pwd.getpwnam(user).pw_gid


@contextmanager
def postgres(password: str = "of-the-test") -> Iterator[Postgres]:
    """A PostgreSQL server in a folder of its own; skips, with the reason, where it cannot be had.

    PostgreSQL refuses to run as root, so a test that runs as root starts it as `nobody`.
    """
    programs = postgres_programs()
    if programs is None:
        pytest.skip("PostgreSQL's server is not installed (Debian: apt-get install postgresql)")
    user = "nobody" if os.geteuid() == 0 else None
    # not below pytest's folder, which only its owner may enter
    place = Path(tempfile.mkdtemp(prefix="draftwell-postgres-"))
    try:
        secret = place / "password"
        secret.write_text(password + "\n")
        if user is not None:
            for path in (place, secret):
                shutil.chown(path, user)
        os.chmod(place, 0o700)
        make = [
            str(programs / "initdb"),
            "-D",
            str(place / "data"),
            "-U",
            "postgres",
            "--auth=scram-sha-256",
            f"--pwfile={secret}",
            "--encoding=UTF8",
            "--no-locale",
            "--no-sync",
        ]
        made = subprocess.run(
            make,
            cwd=place,
            capture_output=True,
            text=True,
            check=False,
            user=user,
            group=user and primary_group(user),
            extra_groups=[] if user else None,
        )
        if made.returncode != 0:
            pytest.skip(f"initdb failed here: {made.stderr.strip()[-300:]}")
        server = Postgres(programs, free_port(), password)
        command = [
            str(programs / "postgres"),
            "-D",
            str(place / "data"),
            "-p",
            str(server.port),
            "-k",
            str(place),
            "-F",
            "-c",
            "listen_addresses=127.0.0.1",
            "-c",
            "shared_buffers=32MB",
        ]
        ask = [str(programs / "pg_isready"), "-q", "-h", "127.0.0.1", "-p", str(server.port)]
        with running(
            command,
            place.parent / f"{place.name}.log",
            lambda: subprocess.run(ask, check=False).returncode == 0,
            user=user,
            cwd=place,
            politely=signal.SIGINT,
        ):  # at SIGTERM it waits for its clients
            yield server
    finally:
        shutil.rmtree(place, ignore_errors=True)
        (place.parent / f"{place.name}.log").unlink(missing_ok=True)


@contextmanager
def mlflow_server(folder: Path, environment: Mapping[str, str], *more: str) -> Iterator[str]:
    """`mlflow server`, set up by the environment alone; gives its address. The log is `mlflow.log`
    in the folder."""
    port = free_port()
    address = f"http://127.0.0.1:{port}"
    command = [
        sys.executable,
        "-m",
        "mlflow",
        "server",
        "--host",
        "127.0.0.1",
        "--port",
        str(port),
        "--workers",
        "1",
        *more,
    ]
    settings = {
        "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",
        "MLFLOW_DISABLE_TELEMETRY": "true",
        **environment,
    }
    with running(
        command,
        folder / "mlflow.log",
        answers(f"{address}/health"),
        cwd=folder,
        environment=settings,
    ):
        yield address


@contextmanager
def prefect_server(folder: Path, environment: Mapping[str, str]) -> Iterator[str]:
    """`prefect server start`; gives the address of its API. The log is `prefect.log` in the
    folder."""
    port = free_port()
    api = f"http://127.0.0.1:{port}/api"
    command = [
        sys.executable,
        "-m",
        "prefect",
        "server",
        "start",
        "--host",
        "127.0.0.1",
        "--port",
        str(port),
    ]
    settings = {
        "PREFECT_HOME": str(folder / "prefect"),
        "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
        "PREFECT_API_URL": api,
        **environment,
    }
    with running(
        command, folder / "prefect.log", answers(f"{api}/health"), cwd=folder, environment=settings
    ):
        yield api


@contextmanager
def s3_server(bucket: str) -> Iterator[str]:
    """An S3-compatible store (moto) with an empty bucket; gives its address. Skips where moto is
    not installed."""
    moto = pytest.importorskip("moto.server", reason="moto's server is not installed (make setup)")
    boto3 = pytest.importorskip("boto3", reason="boto3 is not installed (make setup)")
    server = moto.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    try:
        host, port = server.get_host_and_port()
        address = f"http://{host}:{port}"
        boto3.client(
            "s3",
            endpoint_url=address,
            aws_access_key_id="test",
            aws_secret_access_key="test",
            region_name="us-east-1",
        ).create_bucket(Bucket=bucket)
        yield address
    finally:
        server.stop()
