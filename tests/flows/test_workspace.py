"""Workspaces keep apart what is valid on one device only, and refuse what another version made."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import draftwell.flows.steps.profile
import draftwell.serving.device
from draftwell.flows.context import StepContext, encoder_of
from draftwell.flows.settings import PipelineSettings
from draftwell.flows.steps.profile import find_or_measure_profile
from draftwell.flows.steps.publish import run_publish
from draftwell.flows.workspace import Workspace
from draftwell.serving.artifacts.acceptance_table import AcceptanceTable
from draftwell.serving.artifacts.base import Provenance
from draftwell.serving.artifacts.decoding_config import DecodingConfig
from draftwell.serving.artifacts.hardware_profile import HardwareProfile
from draftwell.serving.artifacts.pair_files import fingerprint
from draftwell.serving.device import checked_device, default_device
from draftwell.serving.files import set_aside
from draftwell.serving.format import FORMAT
from draftwell.serving.number_format import WEIGHTS, Weights, named
from tests.support.errors import raises_code
from tests.support.loop.publishing import profile, verifier
from tests.support.models.matrix import ROWS
from tests.support.patching import replace_everywhere

MARK = "f" * 64


def config(device_class: str | None, strategy: str = "spide") -> DecodingConfig:
    return DecodingConfig(
        strategy, {}, {}, Provenance(pair="tiny", fingerprint=MARK, device_class=device_class)
    )


@dataclass
class OnDevice:
    """As much of a loaded pair as publishing and gating look at."""

    device: str
    fingerprint: str = MARK
    dtype: str = "float32"


def test_one_place_picks_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    assert (default_device(), PipelineSettings().device) == ("cpu", "cpu")
    replace_everywhere(monkeypatch, draftwell.serving.device, "cuda_available", lambda: True)
    assert (default_device(), PipelineSettings().device, checked_device("cuda")) == (
        "cuda",
        "cuda",
        "cuda",
    )
    monkeypatch.setenv(draftwell.serving.device.VARIABLE, "cpu")
    assert (default_device(), PipelineSettings().device) == ("cpu", "cpu")
    monkeypatch.setenv(draftwell.serving.device.VARIABLE, "gpu")
    with raises_code("unknown_device", "DRAFTWELL_DEVICE gpu"):
        default_device()
    replace_everywhere(monkeypatch, draftwell.serving.device, "cuda_available", lambda: False)
    monkeypatch.setenv(draftwell.serving.device.VARIABLE, "cuda")
    with raises_code("no_cuda", "DRAFTWELL_DEVICE cuda"):
        default_device()


@pytest.mark.usefixtures("cuda_host")
def test_a_workspace_is_of_the_default_device_unless_told(
    own_stores: Path, pair_file: Path
) -> None:
    assert [Workspace(str(pair_file), device=device).device for device in (None, "cpu")] == [
        "cuda",
        "cpu",
    ]
    told = Workspace(str(pair_file), device="cpu")
    assert (told.in_dtype("bfloat16").device, told.aside(own_stores / "x").device) == ("cpu", "cpu")


def test_two_devices_do_not_overwrite_each_other_and_share_what_they_can(
    own_stores: Path, pair_file: Path
) -> None:
    cpu, cuda = (Workspace(str(pair_file), device=device) for device in ("cpu", "cuda"))
    cpu.save(config("cpu-x86-2c-avx2", "spide"))
    cuda.save(config("cuda-nvidia-h100", "vanilla_sd"))
    cpu.save(verifier(MARK))
    assert [
        DecodingConfig.load(space.folder("decoding_config")).strategy for space in (cpu, cuda)
    ] == ["spide", "vanilla_sd"]
    assert cpu.folder("verifier") == cuda.folder("verifier")
    assert cpu.traces == cuda.traces
    assert {kind: folder.parts[-3] for kind, folder in cuda.kept().items()} == {
        "decoding_config": "cuda",
        "verifier": "float32",
    }
    cpu.save(config("cuda-nvidia-h100", "svip"))
    assert DecodingConfig.load(cuda.folder("decoding_config")).strategy == "svip", (
        "it goes by where it was made"
    )


def test_a_profile_of_other_layers_is_measured_again(
    own_stores: Path, pair_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the same machine: the library decodes a token in half the time."""
    measured: list[str | None] = []

    def measure(pair: Any, made: Provenance, head: None) -> HardwareProfile:
        measured.append(made.device_class)
        return HardwareProfile(1.0, {1: 4.0}, 0.1, made)

    monkeypatch.setattr(draftwell.flows.steps.profile, "measure_profile", measure)
    space, here = Workspace(str(pair_file)), draftwell.serving.device.device_class("cpu")
    by_torch, by_library = (
        SimpleNamespace(
            name="tiny",
            device="cpu",
            fingerprint=MARK,
            padded_to=None,
            models={
                role: SimpleNamespace(native=layers, device=torch.device("cpu"))
                for role in ("target", "draft")
            },
        )
        for layers in (None, object())
    )
    for pair in (by_torch, by_torch, by_library, by_library, by_torch):
        made: Any = find_or_measure_profile(space, pair, ["pearl"])  # type: ignore[arg-type]
        kept = space.found(pair, "hardware_profile")  # type: ignore[arg-type]
        assert kept is not None
        assert made.provenance.device_class == kept.provenance.device_class
    assert find_or_measure_profile(space, by_torch, ["prompt_lookup"]) is None  # type: ignore[arg-type]
    torch_class = f"{here}+torch-draft-target"
    assert measured == [torch_class, here, torch_class]


