"""docs/backup.md and deploy/: what they say is run here: backup and restore, MLflow and Prefect
on PostgreSQL, an S3 store."""

from __future__ import annotations

import importlib.util
import itertools
import json
import os
import re
import shutil
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import yaml

from draftwell.registry.bundles.build import build_bundle
from draftwell.registry.bundles.retention import prune
from draftwell.registry.pairs import fetch
from draftwell.registry.pairs.catalogue import DEFAULT
from draftwell.registry.promotion import promote, rollback
from draftwell.registry.promotion_log import history
from draftwell.registry.releases import find_release, record_gate
from draftwell.registry.store import Store
from draftwell.serving.artifacts.acceptance_table import AcceptanceTable
from draftwell.serving.errors import DraftwellError
from draftwell.serving.server.settings import ServerSettings
from tests.registry.killed_publisher import pair_in
from tests.support.errors import raises_code
from tests.support.loop.publishing import publish, release, table, verdict
from tests.support.paths import REPO
from tests.support.server import processes as servers

PAGE = (REPO / "docs" / "backup.md").read_text(encoding="utf-8")
SCRIPTS = REPO / "deploy" / "backup"
COMPOSE: dict[str, Any] = yaml.safe_load(
    (REPO / "deploy" / "compose.yaml").read_text(encoding="utf-8")
)
EXAMPLE = (REPO / "deploy" / "env.example").read_text(encoding="utf-8")
MARK = "f" * 64
PASSWORDS = {
    "MLFLOW_DB_PASSWORD": "mlflows-own'secret",
    "PREFECT_DB_PASSWORD": "prefects-own-secret",
}


def documented(name: str) -> str:
    """A script that the page names."""
    assert f"deploy/backup/{name}.sh" in PAGE
    return (SCRIPTS / f"{name}.sh").read_text(encoding="utf-8")


def ran(
    *command: str, cwd: Path = REPO, code: int = 0, **environment: str
) -> subprocess.CompletedProcess[str]:
    """A command that ends with a code, beside what the environment of the tests says."""
    done = subprocess.run(
        command,
        cwd=cwd,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == code, (done.stdout + done.stderr)[-3000:]
    return done


def sh(script: str, environment: dict[str, str]) -> None:
    """Run a documented block as a reader would."""
    ran("bash", "-c", script, **environment)


def flow_runs(file: Path, *names: str) -> sqlite3.Connection:
    """A database of Prefect with runs of these names, open and with all in its journal, as a
    server's is."""
    file.parent.mkdir(parents=True, exist_ok=True)
    database = sqlite3.connect(file)
    database.execute("PRAGMA journal_mode = WAL")
    database.execute("PRAGMA wal_autocheckpoint = 0")
    database.execute("CREATE TABLE flow_run (name TEXT)")
    database.executemany("INSERT INTO flow_run VALUES (?)", [(name,) for name in names])
    database.commit()
    return database


def runs_in(file: Path) -> list[str]:
    found = sqlite3.connect(file).execute("SELECT name FROM flow_run").fetchall()
    return [name for (name,) in found]


def test_every_script_is_run_here() -> None:
    names = {"backup", "restore", "dump", "undump", "objects"}
    assert {path.stem for path in SCRIPTS.iterdir()} == names
    assert all(documented(name) for name in names)


# One machine
# ------------------------------------------------------------


@pytest.fixture
def machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, empty_database: Path
) -> dict[str, str]:
    """A home with a registry of its own, and a Prefect home."""
    home, prefect = tmp_path / "home", tmp_path / "prefect"
    (home / "mlflow").mkdir(parents=True)
    prefect.mkdir()
    shutil.copyfile(empty_database, home / "mlflow" / "mlflow.db")
    monkeypatch.setenv("DRAFTWELL_HOME", str(home))
    monkeypatch.delenv("MLFLOW_TRACKING_URI")
    return {
        "DRAFTWELL_HOME": str(home),
        "PREFECT_HOME": str(prefect),
        "BACKUP": str(tmp_path / "backup"),
    }


ASK = """
import json, sys
from pathlib import Path
from draftwell.registry.store import Store

store = Store()
found = store.resolve("acceptance_table", "tiny", "champion")
store.download(found, Path(sys.argv[1]))
versions = [each.version for each in store.versions("acceptance_table", "tiny")]
print(json.dumps({"champion": found.version, "digest": found.digest, "versions": versions}))
"""


