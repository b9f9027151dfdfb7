"""Strategies and kinds of artifacts of other distributions, found by their entry points."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import draftwell
from draftwell.components.tune.search.space import combinations, tunable
from draftwell.flows.cli.main import COMMANDS, app
from draftwell.serving.artifacts.kinds import KINDS, OURS, READ_BY_STRATEGIES, find_kind
from draftwell.serving.runtime.commands import Role
from draftwell.serving.runtime.strategies import STRATEGIES, StrategyResources, build_strategy
from tests.support.errors import raises_code
from tests.support.markdown import fences
from tests.support.own_plugin import MODULES, POINTS, Points, installed, write_distribution
from tests.support.server.bundles import make_bundle
from tests.support.server.served_pair import tiny_pair

LISTED = """
import own_strategy, own_kind
from draftwell.serving.artifacts.kinds import KINDS
from draftwell.serving.runtime.strategies import STRATEGIES
print(STRATEGIES["echo"] is own_strategy.Echo, KINDS["lengths"] is own_kind.LENGTHS)
"""


@pytest.fixture
def plugin(tmp_path: Path) -> Iterator[Path]:
    with installed(write_distribution(tmp_path / "own")):
        yield tmp_path / "own"


def test_an_installed_strategy_is_listed_after_ours(plugin: Path) -> None:
    words = next(name for name in COMMANDS if name.split()[-1] == "strategies").split()
    done = CliRunner().invoke(app, [*words, "--json"])
    assert done.exit_code == 0, done.output
    listed = json.loads(done.stdout)
    assert [row["name"] for row in listed][:2] == ["autoregressive", "vanilla_sd"]
    assert listed[-1]["name"] == "echo"
    assert listed[-1]["parameters"]["words"]["default"] == 4


def test_it_is_gone_with_its_distribution(tmp_path: Path) -> None:
    with installed(write_distribution(tmp_path)):
        assert ("echo" in STRATEGIES, "lengths" in KINDS) == (True, True)
    assert ("echo" in STRATEGIES, "lengths" in KINDS) == (False, False)


def test_a_kind_is_released_and_read_like_ours(plugin: Path) -> None:
    assert find_kind("lengths").load_class().kind == "lengths"
    assert "lengths" in OURS
    assert list(READ_BY_STRATEGIES)[-1] == "lengths"
    with raises_code("artifact_missing", "own-tool"):
        build_strategy("echo").run(None).send(None)  # type: ignore[arg-type]


def test_the_tuner_tries_what_the_strategy_names(plugin: Path) -> None:
    assert tunable()[-1] == "echo"
    assert [choice.parameters for choice in combinations("echo")] == [{"words": 2}, {"words": 4}]


def test_a_bundle_serves_them_where_they_are_installed(
    tmp_path: Path, tiny_models: dict[Role, Path]
) -> None:
    with installed(write_distribution(tmp_path / "own")):
        lengths = import_module("own_artifact").Lengths
        bundle = make_bundle(
            *(tmp_path / "bundle", tiny_models, "echo", {"words": 3}),
            more=lambda made: [lengths(2, made)],
        )
        with draftwell.load(bundle) as model:
            answer = model.generate("one on one", max_tokens=40)
    with draftwell.load(make_bundle(tmp_path / "plain", tiny_models, "autoregressive")) as model:
        assert model.generate("one on one", max_tokens=40).text == answer.text
    assert answer.strategy == "echo"
    with raises_code("newer_bundle", "lengths", "install"):
        draftwell.load(bundle)


def test_the_pages_example_of_a_strategy_decodes_exactly() -> None:
    [page] = [fence for fence in fences("python") if "class Echo(Strategy)" in fence.body]
    names: dict[str, Any] = {}
    exec(compile(page.body, str(page), "exec", dont_inherit=True), names)
    pair, echo = tiny_pair(1), names["Echo"]
    prompt, sampling = pair.encode("one on one"), pair.sampling(max_tokens=40)
    job = pair.engine().generate(prompt, sampling, echo(echo.Config(), StrategyResources()))
    plain = pair.engine().generate(prompt, sampling, build_strategy("autoregressive"))
    assert job.output == plain.output
    assert job.session.stats.drafted > 0


@pytest.mark.parametrize(
    ("group", "point", "why"),
    [
        ("draftwell.strategies", "vanilla_sd = own_strategy:Echo", "taken"),
        ("draftwell.strategies", "other = own_strategy:Echo", "calls itself echo"),
        ("draftwell.strategies", "echo = own_strategy:serial", "no complete subclass"),
        ("draftwell.strategies", "echo = nowhere:Echo", "cannot be imported"),
        ("draftwell.artifacts", "lengths = own_artifact:Lengths", "no ArtifactKind"),
    ],
)
def test_one_that_cannot_be_used_names_its_distribution(
    tmp_path: Path, group: str, point: str, why: str
) -> None:
    name, _, value = point.partition(" = ")
    points: Points = {**POINTS, group: {name: value}}
    table = STRATEGIES if group.endswith("strategies") else KINDS
    with installed(write_distribution(tmp_path, points)), raises_code("bad_plugin", why, " own"):
        list(table)


@pytest.mark.slow  # a process of its own loads torch
def test_a_plugins_module_may_be_imported_first(tmp_path: Path) -> None:
    folder = write_distribution(tmp_path)
    assert set(MODULES) == {file.stem for file in folder.glob("*.py")}
    path = os.pathsep.join([str(folder), *sys.path])
    done = subprocess.run(
        [sys.executable, "-c", LISTED],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.split() == ["True", "True"]
