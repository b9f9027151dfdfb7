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


def split_name(command: str) -> tuple[str, str]:
    """A command's name, with that of its group, and what follows it.

    >>> split_name("step choose --set limit=8")
    ('step choose', '--set limit=8')
    """
    words = command.split(" ")
    end = next((place for place, word in enumerate(words[:3]) if not word.isalpha()), len(words))
    group = words[0] in ("step", "release", "list", "reproduce")
    end = min(end, 2 if group else 1)
    return " ".join(words[:end]), " ".join(words[end:])
