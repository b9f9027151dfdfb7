"""Who may reach the registry: what is refused at once, what a server's refusal becomes, and a real
MLflow behind basic auth."""

from __future__ import annotations

import base64
import importlib.util
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from draftwell.registry.access import check_address, hidden, refusal
from draftwell.registry.connection import connect
from draftwell.registry.store import Store
from draftwell.serving.errors import DraftwellError
from tests.support.errors import raises_code
from tests.support.loop.publishing import publish, table
from tests.support.server.answering import answering
from tests.support.server.processes import mlflow_server

ADMIN, PASSWORD = "keeper", "a-password-of-the-test"
HERE = Path(__file__).resolve()


@pytest.mark.parametrize(
    ("uri", "told"),
    [
        ("https://ann:secret-1@mlflow.example:5000", "carries a password, which would reach logs"),
        (
            "http://token@mlflow.example",
            "set MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD",
        ),
        ("http://ann:pa/secret-1@host:5000", "go into MLFLOW_TRACKING_USERNAME"),
        ("HTTP://ann:p#secret-1@host", "is not a valid address"),
        ("http://[ann:secret-1@host", "is not a valid address"),
        ("postgresql://mlflow:se/secret-1@db/mlflow", "names a database"),
        ("postgresql://mlflow:secret-1@db/mlflow", "names a database: run `mlflow server` on it"),
        ("postgresql+psycopg2://db/mlflow", "names a database"),
        ("mysql+pymysql://mlflow:secret-1@db/mlflow", "names a database"),
    ],
)
def test_addresses_that_could_leak_are_refused_without_repeating_them(uri: str, told: str) -> None:
    with pytest.raises(DraftwellError) as refused:
        connect(uri)
    assert told in str(refused.value)
    assert "secret-1" not in str(refused.value)
    assert "ann" not in str(refused.value)


@pytest.mark.parametrize(
    "uri",
    [
        "sqlite:////home/ann@work/mlflow.db",
        "http://mlflow:5000",
        "https://mlflow.example/a@b",
        "databricks",
        "file:///tmp/x",
    ],
)
def test_other_addresses_pass(uri: str) -> None:
    check_address(uri)


