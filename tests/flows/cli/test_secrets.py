"""Secrets come from the environment and go nowhere else: a whole loop runs with some set, and then
they are looked for everywhere."""

from __future__ import annotations

import base64
import gzip
import importlib.util
import os
import sqlite3
import subprocess
import sys
import urllib.parse
from pathlib import Path

import pytest

from tests.support.loop.secrets import SECRETS, leaks
from tests.support.paths import REPO
from tests.support.server.processes import mlflow_server

LOOP = """
import sys
from pathlib import Path
from draftwell.flows.orchestration.loop_flow import draftwell
from draftwell.flows.settings import PipelineSettings

done = draftwell(
    PipelineSettings(
        pair=sys.argv[1], prompts=Path(sys.argv[2]), collect_prompts=8, max_tokens=16,
        calibrate_prompts=2, tune_prompts=2, trials=3, bench_prompts=2,
        threads=1,
    )
)
print("deployed" if done["bundle"] else "refused")
"""


def test_the_search_finds_what_is_planted(tmp_path: Path) -> None:
    """In every kind of file that the loop leaves; without this, an empty search would prove
    nothing."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    secret = SECRETS["HF_TOKEN"]
    (tmp_path / "log").write_text(f"…{secret}…")
    pq.write_table(pa.table({"x": [secret * 50]}), tmp_path / "shard.parquet", compression="zstd")
    with sqlite3.connect(tmp_path / "kept.db") as database:
        database.execute("PRAGMA journal_mode = WAL")
        database.execute("CREATE TABLE t (x TEXT)")
        database.execute("INSERT INTO t VALUES (?)", (secret,))
    (tmp_path / "deep" / "er").mkdir(parents=True)
    (tmp_path / "deep" / "er" / "header").write_bytes(
        base64.b64encode(b"keeper:" + SECRETS["MLFLOW_TRACKING_PASSWORD"].encode())
    )
    (tmp_path / "address").write_text(
        "http://keeper:"
        + urllib.parse.quote(SECRETS["MLFLOW_TRACKING_PASSWORD"], safe="")
        + "@host"
    )
    (tmp_path / "packed.gz").write_bytes(gzip.compress(secret.encode()))
    (tmp_path / "clean").write_text("keeper")
    found = {line.partition(":")[0] for line in leaks(tmp_path, SECRETS)}
    assert {"log", "shard.parquet", "kept.db", "deep/er/header", "address", "packed.gz"} <= found
    assert "clean" not in found


def run_loop(
    work: Path, pair_file: Path, prompts_file: Path, more: dict[str, str]
) -> subprocess.CompletedProcess[str]:
    """The pipeline in a process of its own, with everything that it writes below one folder, and
    every logger at its loudest."""
    environment = {
        **os.environ,
        **SECRETS,
        "DRAFTWELL_HOME": str(work / "draftwell"),
        "DRAFTWELL_MODELS": str(work / "models"),
        "PREFECT_HOME": str(work / "prefect"),
        "HOME": str(work / "home"),
        "TMPDIR": str(work / "tmp"),
        "PREFECT_LOGGING_LEVEL": "DEBUG",
        "PREFECT_RESULTS_PERSIST_BY_DEFAULT": "true",
        "PYTHONPATH": str(REPO),
        "PREFECT_LOCAL_STORAGE_PATH": str(work / "results"),
        "PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS": "300",
        **more,
    }
    for name in ("home", "tmp"):
        (work / name).mkdir(exist_ok=True)
    done = subprocess.run(
        [sys.executable, "-c", LOOP, str(pair_file), str(prompts_file)],
        cwd=work,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=2400,
    )
    (work / "stdout.log").write_text(done.stdout)
    (work / "stderr.log").write_text(done.stderr)
    return done


@pytest.mark.slow
def test_a_whole_loop_leaves_no_secret_anywhere(
    tmp_path: Path, pair_file: Path, prompts_file: Path
) -> None:
    """Registry behind basic auth: the password is really used, and sent with every request."""
    if importlib.util.find_spec("flask_wtf") is None:
        pytest.skip("Flask-WTF is not installed (make setup)")
    server, work = tmp_path / "server", tmp_path / "work"
    server.mkdir()
    work.mkdir()
    ini = server / "basic_auth.ini"
    ini.write_text(
        # a checked password is believed for a while: its hash is slow to compute, by design
        "[mlflow]\ndefault_permission = READ\nauth_cache_ttl_seconds = 600\n"
        f"database_uri = sqlite:///{server / 'auth.db'}\n"
    )
    settings = {
        "MLFLOW_BACKEND_STORE_URI": f"sqlite:///{server / 'mlflow.db'}",
        "MLFLOW_ARTIFACTS_DESTINATION": str(server / "artifacts"),
        "MLFLOW_AUTH_CONFIG_PATH": str(ini),
        "MLFLOW_AUTH_ADMIN_USERNAME": SECRETS["MLFLOW_TRACKING_USERNAME"],
        "MLFLOW_AUTH_ADMIN_PASSWORD": SECRETS["MLFLOW_TRACKING_PASSWORD"],
        "MLFLOW_FLASK_SERVER_SECRET_KEY": "signs-forms",
        "AWS_SECRET_ACCESS_KEY": SECRETS["AWS_SECRET_ACCESS_KEY"],
    }
    with mlflow_server(server, settings, "--app-name", "basic-auth") as address:
        done = run_loop(work, pair_file, prompts_file, {"MLFLOW_TRACKING_URI": address})
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.strip().endswith("deployed")
    there = {path.name for path in tmp_path.rglob("*") if path.is_file()}
    assert {
        "prefect.db",
        "mlflow.db",
        "mlflow.log",
        "manifest.json",
        "shard-00000.parquet",
        "bench.json",
        "tuning.html",
    } <= there
    assert leaks(tmp_path, SECRETS) == []


@pytest.mark.slow
def test_a_loop_that_fails_tells_no_secret(
    tmp_path: Path, pair_file: Path, prompts_file: Path
) -> None:
    """Errors, tracebacks and Prefect's log of them are where passwords usually get out."""
    nobody = {"MLFLOW_TRACKING_URI": "http://127.0.0.1:9", "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0"}
    done = run_loop(tmp_path, pair_file, prompts_file, nobody)
    assert done.returncode != 0
    assert "the registry at http://127.0.0.1:9" in done.stderr
    assert leaks(tmp_path, SECRETS) == []
