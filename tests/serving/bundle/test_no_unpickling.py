"""Nothing that a server reads is unpickled: with pickles forbidden it opens a bundle and answers,
and a model that is one is refused."""

from __future__ import annotations

import io
import pickle
import shutil
from pathlib import Path

import pytest
import torch

from draftwell.serving.device import device_class
from draftwell.serving.runtime.commands import Role
from tests.support.loop.publishing import every_kind
from tests.support.server.bundles import make_bundle
from tests.support.server.pickle_guard import Unpickled, forbid_pickles, in_a_child


@pytest.fixture
def no_pickles(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What was unpickled despite the guard."""
    return forbid_pickles(monkeypatch)


@pytest.mark.slow
def test_a_server_opens_its_bundle_and_answers(
    tmp_path: Path, tiny_models: dict[Role, Path]
) -> None:
    bundle = make_bundle(
        tmp_path / "bundle", tiny_models, "spide", {"tau": 0.6}, machine=device_class("cpu")
    )
    in_a_child("answer_one_request", bundle)


def test_an_artifact_of_any_kind_is_read(tmp_path: Path) -> None:
    for artifact in every_kind("f" * 64):
        artifact.save(tmp_path / artifact.kind)
    in_a_child("read_every_kind", tmp_path)


def pickled(folder: Path) -> None:
    """Turn a model folder's weights into a pickle, as models were once published."""
    from safetensors.torch import load_file

    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()


@pytest.mark.slow
def test_a_model_that_is_a_pickle_is_refused_in_one_line(
    tmp_path: Path, tiny_models: dict[Role, Path]
) -> None:
    """Of either role; one process for both, because starting it takes most of the time."""
    for role in ("target", "draft"):
        place = tmp_path / role
        for name in ("target", "draft"):
            shutil.copytree(tiny_models[name], place / name)
        pickled(place / role)
        pickled(make_bundle(place / "bundle", tiny_models, "vanilla_sd") / "models" / role)
    in_a_child("refuse_in_one_line", tmp_path / "target", tmp_path / "draft")


def test_the_guard_above_notices_a_pickle(tmp_path: Path, no_pickles: list[str]) -> None:
    torch.save({"weight": torch.ones(2)}, tmp_path / "model.bin")
    for read in (
        lambda: torch.load(tmp_path / "model.bin"),
        lambda: pickle.loads(pickle.dumps(1)),
        lambda: pickle.Unpickler(io.BytesIO()),
    ):
        with pytest.raises(Unpickled):
            read()
    assert no_pickles == ["torch.load", "pickle.loads", "pickle.Unpickler"]
