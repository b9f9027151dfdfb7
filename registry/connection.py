"""Reaching MLflow: where it is, how it is opened, and what its errors become.

MLflow is imported inside the functions: importing it takes a second, and `draftwell --help` must not pay for that.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from serving.runtime.pair_files import draftwell_home
from serving.runtime.types import DraftwellError

if TYPE_CHECKING:
    from mlflow import MlflowClient

SQLITE = "sqlite:///"


def default_uri() -> str:
    """`$MLFLOW_TRACKING_URI`, else a SQLite file in the home."""
    return os.environ.get("MLFLOW_TRACKING_URI") or f"{SQLITE}{draftwell_home() / 'mlflow' / 'mlflow.db'}"


def artifact_folder(uri: str) -> str | None:
    """Where a SQLite registry keeps files: beside the database. A server decides that itself (None)."""
    return str(Path(uri.removeprefix(SQLITE)).absolute().parent / "artifacts") if uri.startswith(SQLITE) else None


def connect(uri: str) -> MlflowClient:
    """A client for the registry at `uri`; a SQLite database is created by the first, the others wait for it."""
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
    os.environ.setdefault("MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR", "false")
    os.environ.setdefault("MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT", "true")
    try:
        from mlflow import MlflowClient
    except ImportError as error:
        raise DraftwellError("the registry needs the package mlflow: pip install 'draftwell[pipeline]'") from error
    for name in ("alembic", "mlflow.store.db.utils", "mlflow.store.model_registry.abstract_store"):
        logging.getLogger(name).setLevel(logging.WARNING)
    with reaching(uri), _one_at_a_time(uri):
        client = MlflowClient(uri, os.environ.get("MLFLOW_REGISTRY_URI") or uri)
        if uri.startswith(SQLITE):
            client.search_registered_models(max_results=1)  # creates the tables
    return client


@contextmanager
def _one_at_a_time(uri: str) -> Iterator[None]:
    """A lock over the creation of a SQLite database, whose migrations must not run twice at once."""
    if not uri.startswith(SQLITE):
        yield
        return
    import fcntl

    database = Path(uri.removeprefix(SQLITE))
    try:
        database.parent.mkdir(parents=True, exist_ok=True)
        lock = database.with_name(f".{database.name}.lock").open("w")
    except OSError as error:
        raise DraftwellError(
            f"cannot write the registry's folder {database.parent} ({error.strerror}): "
            "set MLFLOW_TRACKING_URI or DRAFTWELL_HOME"
        ) from error
    with lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


@contextmanager
def reaching(uri: str) -> Iterator[None]:
    """Turn what MLflow, its database or its files raise into one line that names the registry, without its password."""
    from mlflow.exceptions import MlflowException
    from sqlalchemy.exc import SQLAlchemyError

    try:
        yield
    except (MlflowException, SQLAlchemyError, OSError) as error:
        place = re.sub(r"//[^@/]*@", "//", uri)
        reason = re.sub(r"//[^@/]*@", "//", str(error).strip().splitlines()[0])[:200]
        raise DraftwellError(
            f"the registry at {place} failed ({reason}): check that it answers and has room, and MLFLOW_TRACKING_URI"
        ) from error