@pytest.mark.slow
def test_backup_and_restore_of_one_machine(machine: dict[str, str], tmp_path: Path) -> None:
    """Everything is lost, and is there again; what a process has written but not yet moved out of
    the journal too."""
    home = Path(machine["DRAFTWELL_HOME"])
    store = Store()
    assert str(home) in store.uri
    first = publish(store, table(MARK), tmp_path / "table")
    store.set_alias(first, "champion")
    trace = home / "pairs" / "tiny" / "float32" / "traces" / "shard-00000.parquet"
    trace.parent.mkdir(parents=True)
    trace.write_bytes(b"rows")
    (home / "models" / "big").mkdir(parents=True)
    (home / "models" / "big" / "model.safetensors").write_bytes(b"weights")
    prefect = flow_runs(Path(machine["PREFECT_HOME"]) / "prefect.db", "from the journal")

    sh(documented("backup"), machine)
    prefect.execute("INSERT INTO flow_run VALUES ('too late')")
    prefect.commit()
    prefect.close()
    publish(store, table(MARK, accepted=1), tmp_path / "later")
    store.client.set_registered_model_alias(first.name, "champion", "2")
    for place in (home, Path(machine["PREFECT_HOME"])):
        shutil.rmtree(place)

    sh(documented("restore"), machine)
    # In a process of its own, as nothing may run meanwhile: this one still has the lost database
    # open.
    done = ran(sys.executable, "-c", ASK, str(tmp_path / "loaded"), **machine)
    assert json.loads(done.stdout) == {"champion": 1, "digest": first.digest, "versions": [1]}
    assert AcceptanceTable.load(tmp_path / "loaded", fingerprint=MARK).accepted == [3] * 20
    assert trace.read_bytes() == b"rows"
    assert not (home / "models").exists(), "models can be fetched again"
    assert runs_in(Path(machine["PREFECT_HOME"]) / "prefect.db") == ["from the journal"], (
        "a copy with cp would have lost it"
    )


def test_a_backup_as_it_stands_on_the_page(machine: dict[str, str], tmp_path: Path) -> None:
    """Nothing is set: the defaults are those of the programs. A home without databases is no backup
    of nothing."""
    usual = tmp_path / "usual"
    shutil.copytree(machine["DRAFTWELL_HOME"], usual / ".draftwell")
    (usual / ".prefect").mkdir()
    environment = {name: value for name, value in os.environ.items() if name not in machine} | {
        "HOME": str(usual)
    }

    def back_up() -> int:
        return subprocess.run(
            ["bash", "-c", documented("backup")],
            cwd=usual,
            env=environment,
            capture_output=True,
            check=False,
        ).returncode

    assert back_up() != 0
    assert not (usual / ".prefect" / "prefect.db").exists(), (
        "it made an empty database in the place of the one that it did not find"
    )
    flow_runs(usual / ".prefect" / "prefect.db").close()
    assert back_up() == 0
    assert {path.name for path in (usual / "draftwell-backup").iterdir()} == {
        "mlflow.db",
        "prefect.db",
        "prefect-home",
        "home.tar.gz",
    }


