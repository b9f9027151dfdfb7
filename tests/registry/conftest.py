"""A registry of its own for each test: the empty SQLite file is copied."""

import shutil
from pathlib import Path

import pytest

from draftwell.registry.pairs import PairSpec, fetch
from draftwell.registry.store import Store
from draftwell.serving.artifacts.pair_files import PairFiles
from tests.support.loop.publishing import model_folder


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


@pytest.fixture(autouse=True)
def own_models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Converted models of these tests do not reach the cache that all tests share."""
    monkeypatch.setenv("DRAFTWELL_MODELS", str(tmp_path / "models"))
    monkeypatch.setenv("DRAFTWELL_HOME", str(tmp_path / "home"))
    return tmp_path / "models"
