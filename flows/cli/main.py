"""The command `draftwell`: a command's module is imported when the command is called, so that
`draftwell --help` imports none of them."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from draftwell.flows.cli import AT_THE_END
from draftwell.flows.failures import disk_full_as_error
from draftwell.serving.errors import DraftwellError

COMMANDS: dict[str, tuple[str, str]] = {
    "tune": ("tune", "Find what makes a model faster, prove and deploy it; ends with a card."),
    "doctor": ("demo", "Check versions, combinations known to fail, and devices."),
    "pairs": ("decode", "List the pairs of the catalogue and your own."),
    "strategies": ("decode", "List the decoding strategies with their parameters."),
    "generate": ("decode", "Generate one answer and report acceptance, speed and model calls."),
    "bench": ("bench", "Compare strategies on the same prompts, interleaved."),
    "gpu": ("gpu", "Measure everything on this machine's GPU in nine minutes."),
    "import-results": ("import_results", "Take in what `draftwell gpu` measured elsewhere."),
    "distill": ("learn.distill", "Make a draft of a few of a target's own layers."),
    "collect": ("learn.collect", "Collect traces: texts with what both models say of each token."),
    "train": ("learn.train", "Train a verifier, a head, or keep texts in a datastore."),
    "calibrate": ("learn.train", "Make acceptance table, correction memory, hardware profile."),
    "choose": ("learn.tune", "Choose strategy and thresholds by measurement."),
    "gate": ("release", "Judge a release, or this checkout against its recorded baseline."),
    "release": ("steer", "Make a candidate of versions picked in MLflow's UI."),
    "promote": ("release", "Make a release that passed its gate the champion."),
    "rollback": ("release", "Make the previous champion the champion again."),
    "deploy": ("release", "Build the bundle of a release, and point `current` at it."),
    "sync": ("steer", "Deploy the champion that the alias names now."),
    "webhook": ("webhook", "Deploy the champion when MLflow says that its alias was moved."),
    "serve": ("decode", "Serve a deployed bundle over the OpenAI API."),
    "prune": ("release", "Remove a pair's old bundles."),
    "monitor": ("monitor", "Compare served traffic with what the champion was calibrated on."),
    "forget": ("forget", "Delete one tenant's recorded requests and what was made of them."),
    "schedule": ("schedule", "Create a pair's deployments on a Prefect server."),
    "lineage": ("lineage", "Show what a report's rows, or a version, were made from."),
    "export": ("export", "Write the tuned settings as settings of another engine."),
    "papers": ("papers", "Run the papers' tables here, and write a page with both values."),
    "ui": ("release", "Start MLflow's UI on this machine's registry."),
}
"""Command → its module in `draftwell.flows.cli`, and what it does in one line; in the order of
`--help`."""


class LazyCommands(TyperGroup):
    """The commands of `COMMANDS`; a user's mistake is one line on stderr and exit code 2, never a
    traceback."""

    listing = False

    # typer brings its own copy of click, or takes the installed one
    def list_commands(self, ctx: Any) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name not in COMMANDS:
            return None
        module, summary = COMMANDS[cmd_name]
        if self.listing:
            return TyperCommand(cmd_name, help=summary)
        if cmd_name not in self.commands:
            self.commands = {**self.commands, **commands_of(module)}
        return self.commands[cmd_name]

    def format_help(self, ctx: Any, formatter: Any) -> None:
        self.listing = True
        try:
            super().format_help(ctx, formatter)
        finally:
            self.listing = False

    def invoke(self, ctx: Any) -> Any:
        try:
            with disk_full_as_error(), lines_at_the_end():
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


@contextmanager
def lines_at_the_end() -> Iterator[None]:
    """Say what a command leaves to its end, also where it fails."""
    try:
        yield
    finally:
        while AT_THE_END:
            typer.secho(AT_THE_END.pop(0), err=True, dim=True)


def commands_of(module: str) -> dict[str, Any]:
    """Name → command of one module of `draftwell.flows.cli`."""
    app = typer.Typer(rich_markup_mode="rich", callback=lambda: None)
    import_module(f"draftwell.flows.cli.{module}").add_to(app)
    return dict(typer.main.get_group(app).commands)


def all_commands() -> dict[str, Any]:
    """Name → command of all modules; imports them all."""
    found: dict[str, Any] = {}
    for module, _ in COMMANDS.values():
        found |= commands_of(module)
    return found


app = typer.Typer(
    cls=LazyCommands,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    help="Find, train, prove and ship the fastest safe way to run speculative decoding.\n\n"
    "Example: draftwell generate --pair default --strategy vanilla_sd --prompt 'Why is the "
    "sky blue?'",
)


def print_version(wanted: bool) -> None:
    """Print the installed version, and end."""
    if wanted:
        from importlib.metadata import version  # a fifth of the time of `--help`

        typer.echo(f"draftwell {version('draftwell')}")
        raise typer.Exit


@app.callback()
def draftwell(
    _: Annotated[
        bool,
        typer.Option(
            "--version", callback=print_version, is_eager=True, help="Print the version and end."
        ),
    ] = False,
) -> None:
    pass


def main() -> None:
    """Entry point."""
    for name in ("DO_NOT_TRACK", "MLFLOW_DISABLE_TELEMETRY"):
        os.environ.setdefault(name, "true")
    os.environ.setdefault("PREFECT_SERVER_ANALYTICS_ENABLED", "false")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    try:
        with disk_full_as_error():  # a page of help, too, may find no room
            sys.exit(app())
    except DraftwellError as error:
        typer.secho(f"Error: {error}", err=True, fg="red")
        sys.exit(2)


if __name__ == "__main__":
    main()
