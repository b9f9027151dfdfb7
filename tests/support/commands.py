"""`draftwell` as a user types it, in this process."""

from __future__ import annotations

import shlex
from typing import Any

from typer.testing import CliRunner


def run_command(command: str, *more: Any) -> Any:
    """Run a command. It is split as a shell does, and so are further options that are written in
    one string; other arguments are taken as they are."""
    from draftwell.flows.cli.main import app

    words = shlex.split(command)
    for argument in map(str, more):
        options = not argument or argument.startswith("--")
        words += shlex.split(argument) if options else [argument]
    return CliRunner().invoke(app, words)
