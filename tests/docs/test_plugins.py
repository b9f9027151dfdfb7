"""The package of docs/plugins.md, as it stands there, installed beside ours: its strategy decodes
exactly, its kind and its engine are found."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from draftwell.components.engines.remote.dialects.vllm import VllmDialect
from draftwell.components.engines.remote.discover import PLUGINS
from draftwell.serving.artifacts.kinds import KINDS, READ_BY_STRATEGIES
from draftwell.serving.runtime.strategies import STRATEGIES, build_strategy
from tests.support.markdown import fences
from tests.support.own_plugin import installed, write_distribution
from tests.support.server.served_pair import tiny_pair

BLOCKS = [fence for fence in fences() if fence.page.name == "plugins.md"]
MODULES = ("own_strategy", "own_kind", "own_engine")


@pytest.fixture
def package(tmp_path: Path) -> Iterator[None]:
    """The page's entry points, and its modules in the order of the page."""
    [points] = [block.body for block in BLOCKS if block.language == "toml"]
    sources = [block.body for block in BLOCKS if block.language == "python"]
    named = tomllib.loads(points)["project"]["entry-points"]
    modules = dict(zip(MODULES, sources, strict=True))
    with installed(write_distribution(tmp_path, named, modules)):
        yield


def test_the_strategy_decodes_exactly(package: None) -> None:
    pair = tiny_pair(1)
    prompt, sampling = pair.encode("one on one"), pair.sampling(max_tokens=40)
    job = pair.engine().generate(prompt, sampling, build_strategy("echo"))
    plain = pair.engine().generate(prompt, sampling, build_strategy("autoregressive"))
    assert job.output == plain.output
    assert job.session.stats.drafted > 0
    assert STRATEGIES["echo"].search_space == {"words": (2, 4, 8)}


def test_the_kind_is_one_of_ours(package: None) -> None:
    assert KINDS["lengths"].files == ("lengths.json",)
    assert "lengths" in READ_BY_STRATEGIES


@pytest.mark.parametrize(("version", "known"), [("own-1", True), ("0.32", False)])
def test_the_engine_is_recognised(package: None, version: str, known: bool) -> None:
    class Client:
        """A server that says its version."""

        def find(self, path: str) -> dict[str, str]:
            assert path == "/version"
            return {"version": version}

    dialect = PLUGINS["own"](Client())  # type: ignore[arg-type]
    assert isinstance(dialect, VllmDialect) is known
    if dialect is not None:
        assert dialect.name == "own"
