"""`draftwell release webhook`: deploys what MLflow's webhook says has become the champion."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from pydantic import Field

from draftwell.flows.cli.options import Bundles, Pair, ReleaseDevice, release_device, say
from draftwell.flows.cli.settings_option import add_command
from draftwell.flows.steps.deploy import sync_champion
from draftwell.flows.workers.webhook_receiver import PATH, InTurn, application, serve
from draftwell.flows.workspace import Workspace
from draftwell.registry.store import Store
from draftwell.registry.webhooks import Deliveries, read_secret, register as register_webhook
from draftwell.serving.errors import DraftwellError
from draftwell.serving.server.process import address_of, listen


def add_to(app: typer.Typer) -> None:
    """Register this file's command."""
    add_command(app, webhook)


def webhook(
    pair: Pair = "default",
    device: ReleaseDevice = None,
    bundles: Bundles = Path("dist"),
    host: Annotated[str, Field(description="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, Field(ge=1, le=65535, description="Port to listen on.")] = 8100,
    secret_file: Annotated[
        Path | None,
        Field(
            description="File with the secret that MLflow signs with. Default: "
            "$DRAFTWELL_WEBHOOK_SECRET."
        ),
    ] = None,
    register_at: Annotated[
        str | None,
        Field(
            description=(
                "Make the webhook in MLflow, for the address under which its server reaches this "
                "command, such as http://127.0.0.1:8100/mlflow, and end."
            )
        ),
    ] = None,
) -> None:
    """Deploy within seconds what the alias champion names, when MLflow says that it was moved.

    It does what `draftwell release sync` does: a champion without a passed gate is refused, and
    what serves
    stays. It needs MLflow's server, which sends the webhook once register_at= has made it there.

    Example: draftwell release webhook --pair default --set secret_file=webhook-secret
    """

    device, secret = release_device(device), read_secret(secret_file)
    space = Workspace(pair, say=say)
    name = f"release.{space.spec.name}.{device}"
    if register_at is not None:
        make(name, register_at, secret)
        return
    with listen(host, port) as listener:
        turn = InTurn(lambda: sync_champion(space, device, bundles))
        say(f"webhooks for {name}: http://{address_of(listener)}{PATH}  (Ctrl-C ends it)")
        serve(application(Deliveries(secret), name, "champion", turn), listener)


def make(name: str, address: str, secret: str) -> None:
    """Make or change the webhook of a release's model in MLflow, and say whether it reaches the
    receiver."""
    if not address.startswith(("http://", "https://")):
        raise DraftwellError(
            f"{address} is no address: write it as http://host:8100/mlflow",
            code="bad_webhook_address",
        )
    why = register_webhook(Store(), name, address, secret)
    typer.echo(f"MLflow sends aliases of {name} to {address}")
    if why is not None and "401" in why:
        say(f"the receiver refused it ({why}): give both commands the same secret")
    elif why is not None:
        say(f"it did not reach it just now ({why}): run this command there without register_at")