@pytest.mark.parametrize(
    "uri",
    [
        "http://ann:secret-1@host",
        "http://ann:pa/secret-1@host",
        "postgresql://mlflow:secret-1@db/mlflow",
    ],
)
def test_the_registrys_own_address_is_looked_at_too(
    uri: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_REGISTRY_URI", uri)
    with pytest.raises(DraftwellError, match=r"^MLFLOW_REGISTRY_URI ") as refused:
        connect(f"sqlite:///{tmp_path / 'mlflow.db'}")
    assert "secret-1" not in str(refused.value)
    assert refused.value.__cause__ is None, "urllib's words repeat the password"


def test_no_password_survives_in_a_text() -> None:
    assert hidden("at http://ann:pa/ss@host:5000/x it failed") == "at http://host:5000/x it failed"
    assert hidden("at http://ann:p@a/s@s@host it failed") == "at http://host it failed"
    assert (
        hidden("http://host:5000/x and http://host/a@b") == "http://host:5000/x and http://host/a@b"
    )
    assert hidden("http://ann:p@ss@host/x and s3://key:p:q@host") == "http://host/x and s3://host"
    assert hidden("http://host/a@b, mail@host") == "http://host/a@b, mail@host"


def test_what_a_refusal_is(monkeypatch: pytest.MonkeyPatch) -> None:
    from mlflow.exceptions import MlflowException
    from mlflow.protos.databricks_pb2 import UNAUTHENTICATED
    from requests import HTTPError

    monkeypatch.delenv("MLFLOW_TRACKING_USERNAME", raising=False)
    unknown = MlflowException("You are not authenticated", error_code=UNAUTHENTICATED)
    assert unknown.error_code == "UNAUTHENTICATED"
    told = refusal(unknown, "http://host")
    assert told is not None
    assert told.startswith(
        "the registry at http://host wants to know who you are: set MLFLOW_TRACKING_USERNAME"
    )
    monkeypatch.setenv("MLFLOW_TRACKING_USERNAME", "ann")
    for status, words in (
        (401, "does not know the user ann with this password"),
        (403, "does not allow this to ann"),
    ):
        files = HTTPError("Client Error", response=SimpleNamespace(status_code=status))  # type: ignore[arg-type]
        told = refusal(files, "http://host")
        assert told is not None
        assert words in told
    assert refusal(MlflowException("away"), "http://host") is None
    assert refusal(OSError(28, "No space left on device"), "http://host") is None


ANSWERS: dict[str, tuple[int, str, str, str]] = {
    "a page": (200, "text/html", "<html>hello</html>", "not_mlflow"),
    "nothing": (200, "text/plain", "", "not_mlflow"),
    "another service": (200, "application/json", '{"status": "ok"}', "not_mlflow"),
    "a list": (200, "application/json", "[]", "not_mlflow"),
    "no such page": (404, "text/html", "<html>no</html>", "not_mlflow"),
    "another service's 404": (404, "application/json", '{"detail": "no"}', "not_mlflow"),
    "a proxy without a server": (502, "text/html", "<html>no</html>", "not_mlflow"),
    "a service that asks for an hour": (503, "text/html", "", "not_mlflow"),
    "a password wanted": (401, "text/html", "", "registry_refused"),
    "not allowed": (403, "text/html", "", "registry_refused"),
    "another address": (301, "text/html", "", "registry_elsewhere"),
}


@pytest.mark.parametrize("name", ANSWERS)
def test_an_address_that_is_not_mlflows_is_told_at_once(name: str) -> None:
    status, content, body, code = ANSWERS[name]
    headers = {"Location": "/login/api/x", "Retry-After": "3600"}
    with answering(status, content, body, headers) as address:
        began = time.monotonic()
        with raises_code(code, address) as caught:
            Store(address).get_aliases("release", "tiny.cpu")
        assert time.monotonic() - began < 10
    assert "\n" not in str(caught.value)


def test_an_address_that_never_answers_is_told_within_seconds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("draftwell.registry.access.FIRST_TIMEOUT", 0.2)
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        address = f"http://127.0.0.1:{silent.getsockname()[1]}"
        with raises_code("registry_unreachable", address):
            Store(address)


def test_an_address_without_a_certificate_is_told_to_be_http() -> None:
    with (
        answering(200, "text/html", "hello", {}) as address,
        raises_code("registry_unreachable", "https", "http://"),
    ):
        Store(address.replace("http", "https"))


@pytest.mark.parametrize(
    "address",
    [
        "localhost:5000",
        "127.0.0.1:5000/mlflow",
        "http://",
        "http:/localhost:5000",
        "sqlite:////tmp/a?b/mlflow.db",
        "sqlite:////tmp/a%20b/mlflow.db",
    ],
)
def test_an_address_that_cannot_be_meant_is_refused(address: str) -> None:
    with raises_code("bad_registry_address", "MLFLOW_TRACKING_URI"):
        connect(address)


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Path]]:
    """Address and folder of an MLflow server behind basic auth, set up as docs/operations.md
    says."""
    if importlib.util.find_spec("flask_wtf") is None:
        pytest.skip("Flask-WTF is not installed (make setup)")
    folder = tmp_path_factory.mktemp("guarded")
    shipped = (HERE.parents[2] / "deploy" / "basic_auth.ini").read_text()
    ini = folder / "basic_auth.ini"
    ini.write_text(
        shipped.replace(
            "postgresql://mlflow@postgres:5432/mlflow_auth",
            # a password's hash is slow to compute, by design
            f"sqlite:///{folder / 'auth.db'}\nauth_cache_ttl_seconds = 600",
        )
    )
    assert "sqlite" in ini.read_text()
    settings = {
        "MLFLOW_BACKEND_STORE_URI": f"sqlite:///{folder / 'mlflow.db'}",
        "MLFLOW_ARTIFACTS_DESTINATION": str(folder / "artifacts"),
        "MLFLOW_AUTH_CONFIG_PATH": str(ini),
        "MLFLOW_AUTH_ADMIN_USERNAME": ADMIN,
        "MLFLOW_AUTH_ADMIN_PASSWORD": PASSWORD,
        "MLFLOW_FLASK_SERVER_SECRET_KEY": "signs-forms-in-the-test",
    }
    with mlflow_server(folder, settings, "--app-name", "basic-auth") as address:
        yield address, folder


