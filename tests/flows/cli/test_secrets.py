"""Secrets come from the environment and go nowhere else: a whole loop runs with some set, and then they are looked for everywhere."""

from __future__ import annotations

import base64
import gzip
import importlib.util
import os
import sqlite3
import subprocess
import sys
import urllib.parse
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.paths import REPO
from tests.support.server.processes import mlflow_server

SECRETS = {
    "MLFLOW_TRACKING_USERNAME": "keeper",  # no secret itself, but half of what is sent
    "MLFLOW_TRACKING_PASSWORD": "tracking+pass/word=one",
    "AWS_ACCESS_KEY_ID": "AKIAOFTHETESTALONE",
    "AWS_SECRET_ACCESS_KEY": "s3/secret+of=the/test",
    "DRAFTWELL_API_KEY": "sk-draftwell-of-the-test",
    "OPENAI_API_KEY": "sk-openai-of-the-test",
    "HF_TOKEN": "hf_TokenOfTheTestAlone",
    "PREFECT_API_KEY": "pnu_key-of-the-test",
    "PGPASSWORD": "postgres-of-the-test",
}
LOOP = """
import sys
from pathlib import Path
from flows.orchestration.pipeline_flow import pipeline
from flows.settings import PipelineSettings

done = pipeline(PipelineSettings(pair=sys.argv[1], prompts=Path(sys.argv[2]), collect_prompts=8, collect_tokens=16, calibrate_prompts=2,
                                 tune_prompts=2, tune_tokens=8, trials=3, bench_prompts=2, bench_tokens=8, threads=1))
print("deployed" if done["bundle"] else "refused")
"""


def forms_of(secrets: dict[str, str]) -> dict[str, bytes]:
    """What to look for: each secret as it is, quoted for an address, in base64, and as the header of basic auth."""
    both = f"{secrets['MLFLOW_TRACKING_USERNAME']}:{secrets['MLFLOW_TRACKING_PASSWORD']}"
    forms = {"basic auth": base64.b64encode(both.encode())}
    for name, value in secrets.items():
        if name != "MLFLOW_TRACKING_USERNAME":
            forms |= {name: value.encode(), f"{name}, quoted": urllib.parse.quote(value, safe="").encode(),
                      f"{name}, base64": base64.b64encode(value.encode())}
    return forms


def contents(path: Path) -> Iterator[bytes]:
    """The bytes of a file, and what is packed in it."""
    data = path.read_bytes()
    yield data
    if data.startswith(b"PAR1"):
        import pyarrow.parquet as pq

        table = pq.read_table(path)
        yield repr(table.schema.metadata).encode()
        for column in table.columns:
            if str(column.type) == "string":
                yield "\n".join(str(value) for value in column.to_pylist()).encode()
    elif data.startswith(b"SQLite format 3"):  # with what is still in its journal
        with sqlite3.connect(f"file:{path}?mode=ro", uri=True) as database:
            yield "\n".join(database.iterdump()).encode()
    elif data.startswith(b"\x1f\x8b"):
        yield gzip.decompress(data)
    elif zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as packed:
            yield from (packed.read(name) for name in packed.namelist())


def leaks(place: Path, secrets: dict[str, str]) -> list[str]:
    """`file: secret` of every secret found below a folder."""
    forms = forms_of(secrets)
    found = []
    for path in sorted(place.rglob("*")):
        if path.is_file() and not path.is_symlink():
            texts = list(contents(path))
            found += [f"{path.relative_to(place)}: {name}" for name, form in forms.items() if any(form in text for text in texts)]
    return found


def test_the_search_finds_what_is_planted(tmp_path: Path) -> None:
    """In every kind of file that the loop leaves; without this, an empty search would prove nothing."""
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
    (tmp_path / "deep" / "er" / "header").write_bytes(base64.b64encode(b"keeper:" + SECRETS["MLFLOW_TRACKING_PASSWORD"].encode()))
    (tmp_path / "address").write_text("http://keeper:" + urllib.parse.quote(SECRETS["MLFLOW_TRACKING_PASSWORD"], safe="") + "@host")
    (tmp_path / "packed.gz").write_bytes(gzip.compress(secret.encode()))
    (tmp_path / "clean").write_text("keeper")
    found = {line.partition(":")[0] for line in leaks(tmp_path, SECRETS)}
    assert {"log", "shard.parquet", "kept.db", "deep/er/header", "address", "packed.gz"} <= found
    assert "clean" not in found


