"""What the pages tell a reader to type exists: commands and their options, targets and variables of
make."""

from __future__ import annotations

import re
from itertools import pairwise
from typing import Any

import pytest
from typer.main import get_command

from draftwell.flows.cli.main import GROUPS
from draftwell.flows.cli.settings_option import OtherKeys, takes
from draftwell.serving.runtime.strategies import STRATEGIES
from tests.support.markdown import commands
from tests.support.paths import REPO

SERVE = "serve"


def named(program: str) -> list[Any]:
    return [
        pytest.param(words, id=f"{place} {' '.join(words)}") for place, words in commands(program)
    ]


def options_of(command: Any) -> dict[str, Any]:
    return {name: p for p in command.params for name in (*p.opts, *p.secondary_opts)} | {
        "--help": None
    }


@pytest.fixture(scope="module")
def groups() -> dict[str, Any]:
    from draftwell.flows.cli.main import all_commands

    return all_commands()


@pytest.fixture(scope="module")
def server() -> Any:
    from draftwell.serving.server.main import app

    return get_command(app)


def check(words: list[str], options: dict[str, Any]) -> None:
    """Options exist, values of choices are among them, named strategies too, and required options
    are given."""
    given = [word for word in words if word.startswith("--")]
    assert [word for word in given if word.partition("=")[0] not in options] == []
    for option, value in pairwise(words):
        if option in ("--strategy", "--strategies") and "$" not in value:
            names = [re.split("[:@]", name)[0] for name in value.split(",")]
            assert [name for name in names if name not in STRATEGIES] == []
    needed = {
        p.opts[0]
        for p in options.values()
        if p is not None and p.required and p.param_type_name == "option"
    }
    assert "--help" in given or needed <= set(given), f"{needed} must be given"


@pytest.mark.parametrize("words", named("draftwell"))
def test_draftwell(words: list[str], groups: dict[str, Any], server: Any) -> None:
    name = words[1] if words[1] in groups else " ".join(words[1:3])
    asked_for_help = words[1].startswith("-") or (words[1] in GROUPS and words[2:3] == ["--help"])
    assert asked_for_help or name in groups, f"no command {name}"
    if name in groups:
        passed_on = dict.fromkeys(options_of(server)) if name == SERVE else {}
        check(words[1 + len(name.split()) :], passed_on | options_of(groups[name]))
        assert unknown_settings(words, groups[name]) == []


def unknown_settings(words: list[str], command: Any) -> list[str]:
    """Keys of `--set` that a command does not take."""
    given = [value.partition("=")[0] for word, value in pairwise(words) if word == "--set"]
    known = OtherKeys(tuple(command.all_keys()))
    return [key for key in given if key != "KEY" and not takes(known, key)]


@pytest.mark.parametrize("words", named("draftwell-serve"))
def test_draftwell_serve(words: list[str], server: Any) -> None:
    check(words[1:], options_of(server))


@pytest.mark.parametrize("words", named("make"))
def test_make(words: list[str]) -> None:
    makefile = (REPO / "Makefile").read_text(encoding="utf-8")
    for word in words[1:]:
        variable, equals, _ = word.partition("=")
        pattern = rf"^{re.escape(variable)} \?=" if equals else rf"^{re.escape(word)}:"
        assert re.search(pattern, makefile, re.MULTILINE), f"the Makefile knows no {word}"


def test_there_is_something_to_check() -> None:
    assert len(commands("draftwell")) > 40
    assert len(commands("make")) > 10
