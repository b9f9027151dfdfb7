"""`draftwell` as a user types it, in this process."""

from __future__ import annotations

import shlex
from itertools import pairwise
from typing import Any

from typer.testing import CliRunner


def run_command(command: str, *more: Any) -> Any:
    """Run a command. It is split as a shell does, and so are further options that are written in
    one string; other arguments are taken as they are. A setting in them takes the place of the same
    one in the command, which the command line itself refuses."""
    from draftwell.flows.cli.main import app

    words = list[str]()
    for argument in map(str, more):
        options = not argument or argument.startswith("--")
        words += shlex.split(argument) if options else [argument]
    replaced = set(settings_in(words).values())
    first = shlex.split(command)
    again = {at for at, name in settings_in(first).items() if name in replaced}
    kept = [word for at, word in enumerate(first) if not {at, at + 1} & again]
    return CliRunner().invoke(app, kept + words)


def settings_in(words: list[str]) -> dict[int, str]:
    """Place of each `NAME=VALUE` after `--set` → NAME.

    >>> settings_in(["bench", "--set", "runs=2", "--limit", "4"])
    {2: 'runs'}
    """
    pairs = enumerate(pairwise(words), 1)
    return {at: value.partition("=")[0] for at, (option, value) in pairs if option == "--set"}


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