def test_a_workspace_of_another_version_is_refused_in_one_line(
    own_stores: Path, pair_file: Path
) -> None:
    space = Workspace(str(pair_file), device="cpu")
    space.save(config("cpu-x86"))
    mark = space.root / "workspace.json"
    assert json.loads(mark.read_text()) == {"format": FORMAT}
    Workspace(str(pair_file))
    mark.write_text(json.dumps({"format": FORMAT + 1}))
    with raises_code("newer_format", str(space.root), "upgrade draftwell"):
        Workspace(str(pair_file))
    mark.unlink()
    with raises_code("older_format", str(space.root), "make reset"):
        Workspace(str(pair_file))


def test_looking_at_a_workspace_writes_nothing(own_stores: Path, pair_file: Path) -> None:
    space = Workspace(str(pair_file), device="cpu")
    pair: Any = OnDevice("cpu")
    assert space.found(pair, "hardware_profile") is None
    assert space.kept() == {}
    assert not space.root.exists()


def test_end_tokens_of_the_config_alone_are_known_without_the_models(
    own_stores: Path, pair_file: Path
) -> None:
    folder = shutil.copytree(pair_file.parent, own_stores / "files")
    (folder / "target" / "generation_config.json").unlink()
    settings = json.loads((folder / "target" / "config.json").read_text())
    (folder / "target" / "config.json").write_text(json.dumps(settings | {"eos_token_id": [1, 7]}))
    assert {1, 7} <= encoder_of(Workspace(str(folder / pair_file.name))).stop_tokens


def test_end_tokens_of_a_text_part_are_known_without_the_models(
    own_stores: Path, pair_file: Path
) -> None:
    (row,) = (row for row in ROWS if row.name == "Gemma 3 with images")
    folder = shutil.copytree(pair_file.parent, own_stores / "files")
    module = row.module()
    module.config.text_config.eos_token_id = [1, 7]
    module.save_pretrained(folder / "target")
    (folder / "target" / "generation_config.json").unlink()
    assert {1, 7} <= encoder_of(Workspace(str(folder / pair_file.name))).stop_tokens


def test_a_profile_of_another_device_is_not_found(own_stores: Path, pair_file: Path) -> None:
    space = Workspace(str(pair_file), device="cpu")
    space.save(profile(MARK))
    on_cuda: Any = OnDevice("cuda:0")
    on_cpu: Any = OnDevice("cpu")
    assert space.found(on_cuda, "hardware_profile") is None
    assert space.found(on_cpu, "hardware_profile") is not None


def test_an_artifact_that_was_set_aside_is_missed_and_put_back(
    own_stores: Path, pair_file: Path
) -> None:
    """Where folders cannot change places, a kill leaves the old one aside; the one that comes with
    the pair must not take its place unsaid."""
    space = Workspace(str(pair_file), device="cpu")
    folder = space.save(profile(MARK))
    folder.rename(set_aside(folder))
    pair: Any = OnDevice("cpu")
    with raises_code("replacement_cut_off", "hardware_profile", str(set_aside(folder))):
        space.found(pair, "hardware_profile")
    space.begin()  # a bench does so, beside a tuning that is just replacing it
    with raises_code("replacement_cut_off"):
        space.found(pair, "hardware_profile")
    with space.turn("draftwell step choose"):
        assert space.found(pair, "hardware_profile") is not None


def test_a_cpu_config_under_a_cuda_name_is_refused(own_stores: Path, pair_file: Path) -> None:
    space = Workspace(str(pair_file), device="cpu")
    space.save(config("cpu-x86-2c-avx2"))
    step = StepContext(space, None)  # type: ignore[arg-type]
    with raises_code("nothing_to_release", "--device cuda"):
        run_publish(step, {}, device="cuda")
    with raises_code("nothing_to_release", "--device cuda"):
        run_publish(StepContext(Workspace(str(pair_file), device="cuda"), None), {})  # type: ignore[arg-type]


@pytest.mark.parametrize("weights", WEIGHTS)
def test_rounded_weights_have_a_workspace_of_their_own_and_refuse_the_others_artifacts(
    own_stores: Path, pair_file: Path, weights: Weights
) -> None:
    full, less = Workspace(str(pair_file)), Workspace(str(pair_file), named("float32", weights))
    assert less.root.name == f"float32-{weights}"
    marks = {space: fingerprint(space.files(), space.dtype) for space in (full, less)}
    for space, mark in marks.items():
        AcceptanceTable.empty(Provenance(pair="tiny", fingerprint=mark)).save(
            space.folder("acceptance_table")
        )
    pair = less.load()
    assert (
        less.resources(pair, ["spide"]).artifacts["acceptance_table"].provenance.fingerprint
        == marks[less]
    )
    with raises_code("another_pair", marks[full][:12], marks[less][:12]):
        less.resources(pair, ["spide"], folder=full.artifacts)
    assert full.root.name == "float32"


def test_a_pairs_own_weights_are_its_default(own_stores: Path, pair_file: Path) -> None:
    file = pair_file.with_name("rounded.yaml")
    file.write_text(pair_file.read_text() + "weights: int8\n")
    assert [Workspace(str(file), dtype).dtype for dtype in (None, "float32")] == [
        "float32-int8",
        "float32",
    ]


@pytest.mark.parametrize(
    ("dtype", "lacks", "advised"),
    [("bfloat16", True, True), ("bfloat16", False, False), ("float32", True, False)],
)
def test_a_cpu_that_will_be_slow_with_bfloat16_is_told(
    monkeypatch: pytest.MonkeyPatch,
    own_stores: Path,
    pair_file: Path,
    dtype: str,
    lacks: bool,
    advised: bool,
) -> None:
    replace_everywhere(monkeypatch, draftwell.serving.device, "lacks_bfloat16", lambda: lacks)
    said: list[str] = []
    Workspace(str(pair_file), dtype, said.append)._say_loading("cpu", None)
    assert ["float32 is faster" in line for line in said] == [advised]