@pytest.mark.parametrize("prefect", ["home/prefect", ".draftwell/prefect"])
def test_the_database_of_make_is_backed_up_and_no_other(
    machine: dict[str, str], tmp_path: Path, prefect: str
) -> None:
    """`make prefect-server` keeps it in .draftwell/prefect of the checkout, wherever the home is; a
    foreign one is in ~/.prefect."""
    said = subprocess.run(
        ["make", "-n", "prefect-server"], cwd=REPO, capture_output=True, text=True, check=True
    ).stdout
    assert f'PREFECT_HOME="${{PREFECT_HOME:-{REPO}/.draftwell/prefect}}"' in said
    del machine["PREFECT_HOME"]
    environment = {
        **{name: value for name, value in os.environ.items() if name != "PREFECT_HOME"},
        **machine,
        "HOME": str(tmp_path),
    }
    database = tmp_path / prefect / "prefect.db"
    server = flow_runs(database, "ours", "from the journal")
    flow_runs(tmp_path / ".prefect" / "prefect.db", "foreign").close()

    subprocess.run(["bash", "-c", documented("backup")], cwd=tmp_path, env=environment, check=True)
    names = subprocess.run(
        ["tar", "-tzf", str(tmp_path / "backup" / "home.tar.gz")],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert "prefect.db" not in names, "a live database, copied as a file"
    server.close()
    shutil.rmtree(machine["DRAFTWELL_HOME"])
    shutil.rmtree(database.parent, ignore_errors=True)
    subprocess.run(["bash", "-c", documented("restore")], cwd=tmp_path, env=environment, check=True)
    assert runs_in(database) == ["ours", "from the journal"]
    assert runs_in(tmp_path / ".prefect" / "prefect.db") == ["foreign"], (
        "what was not backed up is not written over"
    )


def test_the_databases_are_dumped_where_compose_runs_them(tmp_path: Path) -> None:
    """A stub of `docker` looks at what it is asked: a service that there is, as the role that may,
    and files on this side."""
    stub = tmp_path / "docker"
    stub.write_text(
        '#!/bin/bash\necho "$*" >> "$BACKUP/asked"\n[[ $* == *pg_dump* ]] && echo "dump of '
        '${!#}" || cat >> "$BACKUP/given"\n'
    )
    stub.chmod(0o755)
    place = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "BACKUP": str(tmp_path / "backup")}
    sh(documented("dump"), place)
    sh(documented("undump"), place)
    asked = (tmp_path / "backup" / "asked").read_text().splitlines()
    assert len(asked) == 6
    assert all(
        line.startswith(
            "compose --file deploy/compose.yaml exec -T --env PGUSER=postgres postgres pg_"
        )
        for line in asked
    )
    names = ("mlflow", "mlflow_auth", "prefect")
    assert [(tmp_path / "backup" / f"{name}.dump").read_text() for name in names] == [
        f"dump of {name}\n" for name in names
    ]
    assert (tmp_path / "backup" / "given").read_text() == "".join(
        f"dump of {name}\n" for name in names
    )


def test_objects_and_the_workers_home_are_copied_and_brought_back(tmp_path: Path) -> None:
    """A stub of `docker` plays services that there are; the home goes out and in by a file."""
    stub = tmp_path / "docker"
    stub.write_text(
        '#!/bin/bash\necho "$*" >> "$BACKUP/asked"\n'
        '[[ $* == *" -cz ."* ]] && echo home\n'
        '[[ $* == *" -xz" ]] && cat >> "$BACKUP/given"\nexit 0\n'
    )
    stub.chmod(0o755)
    place = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "BACKUP": str(tmp_path)}
    for part in ("save", "bring"):
        ran("bash", "deploy/backup/objects.sh", part, **place)
    asked = (tmp_path / "asked").read_text()
    assert re.findall(r"mirror (store/mlflow /backup/\w+|/backup/\w+ store/mlflow)", asked) == [
        "store/mlflow /backup/artifacts",
        "/backup/artifacts store/mlflow",
    ]
    for service in ("bucket", "worker"):
        assert service in COMPOSE["services"]
        assert asked.count(f" {service} ") == 2
    assert (tmp_path / "given").read_text() == "home\n"
    assert "save or bring" in ran("bash", "deploy/backup/objects.sh", code=2).stderr


def test_restore_over_what_is_there_mixes_nothing(machine: dict[str, str], tmp_path: Path) -> None:
    """A journal that outlived its database would be played into the restored one."""
    database = Path(machine["PREFECT_HOME"]) / "prefect.db"
    flow_runs(database, "kept").close()
    sh(documented("backup"), machine)
    for suffix in ("-wal", "-shm"):
        Path(f"{database}{suffix}").write_bytes(b"of another database")
    sh(documented("restore"), machine)
    assert not Path(f"{database}-wal").exists()
    assert runs_in(database) == ["kept"]


# Servers
# ------------------------------------------------------------


@pytest.fixture(scope="module")
def database() -> Iterator[servers.Postgres]:
    """PostgreSQL with the roles and databases that deploy/databases.sh makes."""
    with servers.postgres() as server:
        ran("bash", "deploy/databases.sh", **server.environment, **PASSWORDS)
        yield server


def mlflow_on(database: servers.Postgres, folder: Path) -> dict[str, str]:
    """The environment of compose.yaml's MLflow, for a server on this machine."""
    if importlib.util.find_spec("psycopg2") is None:
        pytest.skip("psycopg2 is not installed (make setup)")
    said = COMPOSE["services"]["mlflow"]["environment"]["MLFLOW_BACKEND_STORE_URI"]
    assert said == "postgresql://mlflow@postgres:5432/mlflow"
    return {
        "MLFLOW_BACKEND_STORE_URI": said.replace("postgres:5432", f"127.0.0.1:{database.port}"),
        "PGPASSWORD": PASSWORDS["MLFLOW_DB_PASSWORD"],
        "MLFLOW_ARTIFACTS_DESTINATION": str(folder / "artifacts"),
    }


