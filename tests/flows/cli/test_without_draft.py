"""A pair that has a target and a head, and no draft model: it is calibrated, and hybrid decodes
with the head."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml
from transformers import LlamaForCausalLM

from draftwell.flows.workspace import Workspace
from draftwell.serving.artifacts.hardware_profile import HardwareProfile
from draftwell.serving.artifacts.pair_files import fingerprint
from tests.support.models.heads import random_eagle3


@pytest.fixture
def alone(pair_file: Path, own_stores: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """YAML file of the tiny pair's target, whose workspace has a head."""
    monkeypatch.setenv("DRAFTWELL_MODELS", str(own_stores / "models"))
    monkeypatch.chdir(own_stores)
    described = yaml.safe_load(pair_file.read_text())
    del described["draft"]
    described["target"] = {"path": str(pair_file.parent / "target")}
    file = own_stores / "alone.yaml"
    file.write_text(yaml.safe_dump(described | {"name": "alone"}))
    space = Workspace(str(file))
    _, head = random_eagle3(LlamaForCausalLM.from_pretrained(space.files().target), 40)
    space.save(head.bound_to("alone", fingerprint(space.files(), space.dtype)))
    return file


def test_a_target_with_a_head_is_calibrated_and_drafts_with_it(run: Any, alone: Path) -> None:
    done = run(f"step calibrate --pair {alone} --set publish=false")
    assert done.exit_code == 0, (done.output, done.exception)
    assert "head step" in done.stdout
    space = Workspace(str(alone))
    profile = HardwareProfile.load(space.folder("hardware_profile"))
    assert profile.t_draft is None
    assert profile.t_head is not None
    report = json.loads((space.reports / "calibration.json").read_text())
    assert report.keys() == {"t_head_ms", "t_verify_ms"}

    outputs = {}
    for strategy in ("autoregressive", "hybrid"):
        done = run(
            f"generate --pair {alone} --strategy {strategy} --prompt",
            "the inn",
            "--max-tokens 16",
        )
        assert done.exit_code == 0, (done.output, done.exception)
        assert "measuring a hardware profile" not in done.stderr, "that of calibration is complete"
        outputs[strategy] = done.stdout
    assert outputs["hybrid"] == outputs["autoregressive"]


@pytest.mark.parametrize(
    ("option", "value"),
    [("--set traces", "=traces"), ("--set temperature", "=1"), ("--prompts", " x.jsonl")],
)
def test_options_that_read_traces_are_refused_without_a_draft(
    run: Any, alone: Path, option: str, value: Any
) -> None:
    refused = run(f"step calibrate --pair {alone} {option}{value}")
    assert refused.exit_code == 2
    assert f"{option}: only for pairs with a draft model" in refused.stderr


@pytest.fixture
def foreign(pair_file: Path, own_stores: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """YAML file of the tiny pair with a draft of another vocabulary altogether."""
    monkeypatch.setenv("DRAFTWELL_MODELS", str(own_stores / "models"))
    monkeypatch.chdir(own_stores)
    shutil.copytree(pair_file.parent, own_stores / "foreign")
    file = own_stores / "foreign" / "draft" / "tokenizer.json"
    body = json.loads(file.read_text())
    vocab = body["model"]["vocab"]
    body["model"]["vocab"] = {name: (i + 1) % len(vocab) for name, i in vocab.items()}
    file.write_text(json.dumps(body))
    return own_stores / "foreign" / pair_file.name


def test_a_pair_whose_draft_has_another_vocabulary_does_what_needs_none(
    run: Any, foreign: Path
) -> None:
    outputs = {}
    for strategy in ("autoregressive", "prompt_lookup", "suffix"):
        done = run(
            f"generate --pair {foreign} --strategy {strategy} --prompt",
            "the inn",
            "--max-tokens 16",
        )
        assert done.exit_code == 0, (done.output, done.exception)
        outputs[strategy] = done.stdout
    assert len(set(outputs.values())) == 1
    for command in ("generate --strategy vanilla_sd --prompt the", "step collect --set limit=2"):
        refused = run(f"{command} --pair {foreign}")
        assert refused.exit_code == 2
        assert "cannot draft for target" in refused.stderr
        assert "`draftwell step distil`" in refused.stderr
    done = run(f"step calibrate --pair {foreign} --set publish=false")
    assert done.exit_code == 0, (done.output, done.exception)
    assert "no draft model: the hardware profile alone" in done.stdout
