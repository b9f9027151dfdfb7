"""Nothing that a server reads is unpickled: with pickles forbidden it opens a bundle and answers, and a model that is one is refused."""

from __future__ import annotations

import io
import pickle
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from serving.artifacts.pair_files import PairFiles, weights_digest
from serving.bundle.bundle import artifact_classes
from serving.device import device_class
from serving.errors import DraftwellError
from serving.runtime.commands import Role
from serving.runtime.model_files import load_module
from serving.runtime.pair import LoadSettings, load_pair
from serving.server.model.served_model import from_bundle
from tests.serving.server.test_main import make_bundle, models
from tests.support.loop.publishing import every_kind
from tests.support.server.served_pair import serving

__all__ = ["models"]  # a fixture


class Unpickled(BaseException):
    """Something was unpickled; no handler catches it by accident."""


def forbid_pickles(patch: pytest.MonkeyPatch) -> list[str]:
    """Let every way to unpickle raise; returns the list of those that were tried, whatever became of the error."""
    tried: list[str] = []

    def refusing(name: str) -> Any:
        def refuse(*arguments: Any, **more: Any) -> Any:
            tried.append(name)
            raise Unpickled(name)
        return refuse

    for owner, name in ((pickle, "load"), (pickle, "loads"), (torch, "load"), (torch.serialization, "load")):
        patch.setattr(owner, name, refusing(f"{owner.__name__}.{name}"))
    for name in ("Unpickler", "_Unpickler"):  # a class still: libraries that are imported late inherit from it
        patch.setattr(pickle, name, type(name, (getattr(pickle, name),), {"__init__": refusing(f"pickle.{name}")}))
    return tried


@pytest.fixture
def no_pickles(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What was unpickled in spite of all."""
    return forbid_pickles(monkeypatch)


# A process of its own: a library that is imported meanwhile would keep what forbids for the tests behind this one.
CHILD = """
import sys
from pathlib import Path
import pytest
from tests.serving.bundle import test_no_unpickling as it

with pytest.MonkeyPatch.context() as patch:
    tried = it.forbid_pickles(patch)
    getattr(it, sys.argv[1])(*map(Path, sys.argv[2:]))
    print("tried", tried)
"""


def in_a_child(function: str, folder: Path) -> None:
    """Run a function of this file on a folder where nothing can be unpickled, and see that nothing tried to."""
    done = subprocess.run([sys.executable, "-c", CHILD, function, str(folder)], capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "tried []"


def answer_one_request(bundle: Path) -> None:
    """Serve a bundle."""
    body = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 8, "temperature": 0}
    with serving(from_bundle(bundle, slots=1, max_context=64)) as (url, _):
        answer = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    assert answer.json()["speculation"]["strategy"] == "spide"


def read_every_kind(folder: Path) -> None:
    """Read an artifact of every kind."""
    for kind, cls in artifact_classes().items():
        assert cls.load(folder / kind).kind == kind


def test_a_server_opens_its_bundle_and_answers(tmp_path: Path, models: dict[Role, Path]) -> None:
    bundle = make_bundle(tmp_path / "bundle", models, "spide", {"tau": 0.6}, machine=device_class("cpu"))
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


def refuse_in_one_line(place: Path) -> None:
    """A pair of which one model is a pickle: by what loads it, by what only reads its digest, and in a bundle."""
    (role,) = [role for role in ("target", "draft") if (place / role / "pytorch_model.bin").is_file()]
    files = PairFiles("tiny", place / "target", place / "draft")
    for read, words in ((lambda: load_module(place / role, torch.float32, "cpu"), "holds no model that can be read"),
                        (lambda: load_pair(files, LoadSettings(dtype="float32")), "holds no model that can be read"),
                        (lambda: weights_digest(place / role), "holds no safetensors weights"),
                        (lambda: from_bundle(place / "bundle"), "deploy again")):
        with pytest.raises(DraftwellError, match=words) as caught:
            read()
        assert "\n" not in str(caught.value)
        assert role in str(caught.value)


@pytest.mark.parametrize("role", ["target", "draft"])
def test_a_model_that_is_a_pickle_is_refused_in_one_line(tmp_path: Path, models: dict[Role, Path], role: Role) -> None:
    for name in ("target", "draft"):
        shutil.copytree(models[name], tmp_path / name)
    pickled(tmp_path / role)
    pickled(make_bundle(tmp_path / "bundle", models, "vanilla_sd") / "models" / role)
    in_a_child("refuse_in_one_line", tmp_path)


def test_the_guard_above_notices_a_pickle(tmp_path: Path, no_pickles: list[str]) -> None:
    torch.save({"weight": torch.ones(2)}, tmp_path / "model.bin")
    for read in (lambda: torch.load(tmp_path / "model.bin"), lambda: pickle.loads(pickle.dumps(1)),
                 lambda: pickle.Unpickler(io.BytesIO())):
        with pytest.raises(Unpickled):
            read()
    assert no_pickles == ["torch.load", "pickle.loads", "pickle.Unpickler"]
