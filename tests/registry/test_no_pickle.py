"""No published file can run code when it is read: every kind is published, and every file of the
registry is looked into."""

import io
import json
import pickle
import pickletools
import zipfile
from pathlib import Path

import pytest
import yaml

from draftwell.registry.onnx_models import GRAPHS
from draftwell.registry.pairs import PairSpec, model_records
from draftwell.registry.releases import create_release, record_gate
from draftwell.registry.store import Store
from draftwell.serving.artifacts.kinds import KINDS
from draftwell.serving.artifacts.pair_files import PairFiles, fingerprint
from tests.support.loop.publishing import every_kind, publish, verdict

ENDINGS = {".json", ".safetensors", ".onnx", ".arrow", ".md", ".png", ".html", ".txt", ".yaml", ""}
"""What a published file may be called; MLmodel has no ending, MLflow's requirements have two."""


def is_pickle(data: bytes) -> bool:
    """Whether a file begins with a whole pickle: every instruction is known and finds on the stack
    what it needs."""
    try:
        pickletools.dis(data, out=io.StringIO())
    except (ValueError, IndexError, AssertionError):
        return False
    return True


def threats(file: Path) -> list[str]:
    """What is dangerous about a file."""
    data = file.read_bytes()
    found = []
    if file.suffix not in ENDINGS:
        found.append(f"ending {file.suffix}")
    if is_pickle(data):
        found.append("pickle")
    if zipfile.is_zipfile(file):
        found.append("zip, as torch.save writes")
    if data[:6] == b"\x93NUMPY":
        found.append("numpy")
    if data[:2] in (b"\x1f\x8b", b"BZ"):
        found.append("compressed: what is in it nobody has seen")
    if data[:4] == b"\x7fELF" or data[:2] == b"#!":
        found.append("program")
    return found


@pytest.fixture
def published(store: Store, spec: PairSpec, files: PairFiles, tmp_path: Path) -> Path:
    """The folder of a registry that holds one of every kind, a release, its verdict, plots and a
    page."""
    mark = fingerprint(files, "float32")
    (tmp_path / "roc.png").write_bytes(b"\x89PNG\r\n\x1a\n")
    (tmp_path / "tuning.html").write_text("<!doctype html>")
    pins = {}
    for artifact in every_kind(mark):
        made = publish(
            store,
            artifact,
            tmp_path / artifact.kind,
            plots=[tmp_path / "roc.png", tmp_path / "tuning.html"],
        )
        pins[made.kind] = made.version
    assert set(pins) == set(KINDS)
    release = create_release(
        store, "tiny", "cpu", pins, model_records(spec, files), {"speedup": 1.2}
    )
    record_gate(store, verdict(release), words="**Gate passed**", files=[tmp_path / "roc.png"])
    return Path(store.uri.removeprefix("sqlite:///")).parent / "artifacts"


def test_no_published_file_is_a_pickle_or_a_program(published: Path) -> None:
    files = [path for path in published.rglob("*") if path.is_file()]
    assert len(files) > 40
    assert {path.name: found for path in files if (found := threats(path))} == {}


def test_mlflow_finds_no_code_that_it_could_run(published: Path) -> None:
    """What predicts is a graph, which MLflow's own module reads; a pickled model, or code next to
    it, would be run out of the artifact."""
    cards = [yaml.safe_load(path.read_text()) for path in published.rglob("MLmodel")]
    assert len(cards) == len(KINDS) + 1
    for card in cards:
        flavours = {"draftwell"}
        if card["metadata"]["kind"] in GRAPHS:
            flavours |= {"onnx", "python_function"}
            assert card["flavors"]["python_function"]["loader_module"] == "mlflow.onnx"
            assert {card["flavors"][name]["data"] for name in flavours} == {".", "model.onnx"}
        assert set(card["flavors"]) == flavours
        assert not any(flavour.get("code") for flavour in card["flavors"].values())
    text = json.dumps(cards)
    assert [
        word
        for word in ("model_code_path", "python_model", "cloudpickle", "pickle")
        if f'"{word}' in text
    ] == []


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
@pytest.mark.parametrize("value", [{"a": 1}, print, [1, 2], "text"])
def test_the_scan_knows_a_pickle_of_any_name(tmp_path: Path, protocol: int, value: object) -> None:
    (tmp_path / "table.json").write_bytes(pickle.dumps(value, protocol))
    assert "pickle" in threats(tmp_path / "table.json")


def test_the_scan_knows_what_torch_and_numpy_save(tmp_path: Path) -> None:
    import numpy as np
    import torch

    torch.save({"weight": torch.ones(2)}, tmp_path / "model.safetensors")
    np.save(tmp_path / "table.npy", np.ones(2))
    assert "zip, as torch.save writes" in threats(tmp_path / "model.safetensors")
    assert threats(tmp_path / "table.npy") == ["ending .npy", "numpy"]
    (tmp_path / "verifier.onnx").write_bytes(b"#!/bin/sh\n")
    assert threats(tmp_path / "verifier.onnx") == ["program"]