@pytest.mark.slow
def test_each_role_has_its_own_databases(database: servers.Postgres) -> None:
    owners = database.sql(
        "SELECT datname, pg_get_userbyid(datdba) FROM pg_database WHERE datname !~ "
        "'template|postgres' ORDER BY 1"
    )
    assert owners.splitlines() == ["mlflow|mlflow", "mlflow_auth|mlflow", "prefect|prefect"]
    assert (
        database.sql(
            "SELECT count(*) FROM pg_roles WHERE rolname IN ('mlflow', 'prefect') AND rolsuper"
        )
        == "0"
    )


@pytest.mark.slow
def test_mlflow_on_postgresql_with_dump_and_restore(
    database: servers.Postgres, tmp_path: Path
) -> None:
    settings = mlflow_on(database, tmp_path)
    with servers.mlflow_server(tmp_path, settings) as address:
        store = Store(address)
        made = publish(store, table(MARK), tmp_path / "table", metrics={"ece": 0.125})
        again = publish(store, table(MARK), tmp_path / "same")
        store.set_alias(made, "champion")
        assert again.version == made.version
        sh(
            documented("dump"),
            {**database.environment, "RUN": "", "BACKUP": str(tmp_path / "backup")},
        )
        publish(store, table(MARK, accepted=1), tmp_path / "later")
    assert database.sql("SELECT count(*) FROM model_versions", "mlflow") == "2"
    # both lost, and of mlflow_auth nothing changed: each way of restoring
    for name in ("mlflow", "prefect"):
        database.sql(f"DROP DATABASE {name} WITH (FORCE)")
    sh(
        documented("undump"),
        {**database.environment, "RUN": "", "BACKUP": str(tmp_path / "backup")},
    )
    assert database.sql("SELECT count(*) FROM model_versions", "mlflow") == "1"
    with servers.mlflow_server(tmp_path, settings) as address:
        store = Store(address)
        back = store.resolve("acceptance_table", "tiny", "champion")
        assert (back.digest, back.version) == (made.digest, made.version)
        assert (
            AcceptanceTable.load(
                store.download(back, tmp_path / "loaded"), fingerprint=MARK
            ).accepted
            == [3] * 20
        )
        assert store.client.get_run(back.run_id).data.metrics["ece"] == 0.125
    assert PASSWORDS["MLFLOW_DB_PASSWORD"] not in (tmp_path / "mlflow.log").read_text()


