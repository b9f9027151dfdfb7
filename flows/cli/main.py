"""The command `draftwell`: a command's module is imported when the command is called, so that
`draftwell --help` imports none of them."""

from __future__ import annotations

import logging
import os
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from importlib import import_module
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from draftwell.flows.cli import AT_THE_END, OUTPUT
from draftwell.flows.failures import disk_full_as_error
from draftwell.flows.progress import Silence, showing
from draftwell.serving.errors import DraftwellError

COMMANDS: dict[str, tuple[str, str]] = {
    "tune": ("tune", "Find what makes a model faster, prove and deploy it; ends with a card."),
    "generate": ("decode", "Generate one answer and report acceptance, speed and model calls."),
    "bench": ("bench", "Compare strategies on the same prompts, interleaved."),
    "gate": ("release", "Judge a release, or this checkout against its recorded baseline."),
    "deploy": ("release", "Build the bundle of a release, and point `current` at it."),
    "serve": ("decode", "Serve a deployed bundle over the OpenAI API."),
    "monitor": ("monitor", "Compare served traffic with what the champion was calibrated on."),
    "export": ("export", "Write the tuned settings as settings of another engine."),
    "schedule": ("schedule", "Create a pair's deployments on a Prefect server."),
    "doctor": ("demo", "Check versions, combinations known to fail, and devices."),
    "step collect": ("learn.collect", "Collect what both models say of each token of texts."),
    "step train": ("learn.train", "Train a verifier, a head, or keep texts in a datastore."),
    "step calibrate": (
        "learn.train",
        "Make acceptance table, correction memory, hardware profile.",
    ),
    "step choose": ("learn.choose", "Choose strategy and thresholds by measurement."),
    "step distil": ("learn.distil", "Make a draft of a few of a target's own layers."),
    "release create": ("steer", "Make a candidate of versions picked in MLflow's UI."),
    "release show": ("lineage", "Show what a report's rows, or a version, were made from."),
    "release promote": ("release", "Make a release that passed its gate the champion."),
    "release rollback": ("release", "Make the previous champion the champion again."),
    "release prune": ("release", "Remove a pair's old bundles."),
    "release sync": ("steer", "Deploy the champion that the alias names now."),
    "release webhook": ("webhook", "Deploy the champion when MLflow says that it was moved."),
    "release forget": ("forget", "Delete one tenant's recorded requests and what they made."),
    "release ui": ("release", "Start MLflow's UI on this machine's registry."),
    "list strategies": ("decode", "List the decoding strategies with their parameters."),
    "list pairs": ("decode", "List the pairs of the catalogue and your own."),
    "reproduce papers": ("papers", "Run the papers' tables here, and write a page with them."),
    "reproduce gpu": ("gpu", "Measure everything on this machine's GPU in nine minutes."),
    "reproduce import": ("import_results", "Take in what `reproduce gpu` measured elsewhere."),
}
"""Command → its module in `draftwell.flows.cli`, and what it does in one line; in the order of
`--help`."""
GROUPS = {
    "step": "Run one step of the loop: collect, train, calibrate, choose, distil.",
    "release": "Make, look at, promote, roll back and remove releases.",
    "list": "List strategies or pairs.",
    "reproduce": "Measure the papers' tables, or a GPU; take in results.",
}
"""Group → what its commands do."""
OLD_NAMES = {
    "demo": "tune",
    "collect": "step collect",
    "train": "step train",
    "calibrate": "step calibrate",
    "distill": "step distil",
    "lineage": "release show",
    "promote": "release promote",
    "rollback": "release rollback",
    "prune": "release prune",
    "sync": "release sync",
    "webhook": "release webhook",
    "forget": "release forget",
    "ui": "release ui",
    "strategies": "list strategies",
    "pairs": "list pairs",
    "papers": "reproduce papers",
    "gpu": "reproduce gpu",
    "import-results": "reproduce import",
    "release": "release create",
}
"""Earlier name of a command → the name that it has now; `release` with options of its own."""


def renamed(name: str) -> DraftwellError:
    """The error that says the present name of a command."""
    return DraftwellError(
        f"`draftwell {name}` is now `draftwell {OLD_NAMES[name]}`", code="renamed_command"
    )


