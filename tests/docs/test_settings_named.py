"""Settings that the pages tell a reader to type are those of their command, with values that it
takes."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest

from draftwell.flows.cli.main import all_commands
from draftwell.flows.cli.settings_option import read_value, split_word, takes
from tests.support.errors import raises_code
from tests.support.markdown import commands


def named() -> list[Any]:
    """Command and `KEY=VALUE` of every `--set` in the shell blocks."""
    known = all_commands()
    found = []
    for place, words in commands("draftwell"):
        name = words[1] if words[1] in known else " ".join(words[1:3])
        for option, word in pairwise(words):
            if option == "--set":
                found.append(pytest.param(known.get(name), word, id=f"{place} {name} {word}"))
    return found


def check(command: Any, word: str) -> None:
    given = split_word(word)
    if given.key in command.settings.model_fields:
        read_value(command.settings, given)
    else:
        assert command.others is not None, f"no setting {given.key}"
        assert takes(command.others[1], given.key), f"no setting {given.key}"


@pytest.mark.parametrize(("command", "word"), named())
def test_a_setting_exists_and_takes_the_value(command: Any, word: str) -> None:
    assert command is not None, "no such command"
    check(command, word)


def test_a_setting_that_is_wrong_would_be_found() -> None:
    collect = all_commands()["step collect"]
    with pytest.raises(AssertionError, match="no setting limits"):
        check(collect, "limits=3")
    with raises_code("bad_setting", "limit"):
        check(collect, "limit=none of it")
    assert len(named()) > 25