def run_loop(work: Path, pair_file: Path, prompts_file: Path, more: dict[str, str]) -> subprocess.CompletedProcess[str]:
    """The pipeline in a process of its own, with everything that it writes below one folder, and every logger at its loudest."""
    environment = {**os.environ, **SECRETS, "DRAFTWELL_HOME": str(work / "draftwell"), "DRAFTWELL_MODELS": str(work / "models"),
                   "PREFECT_HOME": str(work / "prefect"), "HOME": str(work / "home"), "TMPDIR": str(work / "tmp"),
                   "PREFECT_LOGGING_LEVEL": "DEBUG", "PREFECT_RESULTS_PERSIST_BY_DEFAULT": "true", "PYTHONPATH": str(REPO),
                   "PREFECT_LOCAL_STORAGE_PATH": str(work / "results"), "PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS": "300", **more}
    for name in ("home", "tmp"):
        (work / name).mkdir(exist_ok=True)
    done = subprocess.run([sys.executable, "-c", LOOP, str(pair_file), str(prompts_file)], cwd=work, env=environment, capture_output=True,
                          text=True, check=False, timeout=2400)
    (work / "stdout.log").write_text(done.stdout)
    (work / "stderr.log").write_text(done.stderr)
    return done


@pytest.mark.slow
def test_a_whole_loop_leaves_no_secret_anywhere(tmp_path: Path, pair_file: Path, prompts_file: Path) -> None:
    """Registry behind basic auth: the password is really used, and sent with every request."""
    if importlib.util.find_spec("flask_wtf") is None:
        pytest.skip("Flask-WTF is not installed: pip install 'draftwell[remote]'")
    server, work = tmp_path / "server", tmp_path / "work"
    server.mkdir()
    work.mkdir()
    ini = server / "basic_auth.ini"
    ini.write_text(f"[mlflow]\ndefault_permission = READ\ndatabase_uri = sqlite:///{server / 'auth.db'}\n")
    settings = {"MLFLOW_BACKEND_STORE_URI": f"sqlite:///{server / 'mlflow.db'}", "MLFLOW_ARTIFACTS_DESTINATION": str(server / "artifacts"),
                "MLFLOW_AUTH_CONFIG_PATH": str(ini), "MLFLOW_AUTH_ADMIN_USERNAME": SECRETS["MLFLOW_TRACKING_USERNAME"],
                "MLFLOW_AUTH_ADMIN_PASSWORD": SECRETS["MLFLOW_TRACKING_PASSWORD"], "MLFLOW_FLASK_SERVER_SECRET_KEY": "signs-forms",
                "AWS_SECRET_ACCESS_KEY": SECRETS["AWS_SECRET_ACCESS_KEY"]}
    with mlflow_server(server, settings, "--app-name", "basic-auth") as address:
        done = run_loop(work, pair_file, prompts_file, {"MLFLOW_TRACKING_URI": address})
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.strip().endswith("deployed")
    there = {path.name for path in tmp_path.rglob("*") if path.is_file()}
    assert {"prefect.db", "mlflow.db", "mlflow.log", "manifest.json", "shard-00000.parquet", "bench.json", "tuning.html"} <= there
    assert leaks(tmp_path, SECRETS) == []


@pytest.mark.slow
def test_a_loop_that_fails_tells_no_secret(tmp_path: Path, pair_file: Path, prompts_file: Path) -> None:
    """Errors, tracebacks and Prefect's log of them are where passwords usually get out."""
    nobody = {"MLFLOW_TRACKING_URI": "http://127.0.0.1:9", "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0"}
    done = run_loop(tmp_path, pair_file, prompts_file, nobody)
    assert done.returncode != 0
    assert "the registry at http://127.0.0.1:9" in done.stderr
    assert leaks(tmp_path, SECRETS) == []
