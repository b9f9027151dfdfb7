"""Who may reach the registry: addresses that are refused before they could leak a password, and
what a server's refusal means.

Passwords come from the environment alone: MLflow's client sends `MLFLOW_TRACKING_USERNAME` and
`MLFLOW_TRACKING_PASSWORD` by itself.
"""

from __future__ import annotations

import os
import re
from typing import Any
from urllib.parse import urlsplit

from draftwell.serving.errors import DraftwellError

DATABASES = ("postgresql", "postgres", "mysql", "mssql", "oracle")


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
    if scheme not in ("http", "https"):
        return
    try:
        parts = urlsplit(uri)
        named = "@" in parts.netloc
        _ = parts.port
    except ValueError:  # its words repeat what it could not read
        raise DraftwellError(
            f"{variable} is not a valid address: a port, if there is one, must be a number. "
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