class LazyCommands(TyperGroup):
    """A group of commands of `COMMANDS`; each is imported when it is called."""

    group = ""
    listing = False

    # typer brings its own copy of click, or takes the installed one
    def list_commands(self, ctx: Any) -> list[str]:
        inside = [name.partition(f"{self.group} ") for name in COMMANDS if self.group]
        return [name for before, group, name in inside if group and not before]

    def summary(self, name: str) -> str:
        return COMMANDS[f"{self.group} {name}"][1]

    def load(self, name: str) -> Any:
        return load_command(f"{self.group} {name}")

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name not in self.list_commands(ctx):
            return None
        if self.listing:
            return TyperCommand(cmd_name, help=self.summary(cmd_name))
        if cmd_name not in self.commands:
            self.commands = {**self.commands, cmd_name: self.load(cmd_name)}
        return self.commands[cmd_name]

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        try:
            rest: list[str] = super().parse_args(ctx, args)
        except Exception as error:
            if self.group in OLD_NAMES and type(error).__name__ == "NoSuchOption":
                raise renamed(self.group) from None
            raise
        return rest

    def format_help(self, ctx: Any, formatter: Any) -> None:
        self.listing = True
        try:
            super().format_help(ctx, formatter)
        finally:
            self.listing = False


class RootCommands(LazyCommands):
    """The commands of one word, and the groups; a user's mistake is one line on stderr and exit
    code 2, never a traceback."""

    def list_commands(self, ctx: Any) -> list[str]:
        return [*(name for name in COMMANDS if " " not in name), *GROUPS]

    def summary(self, name: str) -> str:
        return GROUPS[name] if name in GROUPS else COMMANDS[name][1]

    def load(self, name: str) -> Any:
        return group_of(name) if name in GROUPS else load_command(name)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name in OLD_NAMES and cmd_name not in GROUPS:
            raise renamed(cmd_name)
        return super().get_command(ctx, cmd_name)

    def invoke(self, ctx: Any) -> Any:
        try:
            with disk_full_as_error(), lines_at_the_end():
                return super().invoke(ctx)
        except DraftwellError as error:
            if OUTPUT.verbose:
                traceback.print_exc()
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


def group_of(name: str) -> Any:
    """A group of commands."""
    example = next(command for command in COMMANDS if command.startswith(f"{name} "))
    app = typer.Typer(
        cls=type(f"{name}_commands", (LazyCommands,), {"group": name}),
        no_args_is_help=True,
        rich_markup_mode="rich",
        help=f"{GROUPS[name]}\n\nExample: draftwell {example} --help",
        callback=lambda: None,
    )
    group = typer.main.get_group(app)
    group.name = name
    return group


@contextmanager
def lines_at_the_end() -> Iterator[None]:
    """Say what a command leaves to its end, also where it fails."""
    try:
        yield
    finally:
        while AT_THE_END:
            typer.secho(AT_THE_END.pop(0), err=True, dim=True)


@cache
def load_command(name: str) -> Any:
    """A command of `COMMANDS`, which knows its name with that of its group."""
    app = typer.Typer(rich_markup_mode="rich", callback=lambda: None)
    import_module(f"draftwell.flows.cli.{COMMANDS[name][0]}").add_to(app)
    found: Any = typer.main.get_group(app)
    command = found.commands[name.rpartition(" ")[2]]
    command.name = name
    return command


def all_commands() -> dict[str, Any]:
    """Name, with that of its group → command of all modules; imports them all."""
    return {name: load_command(name) for name in COMMANDS}


app = typer.Typer(
    cls=RootCommands,
    no_args_is_help=True,
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


Version = Annotated[
    bool,
    typer.Option(
        "--version", callback=print_version, is_eager=True, help="Print the version and end."
    ),
]
Verbose = Annotated[
    bool, typer.Option("--verbose", "-v", help="Log what libraries do; show where an error arose.")
]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Say nothing of progress on stderr.")]


@app.callback()
def draftwell(
    context: typer.Context,
    version: Version = False,
    verbose: Verbose = False,
    quiet: Quiet = False,
) -> None:
    OUTPUT.verbose, OUTPUT.quiet = verbose, quiet and not verbose
    if OUTPUT.quiet:
        context.with_resource(showing(Silence()))
    if verbose:
        logging.basicConfig(level=logging.INFO, format="%(name)s: %(message)s")


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
