"""Make MLflow's user for the worker, with the password that deploy/.env gives it; run by compose as
MLflow's admin, at every start.

The user is no admin. Who publishes a pair first owns its models and its experiment; what somebody
else published (an admin before this user was made, say) is named in EDIT_PAIRS, separated by
commas, and the user may edit it from then on.
"""

from __future__ import annotations

import os
import sys
from typing import Any


def main() -> int:
    from mlflow.exceptions import MlflowException

    name, password = os.environ["WORKER_USERNAME"], os.environ["WORKER_PASSWORD"]
    if name == os.environ["MLFLOW_TRACKING_USERNAME"]:
        print(
            (
                "users: the worker must not be MLflow's admin: give MLFLOW_TRACKING_USERNAME "
                "another name than MLFLOW_ADMIN_USERNAME"
            ),
            file=sys.stderr,
        )
        return 2
    try:
        grant(name, password)
    except (MlflowException, OSError) as error:  # what `requests` raises is an OSError
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        print(
            f"users: MLflow at {os.environ['MLFLOW_TRACKING_URI']} did not do it "
            f"({reason}): see that it runs, and "
            "MLFLOW_ADMIN_USERNAME and MLFLOW_ADMIN_PASSWORD",
            file=sys.stderr,
        )
        return 1
    return 0


def grant(name: str, password: str) -> None:
    """Make the user, or give it this password; let it edit what EDIT_PAIRS names."""
    from mlflow import MlflowClient
    from mlflow.exceptions import MlflowException
    from mlflow.server import get_app_client

    users = get_app_client("basic-auth", tracking_uri=os.environ["MLFLOW_TRACKING_URI"])
    try:
        users.create_user(name, password)
    except MlflowException as error:
        if error.error_code != "RESOURCE_ALREADY_EXISTS":
            raise
        users.update_user_password(name, password)
        users.update_user_admin(name, False)
    client = MlflowClient()
    for pair in filter(None, os.environ.get("EDIT_PAIRS", "").split(",")):
        for model in client.search_registered_models(max_results=1000):
            if model.name.partition(".")[2] == pair or model.name.startswith(
                (f"release.{pair}.", f"promotions.{pair}.")
            ):
                let_edit(users, name, "registered_model", model.name)
        if (experiment := client.get_experiment_by_name(f"draftwell/{pair}")) is not None:
            let_edit(users, name, "experiment", experiment.experiment_id)


def let_edit(users: Any, name: str, kind: str, resource: str) -> None:
    """Give the user the permission, if it has none from an earlier run."""
    from mlflow.exceptions import MlflowException

    try:
        users.grant_user_permission(name, kind, resource, "EDIT")
    except MlflowException as error:
        if error.error_code != "RESOURCE_ALREADY_EXISTS":
            raise


if __name__ == "__main__":
    sys.exit(main())
