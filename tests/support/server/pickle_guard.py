"""A process in which nothing can be unpickled, and what the tests run in it."""

from __future__ import annotations

import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from draftwell.serving.artifacts.kinds import KINDS
from draftwell.serving.artifacts.pair_files import PairFiles, weights_digest
from draftwell.serving.errors import DraftwellError
from draftwell.serving.runtime.pair import LoadSettings, load_module, load_pair
from tests.support.server.bundles import load_bundle
from tests.support.server.served_pair import serving


class Unpickled(BaseException):
    """Something was unpickled; no handler catches it by accident."""


def forbid_pickles(patch: pytest.MonkeyPatch) -> list[str]:
    """Let every way to unpickle raise; returns the list of those that were tried, whatever became
    of the error."""
    tried: list[str] = []

    def refusing(name: str) -> Any:
        def refuse(*arguments: Any, **more: Any) -> Any:
            tried.append(name)
            raise Unpickled(name)

        return refuse

    for owner, name in (
        (pickle, "load"),
        (pickle, "loads"),
        (torch, "load"),
        (torch.serialization, "load"),
    ):
        patch.setattr(owner, name, refusing(f"{owner.__name__}.{name}"))
    # a class still: libraries that are imported late inherit from it
    for name in ("Unpickler", "_Unpickler"):
        patch.setattr(
            pickle,
            name,
            type(name, (getattr(pickle, name),), {"__init__": refusing(f"pickle.{name}")}),
        )
    return tried


# A process of its own: a library that is imported under the guard would keep it for later tests.
CHILD = """
import sys
from pathlib import Path
import pytest
from tests.support.server import pickle_guard as it

with pytest.MonkeyPatch.context() as patch:
    tried = it.forbid_pickles(patch)
    getattr(it, sys.argv[1])(*map(Path, sys.argv[2:]))
    print("tried", tried)
"""


def in_a_child(function: str, *folders: Path) -> None:
    """Run a function of this file on folders in a process where nothing can be unpickled, and check
    that nothing tried to."""
    command = [sys.executable, "-c", CHILD, function, *map(str, folders)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "tried []"


def answer_one_request(bundle: Path) -> None:
    """Serve a bundle."""
    body = {
        "model": "tiny",
        "messages": [{"role": "user", "content": "hi"}],
        "max_tokens": 8,
        "temperature": 0,
    }
    with serving(load_bundle(bundle, slots=1, max_context=64)) as (url, _):
        answer = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    assert answer.json()["speculation"]["strategy"] == "spide"


def read_every_kind(folder: Path) -> None:
    """Read an artifact of every kind."""
    for name, kind in KINDS.items():
        assert kind.load_class().load(folder / name).kind == name


def refuse_in_one_line(*places: Path) -> None:
    """Pairs of which one model is a pickle: refused when loaded, when only the digest is read, and
    in a bundle."""
    for place in places:
        refuse_one(place)


def refuse_one(place: Path) -> None:
    """As `refuse_in_one_line`, for one pair."""
    (role,) = [
        role for role in ("target", "draft") if (place / role / "pytorch_model.bin").is_file()
    ]
    files = PairFiles("tiny", place / "target", place / "draft")
    for read, words in (
        (
            lambda: load_module(place / role, torch.float32, "cpu"),
            "has pickled weights, which are never read",
        ),
        (
            lambda: load_pair(files, LoadSettings(dtype="float32")),
            "has pickled weights, which are never read",
        ),
        (lambda: weights_digest(place / role), "holds no safetensors weights"),
        (lambda: load_bundle(place / "bundle"), "deploy again"),
    ):
        with pytest.raises(DraftwellError, match=words) as caught:
            read()
        assert "\n" not in str(caught.value)
        assert role in str(caught.value)
