"""What the pages tell a reader to type exists: commands and their options, targets and variables of
make."""

from __future__ import annotations

import ast
import re
import shlex
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command

from draftwell.flows.cli.main import GROUPS
from draftwell.flows.cli.settings_option import read_value, split_word
from draftwell.serving.runtime.strategies import STRATEGIES
from tests.support.errors import raises_code
from tests.support.markdown import PAGES, commands
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


def check_settings(words: list[str], command: Any) -> None:
    """Every key of --set is a setting of the command, which takes the value, or a parameter of a
    strategy."""
    given = [value for option, value in pairwise(words) if option == "--set"]
    keys = [word.partition("=")[0] for word in given]
    assert [key for key in keys if "<" not in key and not is_setting(key, command)] == []
    for word in given:
        setting = split_word(word)
        if setting.key in command.settings.model_fields:
            read_value(command.settings, setting)


def is_setting(key: str, command: Any) -> bool:
    strategy, dot, parameter = key.partition(".")
    if dot:
        return parameter in STRATEGIES[strategy].Config.model_fields
    return key in getattr(command, "all_keys", list)()


@pytest.mark.parametrize("words", named("draftwell"))
def test_draftwell(words: list[str], groups: dict[str, Any], server: Any) -> None:
    name = words[1] if words[1] in groups else " ".join(words[1:3])
    asked_for_help = words[1].startswith("-") or (words[1] in GROUPS and words[2:3] == ["--help"])
    assert asked_for_help or name in groups, f"no command {name}"
    if name in groups:
        passed_on = dict.fromkeys(options_of(server)) if name == SERVE else {}
        rest = words[1 + len(name.split()) :]
        check(rest, passed_on | options_of(groups[name]))
        check_settings(rest, groups[name])


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(REPO)))
def test_settings_in_the_text_exist(page: Path, groups: dict[str, Any]) -> None:
    """Of some command at least: a sentence seldom names the whole one."""
    spoken = re.findall(r"`[^`\n]*--set (\w+)=", page.read_text(encoding="utf-8"))
    assert [
        key for key in spoken if not any(is_setting(key, command) for command in groups.values())
    ] == []


@pytest.mark.parametrize(
    "page", [page for page in PAGES if "papers" in str(page.relative_to(REPO))], ids=str
)
def test_commands_in_the_text_of_the_papers_pages_parse(page: Path, groups: dict[str, Any]) -> None:
    """Each whole one: a reader copies them."""
    spoken = re.findall(r"`draftwell ([a-z][^`\n]*)`", page.read_text(encoding="utf-8"))
    for words in map(shlex.split, spoken):
        name = words[0] if words[0] in groups else " ".join(words[:2])
        assert name in groups, words
        check(words[len(name.split()) :], options_of(groups[name]))
        check_settings(words[len(name.split()) :], groups[name])


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


def test_commands_in_messages_exist(groups: dict[str, Any]) -> None:
    """What the program tells a user to type, and its docstrings."""
    wrong = []
    for package in ("components", "flows", "registry", "serving"):
        for file in sorted((REPO / package).rglob("*.py")):
            for words in spoken_commands(file.read_text(encoding="utf-8")):
                name = words[0] if words[0] in groups else " ".join(words[:2])
                if name == SERVE or (words[0] in GROUPS and name not in groups):
                    continue
                unknown = [name]
                if name in groups:
                    given = [word.rstrip(",)") for word in words if re.match("--[a-z]", word)]
                    known = options_of(groups[name])
                    keys = [key.partition("=")[0] for at, key in pairwise(words) if at == "--set"]
                    unknown = [one for one in given if one.partition("=")[0] not in known]
                    known_keys = {*groups[name].all_keys(), "X"}
                    unknown += [key for key in keys if "." not in key and key not in known_keys]
                wrong += [f"{file.name}: {' '.join(words)}: {one}" for one in unknown]
    assert wrong == []


def spoken_commands(source: str) -> list[list[str]]:
    """Words behind `draftwell` in the texts of a program, with X for what is filled in."""
    tree, texts = ast.parse(source), list[str]()
    joined = [node for node in ast.walk(tree) if isinstance(node, ast.JoinedStr)]
    parts = {id(part) for node in joined for part in node.values}
    for node in joined:
        texts.append(
            "".join(
                getattr(part, "value", "") if isinstance(part, ast.Constant) else "X"
                for part in node.values
            )
        )
    texts += [
        node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in parts
    ]
    found = [one for text in texts for one in re.findall(r"[`(]draftwell ([a-z][^`)]*)[`)]", text)]
    return [one.split() for one in found]


def test_there_is_something_to_check() -> None:
    assert len(commands("draftwell")) > 40
    assert len(commands("make")) > 10


def test_a_setting_that_is_wrong_would_be_found(groups: dict[str, Any]) -> None:
    check_settings(["--set", "limit=3"], groups["step collect"])
    with pytest.raises(AssertionError):
        check_settings(["--set", "limits=3"], groups["step collect"])
    with raises_code("bad_setting", "limit"):
        check_settings(["--set", "limit=none of it"], groups["step collect"])
