"""Options that go with an engine: every one exists, and is refused on an engine that lacks what it
needs; settings are read from them."""

from __future__ import annotations

from typing import get_args

import pytest
import typer
from pydantic import ValidationError

from draftwell.components.engines.port import CAPABILITIES, Capabilities, EngineName
from draftwell.flows.cli.engine_options import NEEDED, on_other_engine
from draftwell.flows.cli.main import all_commands
from draftwell.flows.cli.settings_option import names_of
from draftwell.flows.settings import PipelineSettings
from draftwell.flows.steps.engine.tune import engine_settings
from tests.support.errors import raises_code

COMMANDS = all_commands()


def asked(command: str, *words: str) -> typer.Context:
    """The context of a command that was typed."""
    found: typer.Context = COMMANDS[command].make_context(command, list(words))
    return found


def test_every_engine_says_what_it_can_do() -> None:
    assert set(CAPABILITIES) == set(get_args(EngineName))
    assert set(NEEDED) <= set(Capabilities.model_fields)


@pytest.mark.parametrize("command", sorted({one for part in NEEDED.values() for one in part}))
def test_options_that_need_something_exist(command: str) -> None:
    options = set(names_of(COMMANDS[command]))
    assert options >= {name for part in NEEDED.values() for name in part.get(command, ())}
    assert "engine" in options


def test_an_option_is_refused_where_the_engine_lacks_what_it_needs() -> None:
    assert not on_other_engine(asked("step choose", "--set", "trials=3"))
    assert on_other_engine(asked("step choose", "--engine", "vllm", "--set", "methods=ngram"))
    vllm = ("--engine", "vllm")
    for words, option in (
        (
            ("step choose", *vllm, "--set", "trials=3"),
            "--set trials means nothing with --engine vllm",
        ),
        (("bench", *vllm, "--set", "peers=vllm"), "--set peers means nothing with --engine vllm"),
        (("bench", *vllm, "--set", "exactness=true"), "--set exactness means nothing with"),
        (
            ("step choose", "--set", "levels=1,8"),
            "--set levels means nothing with --engine draftwell",
        ),
    ):
        with raises_code("engine_option", option):
            on_other_engine(asked(*words))


def test_mistakes_in_settings_are_lines() -> None:
    with raises_code("bad_setting", "1,x"):
        asked("step choose", "--engine", "vllm", "--set", "levels=1,x")
    with raises_code("bad_method", "lookahed"):
        engine_settings(PipelineSettings(engine="vllm", methods=("ngram", "lookahed")))
    with pytest.raises(ValidationError, match="grid means nothing with the engine draftwell"):
        PipelineSettings(grid=True)
