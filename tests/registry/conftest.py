"""A registry of its own for each test: the empty SQLite file is copied."""

import shutil
from functools import partial
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest

from draftwell.registry.pairs import PairSpec, fetch
from draftwell.registry.promotion import promote
from draftwell.registry.releases import ReleaseVersion, find_release
from draftwell.registry.store import Published, Store
from draftwell.serving.artifacts.base import Artifact
from draftwell.serving.artifacts.pair_files import PairFiles
from tests.registry.killed_publisher import pair_in
from tests.support.loop.publishing import KeptRegistry, Make, publish, release, verdict


@pytest.fixture
def store(empty_database: Path, tmp_path: Path) -> Store:
    folder = tmp_path / "registry"
    folder.mkdir()
    shutil.copyfile(empty_database, folder / "mlflow.db")
    return Store(f"sqlite:///{folder / 'mlflow.db'}")


@pytest.fixture
def spec(tmp_path: Path) -> PairSpec:
    """A pair of two local model folders."""
    return pair_in(tmp_path)


@pytest.fixture
def files(spec: PairSpec) -> PairFiles:
    return fetch(spec)


@pytest.fixture(scope="session")
def kept(tmp_path_factory: pytest.TempPathFactory, empty_database: Path) -> KeptRegistry:
    return KeptRegistry(tmp_path_factory.mktemp("kept"), empty_database)


@pytest.fixture
def make_release(
    store: Store, spec: PairSpec, files: PairFiles, tmp_path: Path, kept: KeptRegistry
) -> Make:
    """Makes a release of a table and of a config made from it, in a folder of this name."""

    def publish_them(folder: Path, options: dict[str, Any]) -> ReleaseVersion:
        one = release(store, spec, files, folder, **options)
        assert find_release(store, one.pair, one.device, one.version) == one
        return one

    def made(name: str, **options: Any) -> ReleaseVersion:
        work = partial(publish_them, tmp_path / name, options)
        one = kept.after(store, tuple(options.items()), work)
        return find_release(store, one.pair, one.device, one.version)

    return made


@pytest.fixture
def champions(store: Store, make_release: Make, kept: KeptRegistry) -> Make:
    """Makes releases that were promoted one behind the other."""

    def promoted(count: int) -> list[ReleaseVersion]:
        made = []
        for n in range(1, count + 1):
            one = make_release(str(n), accepted=n)
            record = verdict(one, beside=n - 1 or None)
            kept.after(store, "promoted", partial(promote, store, "tiny", "cpu", n, record))
            made.append(one)
        return made

    return promoted


@pytest.fixture
def put(store: Store, tmp_path: Path) -> Make:
    """Publishes an artifact from a folder of its own."""

    def made(artifact: Artifact, **options: Any) -> Published:
        return publish(store, artifact, Path(mkdtemp(dir=tmp_path)) / artifact.kind, **options)

    return made


@pytest.fixture(autouse=True)
def own_models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Converted models of these tests do not reach the cache that all tests share."""
    monkeypatch.setenv("DRAFTWELL_MODELS", str(tmp_path / "models"))
    monkeypatch.setenv("DRAFTWELL_HOME", str(tmp_path / "home"))
    return tmp_path / "models"
