"""The command `draftwell`: one file per group of commands, heavy libraries imported when a command
runs."""

from __future__ import annotations

import os
import sys
from typing import Any

import typer
from typer.core import TyperGroup

from draftwell.flows.cli import (
    bench,
    decode,
    demo,
    export,
    lineage,
    monitor,
    papers,
    release,
    schedule,
    steer,
)
from draftwell.flows.cli.learn import collect, distill, train, tune
from draftwell.flows.failures import disk_full_as_error
from draftwell.serving.errors import DraftwellError


class OneLineErrors(TyperGroup):
    """A user's mistake is one line on stderr and exit code 2, never a traceback."""

    # typer brings its own copy of click, or takes the installed one
    def invoke(self, ctx: Any) -> Any:
        try:
            with disk_full_as_error():
                return super().invoke(ctx)
        except DraftwellError as error:
            typer.secho(f"Error: {' '.join(str(error).split())}", err=True, fg="red")
            raise typer.Exit(2) from None
        except OSError as error:
            if error.filename is None:
                raise  # a fault of ours or of the network, not a path that the user named
            typer.secho(
                f"Error: {error.filename}: {error.strerror}: check the path and its permissions",
                err=True,
                fg="red",
            )
            raise typer.Exit(2) from None
        except KeyboardInterrupt:
            typer.secho("interrupted", err=True)
            raise typer.Exit(130) from None


app = typer.Typer(
    cls=OneLineErrors,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    help="Find, train, prove and ship the fastest safe way to run speculative decoding.\n\n"
    "Example: draftwell generate --pair default --strategy vanilla_sd --prompt 'Why is the "
    "sky blue?'",
)
for group in (
    decode,
    bench,
    papers,
    distill,
    collect,
    train,
    tune,
    release,
    steer,
    monitor,
    lineage,
    schedule,
    demo,
    export,
):
    group.add_to(app)


def main() -> None:
    """Entry point."""
    for name in ("DO_NOT_TRACK", "MLFLOW_DISABLE_TELEMETRY"):
        os.environ.setdefault(name, "true")
    os.environ.setdefault("PREFECT_SERVER_ANALYTICS_ENABLED", "false")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    sys.exit(app())


if __name__ == "__main__":
    main()