@pytest.fixture
def registry(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """Address of an MLflow on PostgreSQL and S3, whose server alone has their keys; or of the one
    that DRAFTWELL_TEST_STORE names, which has no pair `tiny`."""
    if "DRAFTWELL_TEST_STORE" in os.environ:
        yield os.environ["DRAFTWELL_TEST_STORE"]
        return
    said = COMPOSE["services"]["mlflow"]["environment"]
    with servers.s3_server("mlflow") as endpoint:
        settings = {
            **mlflow_on(request.getfixturevalue("database"), tmp_path),
            "MLFLOW_S3_ENDPOINT_URL": endpoint,
            "MLFLOW_ARTIFACTS_DESTINATION": said["MLFLOW_ARTIFACTS_DESTINATION"],
            "AWS_DEFAULT_REGION": said["AWS_DEFAULT_REGION"],
            "AWS_ACCESS_KEY_ID": "key-of-the-test",
            "AWS_SECRET_ACCESS_KEY": "secret-of-the-test",
        }
        assert "AWS_ACCESS_KEY_ID" not in os.environ
        with servers.mlflow_server(tmp_path, settings) as address:
            yield address
        assert "secret-of-the-test" not in (tmp_path / "mlflow.log").read_text()


@pytest.mark.slow
def test_a_release_from_its_gate_to_its_end_on_postgresql_and_s3(
    registry: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DRAFTWELL_MODELS", str(tmp_path / "models"))
    store, spec, report = Store(registry), pair_in(tmp_path), tmp_path / "bench.json"
    files, dist = fetch(spec), tmp_path / "dist"
    report.write_text("{}")
    for number in (1, 2, 3):
        made = release(store, spec, files, tmp_path / str(number), accepted=number)
        judged = verdict(made, beside=number - 1 or None)
        record_gate(store, judged, words="word " * 2000, files=[report])
        promote(store, "tiny", "cpu", number)
        build_bundle(store, spec, files, out=dist)
    assert rollback(store, "tiny", "cpu", "slow")[1].version == 2
    assert [path.name for path in prune(dist / "tiny", keep=1)] == ["1-cpu"]
    for names in (("release.tiny.cpu", "old"), ("old", "release.tiny.cpu")):
        store.client.rename_registered_model(*names)
    assert find_release(store, "tiny", "cpu", "champion").version == 2
    changes = [entry.change.what for entry in history(store, "tiny", "cpu")]
    assert changes == ["promotion"] * 3 + ["rollback"]
    last = find_release(store, "tiny", "cpu", 3).published
    store.delete(last)
    with raises_code("not_registered"):
        find_release(store, "tiny", "cpu", 3)
    with pytest.raises(DraftwellError):
        store.download(last, tmp_path / "deleted")

    def publish_one(accepted: int) -> int:
        made = table(MARK, accepted)
        return publish(Store(registry), made, tmp_path / f"table-{accepted}").version

    with ThreadPoolExecutor(3) as pool:
        found = list(pool.map(publish_one, (0, 4, 5)))  # none of them is in a release
    assert len(set(found)) == 3
    assert min(found) > 3


FLOW = """
from prefect import flow, task

@task
def double(x: int) -> int:
    return 2 * x

@flow(name="on postgresql")
def run() -> int:
    return sum(double.map([1, 2, 3]).result())

assert run() == 12
"""


@pytest.mark.slow
def test_prefect_on_postgresql(database: servers.Postgres, tmp_path: Path) -> None:
    said = COMPOSE["services"]["prefect"]["environment"]
    assert (
        said["PREFECT_API_DATABASE_CONNECTION_URL"]
        == "postgresql+asyncpg://prefect@postgres:5432/prefect"
    )
    address = said["PREFECT_API_DATABASE_CONNECTION_URL"].replace(
        "postgres:5432", f"127.0.0.1:{database.port}"
    )
    who = "keeper:a-password-of-the-test"
    settings = {
        "PREFECT_API_DATABASE_CONNECTION_URL": address,
        "PGPASSWORD": PASSWORDS["PREFECT_DB_PASSWORD"],
        "PREFECT_SERVER_API_AUTH_STRING": who,
    }
    with servers.prefect_server(tmp_path, settings) as api:
        client = {"PREFECT_API_URL": api, "PREFECT_HOME": str(tmp_path / "client")}
        flow = (sys.executable, "-c", FLOW)
        ran(*flow, cwd=tmp_path, code=1, PREFECT_CLIENT_MAX_RETRIES="0", **client)  # turned away
        done = ran(*flow, cwd=tmp_path, PREFECT_API_AUTH_STRING=who, **client)
    assert (
        database.sql("SELECT count(*) FROM flow_run WHERE state_type = 'COMPLETED'", "prefect")
        == "1"
    )
    for secret in (PASSWORDS["PREFECT_DB_PASSWORD"], who):
        assert secret not in (tmp_path / "prefect.log").read_text() + done.stdout + done.stderr


# What stands in deploy/
# ------------------------------------------------------------


def test_images_are_pinned_by_digest() -> None:
    """A tag can be moved; that of an image of our own names its version."""
    images = {name: service["image"] for name, service in COMPOSE["services"].items()}
    assert set(images) == {
        "postgres",
        "minio",
        "bucket",
        "mlflow",
        "users",
        "prefect",
        "worker",
        "server",
    }
    pinned = re.compile(r"[\w./-]+:(RELEASE\.)?\d[\w.-]+@sha256:[0-9a-f]{64}")
    for name, image in images.items():
        built = "build" in COMPOSE["services"][name]
        assert re.fullmatch(r"draftwell:\d+\.\d+\.\d+", image) if built else pinned.fullmatch(image)
    (base,) = re.findall(
        r"^FROM (\S+)$", (REPO / "deploy" / "Dockerfile").read_text(), re.MULTILINE
    )
    assert pinned.fullmatch(base)


def test_no_secret_stands_in_deploy() -> None:
    """Whatever is a secret is asked of the environment, and must be there; the example holds
    placeholders only."""
    secret = re.compile(r"PASSWORD|SECRET|AUTH_STRING|ACCESS_KEY|API_KEY|TOKEN|ROOT_USER|USERNAME")
    asked = set()
    for service in COMPOSE["services"].values():
        for name, value in service["environment"].items():
            if secret.search(name):
                wanted = re.fullmatch(r"\$\{(\w+)(:\?give it a value in deploy/\.env|:-)\}", value)
                assert wanted, f"{name} is written out"
                asked.add(wanted[1])
    given = dict(
        line.split("=", 1) for line in EXAMPLE.splitlines() if line and not line.startswith("#")
    )
    assert set(given) == asked
    assert {re.sub(r"<\w+>", "", value) for value in given.values()} <= {"", ":"}
    ignored = subprocess.run(
        ["git", "-c", "safe.directory=*", "check-ignore", "deploy/.env"],
        cwd=REPO,
        capture_output=True,
        check=False,
    )
    assert ignored.returncode in (0, 128), "deploy/.env could be committed"


def test_the_server_reads_its_keys_from_a_file_that_git_ignores() -> None:
    """A variable would stand in `docker inspect`, and in each child's environment."""
    server = COMPOSE["services"]["server"]
    options = dict(itertools.pairwise(server["command"]))
    assert (options["--api-key-file"], server["secrets"]) == ("/run/secrets/keys", ["keys"])
    assert COMPOSE["secrets"] == {"keys": {"file": "./keys"}}
    assert [name for name in server["environment"] if "KEY" in name] == []
    assert "/deploy/keys" in (REPO / ".gitignore").read_text().splitlines()


def test_addresses_carry_no_password_and_each_service_gets_its_own() -> None:
    for name, service in COMPOSE["services"].items():
        for value in service["environment"].values():
            assert not re.search(r"://[^/]*:[^/]*@", value), f"{name}: {value}"
    worker = set(COMPOSE["services"]["worker"]["environment"])
    assert not {each for each in worker if each.startswith(("PG", "AWS", "POSTGRES", "MINIO"))}, (
        "a worker needs no database or store"
    )
    for service in COMPOSE["services"].values():
        assert all(port.startswith("127.0.0.1:") for port in service.get("ports", []))


def test_what_the_image_copies_is_there() -> None:
    """`prefect.yaml` too, which says what is deployed; and all that the build needs is let through
    by .dockerignore."""
    copied = [
        word
        for line in re.findall(
            r"^COPY (.+)$", (REPO / "deploy" / "Dockerfile").read_text(), re.MULTILINE
        )
        for word in line.split()[:-1]
    ]
    let_through = {
        line[1:]
        for line in (REPO / ".dockerignore").read_text().splitlines()
        if line.startswith("!")
    }
    assert {word for word in copied if not (REPO / word).exists()} == set()
    assert set(copied) == let_through


def volumes_of(service: str) -> dict[str, str]:
    """Name of a volume → where it is mounted, `:ro` at the end where it can only be read."""
    return dict(volume.split(":", 1) for volume in COMPOSE["services"][service]["volumes"])


def test_the_server_records_where_the_drift_loop_reads_and_follows_what_the_worker_deploys() -> (
    None
):
    server, worker = COMPOSE["services"]["server"], volumes_of("worker")
    options = dict(itertools.pairwise(server["command"]))
    assert volumes_of("server") == {
        "state": "/var/lib/state",
        "draftwell": f"{worker['draftwell']}:ro",
        "spool": worker["spool"],
        "dist": f"{worker['dist']}:ro",
    }
    home = COMPOSE["services"]["worker"]["environment"]["DRAFTWELL_HOME"]
    assert worker["spool"] == f"{home}/spool"
    # what `draftwell monitor` reads by default
    assert options["--feedback-dir"] == f"{home}/spool/${{DRAFTWELL_PAIR:-{DEFAULT}}}"
    assert options["--bundle"] == f"{worker['dist']}/${{DRAFTWELL_PAIR:-{DEFAULT}}}/current"
    assert "--feedback-text" in options, "recalibration needs the texts"
    known = {f"--{name.replace('_', '-')}" for name in ServerSettings.model_fields}
    assert {word for word in server["command"] if word.startswith("--")} <= known
    for place in (options["--state-dir"], server["environment"]["DRAFTWELL_HOME"]):
        assert place.startswith("/var/lib/state")
    assert COMPOSE["services"]["worker"]["environment"]["HF_HOME"].startswith(home), (
        "bundles without weights link there"
    )
    assert {volume for name in ("server", "worker") for volume in volumes_of(name)} <= set(
        COMPOSE["volumes"]
    )
    made = re.search(
        r"install -d -o draftwell -g draftwell ((?:[^&]|\n)*?)(?:\n[A-Z]|$)",
        (REPO / "deploy" / "Dockerfile").read_text(),
    )
    assert made is not None
    assert {"/var/lib/state", worker["spool"], worker["draftwell"], worker["dist"]} <= set(
        made[1].replace("\\", " ").split()
    )


def test_neither_worker_nor_server_knows_mlflows_admin() -> None:
    services = COMPOSE["services"]
    admin = {
        name
        for name, service in services.items()
        if "MLFLOW_ADMIN_PASSWORD" in str(service["environment"])
    }
    assert admin == {"mlflow", "users"}
    assert services["worker"]["depends_on"]["users"] == {
        "condition": "service_completed_successfully"
    }
    assert (
        services["users"]["environment"]["WORKER_USERNAME"]
        == services["worker"]["environment"]["MLFLOW_TRACKING_USERNAME"]
    )
    assert {
        name
        for name in services["server"]["environment"]
        if re.search("MLFLOW|PREFECT|PASSWORD|TOKEN|^PG|^AWS", name)
    } == set()


MLFLOW_STAND_IN = """
import json, os, types

class MlflowException(Exception):
    error_code = "RESOURCE_ALREADY_EXISTS"

class Users:
    def __getattr__(self, name):
        def call(*words):
            print(json.dumps([name, *words]))
            if name == "create_user" and os.environ.get("KNOWN"):
                raise MlflowException()
        return call

class MlflowClient:
    def search_registered_models(self, max_results):
        return [types.SimpleNamespace(name=name) for name in ("verifier.tiny", "release.tiny.cpu", "promotions.tiny.cpu", "verifier.other", "release.tiny2.cpu")]

    def get_experiment_by_name(self, name):
        return types.SimpleNamespace(experiment_id="7") if name == "draftwell/tiny" else None
"""  # noqa: E501


@pytest.mark.parametrize("known", ["", "1"])
def test_the_workers_user_is_made_and_may_edit_what_is_named(tmp_path: Path, known: str) -> None:
    """deploy/users.py, with a stand-in for MLflow; tests/registry/test_access.py runs it on a real
    server."""
    (tmp_path / "mlflow").mkdir()
    (tmp_path / "mlflow" / "__init__.py").write_text(MLFLOW_STAND_IN)
    (tmp_path / "mlflow" / "exceptions.py").write_text("from mlflow import MlflowException\n")
    (tmp_path / "mlflow" / "server.py").write_text(
        "from mlflow import Users\ndef get_app_client(name, tracking_uri): return Users()\n"
    )
    environment = {
        "PYTHONPATH": str(tmp_path),
        "MLFLOW_TRACKING_URI": "http://mlflow",
        "MLFLOW_TRACKING_USERNAME": "keeper",
        "WORKER_USERNAME": "worker",
        "WORKER_PASSWORD": "its own",
        "EDIT_PAIRS": "tiny",
        "KNOWN": known,
    }
    command = (sys.executable, "deploy/users.py")
    done = ran(*command, **environment)
    again = (
        [["update_user_password", "worker", "its own"], ["update_user_admin", "worker", False]]
        if known
        else []
    )
    assert [json.loads(line) for line in done.stdout.splitlines()] == [
        ["create_user", "worker", "its own"],
        *again,
        *(
            ["grant_user_permission", "worker", "registered_model", name, "EDIT"]
            for name in ("verifier.tiny", "release.tiny.cpu", "promotions.tiny.cpu")
        ),
        ["grant_user_permission", "worker", "experiment", "7", "EDIT"],
    ]
    same = ran(*command, code=2, **{**environment, "WORKER_USERNAME": "keeper"})
    assert "must not be MLflow's admin" in same.stderr
    (tmp_path / "mlflow" / "server.py").write_text(
        "def get_app_client(name, tracking_uri): raise ConnectionError('refused\\nat length')\n"
    )
    away = ran(*command, code=1, **environment)
    assert away.stderr.count("\n") == 1
    assert away.stderr.startswith("users: MLflow at http://mlflow did not do it (refused)")
