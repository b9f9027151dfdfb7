"""`draftwell release forget`: deletes one tenant's recorded requests and what was made of them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated

import typer
from pydantic import Field

from draftwell.flows.cli.settings_option import add_command
from draftwell.serving.errors import DraftwellError
from draftwell.serving.recording.tenants import KEYLESS, short_tenant
from draftwell.serving.server.http.keys import read_file, tenant_named


def add_to(app: typer.Typer) -> None:
    """Register this file's command."""
    add_command(app, forget)


def forget(
    tenant: Annotated[
        str | None,
        typer.Argument(
            help="The tenant's name in the server's key file; or the 12 digits in the names of "
            "the spool's files; or keyless, all requests without a key.",
        ),
    ] = None,
    key_file: Annotated[
        Path | None,
        Field(description="File with the tenant's API keys, as a server reads it."),
    ] = None,
    state_dir: Annotated[
        Path | None, Field(description="Folder of a server's online state.")
    ] = None,
    spool: Annotated[
        Path | None,
        Field(description="Folder of recorded requests. Default: all in the home."),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only print what would be deleted.")
    ] = False,
) -> None:
    """Delete what one tenant's recorded requests left: spool, prompts, traces, datastores,
    correction memories, online state. Stop servers that hold the state, or still record.

    Example: draftwell release forget search-team --dry-run
    """
    if (key_file is None) == (tenant is None):
        raise DraftwellError(
            "whom to forget? name the tenant, or a file of its keys with --set key_file=FILE",
            code="one_tenant",
        )
    who = tenant_of_file(key_file) if key_file is not None else tenant_named_as(str(tenant))
    from draftwell.flows.steps.forget import forget as step

    done = step(who, state_dir=state_dir, spool=spool, dry_run=dry_run)
    for line in done.removed:
        typer.echo(f"{'would remove' if dry_run else 'removed'} {line}")
    if not done.removed:
        hint = " (where that is a name, give its keys: key_file=FILE)" if who == tenant else ""
        typer.echo(f"nothing names the tenant {who}{hint}")
    copies = (
        "copies elsewhere: traces in other folders, work folders of `draftwell step distil`, "
        "backups, logs"
    )
    for line in [*done.left, copies]:
        typer.echo(f"not reached: {line}")


def tenant_of_file(file: Path) -> str:
    """The tenant that the keys of a file belong to.

    Raises:
        DraftwellError: the file cannot be read, or its keys are of several tenants
            (`several_tenants`).
    """
    found = {access.tenant for access in read_file(file)}
    if len(found) > 1:
        raise DraftwellError(
            f"the keys in {file} are of {len(found)} tenants: write those of one into a file",
            code="several_tenants",
        )
    return short_tenant(found.pop())


def tenant_named_as(name: str) -> str:
    """The tenant of a name, or of the digits that names of files carry."""
    if name == KEYLESS or re.fullmatch(r"[0-9a-f]{12}|[0-9a-f]{32}", name):
        return name if name == KEYLESS else short_tenant(name)
    return short_tenant(tenant_named(name.encode()))
