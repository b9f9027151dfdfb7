"""A registry of its own for each test: the empty SQLite file is copied."""

import shutil
from functools import partial
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest

from draftwell.registry.pairs import PairSpec, fetch
from draftwell.registry.promotion import promote
from draftwell.registry.releases import ReleaseVersion
from draftwell.registry.store import Published, Store
from draftwell.serving.artifacts.base import Artifact
from draftwell.serving.artifacts.pair_files import PairFiles
from tests.support.loop.kept_registry import KeptRegistry
from tests.support.loop.publishing import Make, model_folder, publish, release, verdict


@pytest.fixture
def store(empty_database: Path, tmp_path: Path) -> Store:
    folder = tmp_path / "registry"
    folder.mkdir()
    shutil.copyfile(empty_database, folder / "mlflow.db")
    return Store(f"sqlite:///{folder / 'mlflow.db'}")


@pytest.fixture
def spec(tmp_path: Path) -> PairSpec:
    """A pair of two local model folders."""
    models = tmp_path / "local"
    model_folder(models / "target", seed=1)
    model_folder(models / "draft", seed=2)
    return PairSpec.model_validate(
        {
            "name": "tiny",
            "description": "two tiny models",
            "licence": "none",
            "dtype": "float32",
            "target": {"path": str(models / "target")},
            "draft": {"path": str(models / "draft")},
        }
    )


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

    def made(name: str, **options: Any) -> ReleaseVersion:
        def publish_them() -> ReleaseVersion:
            return release(store, spec, files, tmp_path / name, **options)

        return kept.after(store, tuple(options.items()), publish_them)

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
