"""Reaching MLflow: where it is, how it is opened, and what its errors become.

A server that does not answer is tried again with growing pauses, by MLflow's own client. MLflow is
imported inside the functions: importing it takes a second, and `draftwell --help` must not pay for
that.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from draftwell.registry.access import check_address, check_answers, hidden, refusal
from draftwell.registry.moved import ARTIFACTS, follow_move
from draftwell.serving.artifacts.pair_files import draftwell_home
from draftwell.serving.errors import DraftwellError, missing_package
from draftwell.serving.files import file_lock

if TYPE_CHECKING:
    from mlflow import MlflowClient

SQLITE = "sqlite:///"
SETTINGS = {
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR": "false",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
    # Pauses of 0, 4, 8, 16, 32 and 64 seconds: an outage of a minute is waited for, a dead server
    # is reported after two.
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "6",
}
"""MLflow's own settings, where the environment does not have others."""

FILE_STORES = ("botocore", "boto3", "s3transfer", "google", "azure")
"""Packages whose errors are those of a store of files, such as S3."""
PACKAGES = {"google": "google-cloud-storage", "azure": "azure-storage-blob"}
"""What brings a module, where the package has another name."""


def default_uri() -> str:
    """`$MLFLOW_TRACKING_URI`, else a SQLite file in the home."""
    return (
        os.environ.get("MLFLOW_TRACKING_URI")
        or f"{SQLITE}{draftwell_home() / 'mlflow' / 'mlflow.db'}"
    )


def registry_exists() -> bool:
    """Whether there is a registry to ask; a SQLite file that is not there is none, and asking would
    make it (seconds)."""
    uri = default_uri()
    return not uri.startswith(SQLITE) or Path(uri.removeprefix(SQLITE)).is_file()


def artifact_folder(uri: str) -> str | None:
    """Where a SQLite registry keeps files: next to the database. A server decides that itself
    (None)."""
    return (
        str(Path(uri.removeprefix(SQLITE)).absolute().parent / ARTIFACTS)
        if uri.startswith(SQLITE)
        else None
    )


def connect(uri: str) -> MlflowClient:
    """A client for the registry at `uri`; a SQLite database is created by the first, the others
    wait for it."""
    check_address(uri)
    registry_uri = os.environ.get("MLFLOW_REGISTRY_URI") or uri
    check_address(registry_uri, "MLFLOW_REGISTRY_URI")
    for name, value in SETTINGS.items():
        os.environ.setdefault(name, value)
    try:
        from mlflow import MlflowClient
    except ImportError as error:
        raise missing_package(
            "the registry needs", "mlflow", "pipeline", code="mlflow_missing"
        ) from error
    for name in ("alembic", "mlflow.store.db.utils", "mlflow.store.model_registry.abstract_store"):
        logging.getLogger(name).setLevel(logging.WARNING)
    _say_once_that_we_wait(uri)
    with registry_errors(uri), one_at_a_time(uri):
        client = MlflowClient(uri, registry_uri)
        if uri.startswith(SQLITE):
            client.search_registered_models(max_results=1)  # creates the tables
            follow_move(Path(uri.removeprefix(SQLITE)))
        asked = {registry_uri: "MLFLOW_REGISTRY_URI", uri: "MLFLOW_TRACKING_URI"}
        for address, variable in asked.items():
            if address.lower().startswith("http"):
                check_answers(address, variable)
    return client


class _Waiting(logging.Filter):
    """Lets the HTTP library's warning of each new try through once, as a line for a person."""

    def __init__(self, place: str):
        super().__init__()
        self.place, self.shown = place, False

    def filter(self, record: logging.LogRecord) -> bool:
        if not str(record.msg).startswith("Retrying"):
            return True
        first, self.shown = not self.shown, True
        record.msg, record.args = (
            f"the registry at {self.place} does not answer: trying again",
            (),
        )
        return first