def be(monkeypatch: pytest.MonkeyPatch, user: str | None, password: str | None) -> None:
    for name, value in (("MLFLOW_TRACKING_USERNAME", user), ("MLFLOW_TRACKING_PASSWORD", password)):
        if value is None:
            monkeypatch.delenv(name, raising=False)
        else:
            monkeypatch.setenv(name, value)


@pytest.mark.slow
def test_a_registry_behind_basic_auth(
    guarded: tuple[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    address, _ = guarded
    be(monkeypatch, None, None)
    with raises_code("registry_refused", "MLFLOW_TRACKING_USERNAME", "MLFLOW_TRACKING_PASSWORD"):
        Store(address).resolve("acceptance_table", "tiny", 1)
    be(monkeypatch, ADMIN, "not-the-password")
    with raises_code("registry_refused", "user keeper") as refused:
        publish(Store(address), table("f" * 64), tmp_path / "table")
    assert "not-the-password" not in str(refused.value)
    be(monkeypatch, ADMIN, PASSWORD)
    store = Store(address)
    made = publish(store, table("f" * 64), tmp_path / "table")
    store.set_alias(made, "champion")
    assert (
        store.download(store.resolve("acceptance_table", "tiny", "champion"), tmp_path / "back")
        / "artifact.json"
    ).is_file()


@pytest.mark.slow
# by the import of the admin's client
@pytest.mark.filterwarnings("ignore:starlette.middleware.wsgi is deprecated")
def test_who_may_only_read_is_told_so(
    guarded: tuple[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mlflow.server import get_app_client

    address, _ = guarded
    be(monkeypatch, ADMIN, PASSWORD)
    made = publish(Store(address), table("f" * 64, accepted=2), tmp_path / "table")
    admin = get_app_client("basic-auth", tracking_uri=address)
    admin.create_user("ann", "anns-own-password")
    be(monkeypatch, "ann", "anns-own-password")
    store = Store(address)
    assert store.resolve("acceptance_table", "tiny", made.version).digest == made.digest
    with raises_code("registry_refused", "ann", "EDIT"):
        store.set_alias(made, "champion")
    be(monkeypatch, ADMIN, PASSWORD)
    admin.grant_user_permission("ann", "registered_model", "acceptance_table.tiny", "EDIT")
    be(monkeypatch, "ann", "anns-own-password")
    store.set_alias(made, "champion")
    assert store.get_aliases("acceptance_table", "tiny")["champion"] == made.version


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:starlette.middleware.wsgi is deprecated")
def test_the_workers_user_is_no_admin_and_publishes(
    guarded: tuple[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What compose runs before the worker: twice, because compose does so at every start."""
    from mlflow.server import get_app_client

    address, _ = guarded
    be(monkeypatch, ADMIN, PASSWORD)
    publish(Store(address), table("f" * 64, accepted=3), tmp_path / "table")
    made = {
        "MLFLOW_TRACKING_URI": address,
        "WORKER_USERNAME": "worker",
        "WORKER_PASSWORD": "workers-own-password",
        "EDIT_PAIRS": "tiny",
    }
    for _ in range(2):
        done = subprocess.run(
            [sys.executable, str(HERE.parents[2] / "deploy" / "users.py")],
            env={**os.environ, **made},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
    assert not get_app_client("basic-auth", tracking_uri=address).get_user("worker").is_admin
    be(monkeypatch, "worker", "workers-own-password")
    store = Store(address)
    store.set_alias(publish(store, table("f" * 64, accepted=4), tmp_path / "newer"), "champion")


@pytest.mark.slow
def test_the_password_lies_nowhere(
    guarded: tuple[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    address, folder = guarded
    be(monkeypatch, ADMIN, PASSWORD)
    publish(Store(address), table("f" * 64, accepted=1), tmp_path / "table")
    forms = [PASSWORD.encode(), base64.b64encode(f"{ADMIN}:{PASSWORD}".encode())]
    files = [path for place in (folder, tmp_path) for path in place.rglob("*") if path.is_file()]
    assert {"mlflow.db", "auth.db", "mlflow.log", "artifact.json"} <= {path.name for path in files}
    assert [path for path in files if any(form in path.read_bytes() for form in forms)] == []
