"""Who may reach the registry: addresses that are refused before they could leak a password, and
what a server's refusal means.

Passwords come from the environment alone: MLflow's client sends `MLFLOW_TRACKING_USERNAME` and
`MLFLOW_TRACKING_PASSWORD` by itself.
"""

from __future__ import annotations

import os
import re
from functools import lru_cache
from typing import Any
from urllib.parse import unquote, urlsplit

from draftwell.serving.errors import DraftwellError

DATABASES = ("postgresql", "postgres", "mysql", "mssql", "oracle")
PROBE = {"name": "draftwell"}
"""A registered model that is asked for to learn whether an address is MLflow's: there is none."""
FIRST_TIMEOUT, FIRST_RETRIES = 5, 1
"""Seconds and further tries of that question; what comes later waits for MLflow to come back."""


def check_address(uri: str, variable: str = "MLFLOW_TRACKING_URI") -> None:
    """Refuse an address of the registry that carries a password, or that lets clients into its
    database.

    MLflow and Prefect write addresses into errors, logs and tags; a password in one would be
    written too. Where the port is no number, it may be the beginning of a password with a slash in
    it.

    Args:
        variable: of the environment that holds it.
    Raises:
        DraftwellError: with what to set instead.
    """
    scheme = uri.partition(":")[0].lower()
    if scheme.partition("+")[0] in DATABASES:
        raise DraftwellError(
            f"{variable} names a database: run `mlflow server` on it (docs/operations.md) "
            "and give clients the "
            "server's address, so that none of them needs the database's password",
            code="registry_address_is_database",
        )
    if scheme == "sqlite" and ("?" in uri or unquote(uri) != uri):
        raise DraftwellError(
            f"MLflow cannot keep files beside the database {uri}: in its folder's name ? and % "
            f"with two digits mean something else to it: set DRAFTWELL_HOME, or {variable}, to a "
            "folder of another name",
            code="bad_registry_address",
        )
    if re.match(r"[\w.-]+:\d+(/|$)", uri):
        raise DraftwellError(
            f"{variable} has no scheme: write http://{uri}, or https://",
            code="bad_registry_address",
        )
    if scheme not in ("http", "https"):
        return
    try:
        parts = urlsplit(uri)
        named = "@" in parts.netloc
        _ = parts.port
        if not parts.hostname:
            raise ValueError
    except ValueError:  # its words repeat what it could not read
        raise DraftwellError(
            f"{variable} is not a valid address: it begins with http://host or https://host, and a "
            "port, if there is one, must be a number. "
            "A name and a password go into MLFLOW_TRACKING_USERNAME and "
            "MLFLOW_TRACKING_PASSWORD",
            code="bad_registry_address",
        ) from None
    if named:
        raise DraftwellError(
            f"{variable} carries a password, which would reach logs: take it out of the "
            "address and set "
            "MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD",
            code="password_in_registry_address",
        )


@lru_cache(maxsize=16)  # what is refused is not kept: once for each address of a process
def check_answers(uri: str, variable: str) -> None:
    """Refuse, within seconds, an address behind which no MLflow answers: a page, another service,
    one that only leads on to MLflow, or nothing.

    Args:
        uri: of http or https.
        variable: as for `check_address`.
    Raises:
        DraftwellError: with the address that is expected; what MLflow raises passes.
    """
    from mlflow.utils.credentials import get_default_host_creds
    from mlflow.utils.rest_utils import http_request

    answer = http_request(
        get_default_host_creds(uri),
        "/api/2.0/mlflow/registered-models/get",
        "GET",
        max_retries=FIRST_RETRIES,
        timeout=FIRST_TIMEOUT,
        raise_on_status=False,
        respect_retry_after_header=False,  # it may name an hour
        params=PROBE,
    )
    place = hidden(uri)
    if answer.history:
        raise DraftwellError(
            f"{variable}={place} leads to {hidden(answer.url).partition('/api/')[0]}: name that "
            "address, unless it is a page to log in: then name MLflow's own behind it",
            code="registry_elsewhere",
        )
    if answer.status_code in (401, 403):
        answer.raise_for_status()
    if not is_mlflows(answer):
        raise DraftwellError(
            f"{variable}={place} answers, but not as MLflow does (status {answer.status_code}, "
            f"{answer.headers.get('content-type', 'no content type')}): name the address of "
            "`mlflow server`, such as http://host:5000, under which its page opens in a browser",
            code="not_mlflow",
        )


def is_mlflows(answer: Any) -> bool:
    """Whether this is how MLflow answers a question for `PROBE`: with the model, or an error of its
    own."""
    try:
        said = answer.json()
    except ValueError:
        return False
    if not isinstance(said, dict):
        return False
    model = said.get("registered_model")
    return "error_code" in said or (isinstance(model, dict) and model.get("name") == PROBE["name"])


def refusal(error: Exception, place: str) -> str | None:
    """The error for a user whom the server refused; None where it failed in another way.

    Args:
        error: of MLflow, or of requests where files are read and written.
        place: address of the registry, without a password.
    """
    response: Any = getattr(error, "response", None)
    status, code = getattr(response, "status_code", None), getattr(error, "error_code", None)
    user = os.environ.get("MLFLOW_TRACKING_USERNAME")
    if status == 401 or code == "UNAUTHENTICATED":
        known = (
            f"does not know the user {user} with this password"
            if user
            else "wants to know who you are"
        )
        return (
            f"the registry at {place} {known}: set MLFLOW_TRACKING_USERNAME and "
            "MLFLOW_TRACKING_PASSWORD to a user of that server"
        )
    if status == 403 or code == "PERMISSION_DENIED":
        reason = " ".join(str(error).split())[-160:]
        return (
            f"the registry at {place} does not allow this to "
            f"{user or 'anybody without a name'} (… {reason}): ask who runs it for the "
            "permission EDIT, and for this host's name in MLFLOW_SERVER_ALLOWED_HOSTS"
        )
    return None


def hidden(text: str) -> str:
    """A text in which no address carries a user's name and password, be there slashes in it; when
    in doubt, more is cut."""
    return re.sub(r"//[^/\s]*@", "//", re.sub(r"//[^\s@/]*:\S*@", "//", text))