def _say_once_that_we_wait(uri: str) -> None:
    logger = logging.getLogger("urllib3.connectionpool")
    for old in [known for known in logger.filters if isinstance(known, _Waiting)]:
        logger.removeFilter(old)
    if not uri.startswith(SQLITE):
        logger.addFilter(_Waiting(hidden(uri)))


@contextmanager
def one_at_a_time(uri: str) -> Iterator[None]:
    """A lock over the creation of a SQLite database, whose migrations must not run twice at
    once."""
    if not uri.startswith(SQLITE):
        yield
        return
    database = Path(uri.removeprefix(SQLITE))
    with ExitStack() as stack:
        try:
            stack.enter_context(file_lock(database.with_name(f".{database.name}.lock")))
        except OSError as error:
            raise DraftwellError(
                f"cannot write the registry's folder {database.parent} ({error.strerror}): "
                "set MLFLOW_TRACKING_URI or "
                "DRAFTWELL_HOME",
                code="registry_folder_unwritable",
            ) from error
        yield


def deleted_by_hand(text: str, place: str) -> str | None:
    """The error for what a person has deleted in MLflow, and how it comes back; None where MLflow
    complains of something else.

    Args:
        text: of MLflow's error.
        place: address of the registry, without a password.
    """
    if found := re.search(r"The (experiment|run) (\w+) must be in the 'active' state", text):
        what, number = found.groups()
        return (
            f"the {what} {number} was deleted in MLflow: restore it with `MLFLOW_TRACKING_URI="
            f"{place} mlflow {what}s restore --{what}-id {number}`, and run the same again"
        )
    if found := re.search(r"Run with id=(\w+) not found", text):
        return (
            f"the run {found[1]} was removed from the registry at {place} for good: delete the "
            "version that it belongs to in MLflow, and publish the same again"
        )
    return None


@contextmanager
def registry_errors(uri: str) -> Iterator[None]:
    """Turn what MLflow, its database or its files raise into one line that names the registry,
    without its password."""
    from mlflow.exceptions import MlflowException
    from sqlalchemy.exc import SQLAlchemyError

    try:
        yield
    except ImportError as error:
        package = (error.name or "").partition(".")[0]
        package = PACKAGES.get(package, package)
        raise DraftwellError(
            f"the registry at {hidden(uri)} keeps its files where {package or error} is needed: "
            f"pip install {package or 'it'}, or let `mlflow server` serve the files",
            code="mlflow_missing",
        ) from error
    except Exception as error:
        of_a_store = type(error).__module__.partition(".")[0] in FILE_STORES
        if not of_a_store and not isinstance(error, MlflowException | SQLAlchemyError | OSError):
            raise
        place, text = hidden(uri), hidden(str(error).strip())
        if (why := refusal(error, place)) is not None:
            raise DraftwellError(hidden(why), code="registry_refused") from error
        if "SSLError" in text:
            reason = re.split(r"SSL\w*Error\(", text)[-1].strip("'\")")[:160]
            raise DraftwellError(
                f"the registry at {place} cannot be reached by https ({reason}): write http:// "
                "where it has no certificate, or name that in MLFLOW_TRACKING_SERVER_CERT_PATH",
                code="registry_unreachable",
            ) from error
        if "Max retries exceeded" in text or "failed with timeout" in text:
            raise DraftwellError(
                f"the registry at {place} did not answer, nor when it was tried again: "
                "start it, or check "
                "MLFLOW_TRACKING_URI, and run the same command again (nothing is left half "
                "promoted)",
                code="registry_unreachable",
            ) from error
        if (why := deleted_by_hand(text, place)) is not None:
            raise DraftwellError(why, code="deleted_in_registry") from error
        lines = [line for line in text.splitlines() if not line.startswith("(raised as a result")]
        reason = (lines or [type(error).__name__])[0][:200]
        raise DraftwellError(
            f"the registry at {place} failed ({reason}): check that it answers and has room, and "
            f"MLFLOW_TRACKING_URI",
            code="registry_failed",
        ) from error
