"""`draftwell step train --kind eagle3_head`: from prompts to a head that strategies draft with,
and what is refused before any work."""

from __future__ import annotations

import json
import shutil
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from draftwell.components.distil.eagle3.training import HeadRecipe
from draftwell.flows.steps.eagle3 import curves_of
from draftwell.flows.workspace import Workspace
from draftwell.registry.store import Store
from draftwell.serving.artifacts.eagle3_head import Eagle3Head
from draftwell.serving.errors import DraftwellError
from tests.support.models.heads import random_eagle3
from tests.support.patching import replace_everywhere

QUICK = ("--set", "tokens=3000", "--set", "publish=false")


@pytest.fixture(scope="module")
def deep_pair(pair_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny pair with a target of seven layers: a head reads three different ones."""
    folder = tmp_path_factory.mktemp("deep")
    shutil.copytree(pair_file.parent, folder, dirs_exist_ok=True)
    old = LlamaConfig.from_pretrained(folder / "target")
    torch.manual_seed(1)
    module = LlamaForCausalLM(
        LlamaConfig(**{**old.to_dict(), "num_hidden_layers": 7, "initializer_range": 0.2})
    )
    module.save_pretrained(folder / "target")
    return Path(shutil.move(folder / "tiny.yaml", folder / "deep.yaml"))


def test_a_head_that_was_trained_elsewhere_is_taken_over(
    run: Any,
    own_stores: Path,
    deep_pair: Path,
    tmp_path: Path,
    empty_database: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("DRAFTWELL_MODELS", str(own_stores / "models"))
    monkeypatch.chdir(own_stores)
    shutil.copyfile(empty_database, own_stores / "mlflow.db")
    module = LlamaForCausalLM.from_pretrained(deep_pair.parent / "target")
    _, head = random_eagle3(module, 40)
    ids = head.head_tokens
    head.write_standalone(tmp_path / "theirs", module.lm_head.weight[ids])
    config = json.loads((tmp_path / "theirs" / "config.json").read_text())
    del config["eagle_aux_hidden_state_layer_ids"], config["eagle_config"]
    (tmp_path / "theirs" / "config.json").write_text(json.dumps(config))

    command = (
        f"step train --kind eagle3_head --pair {deep_pair} --set published={tmp_path / 'theirs'}"
    )
    refused = run(f"{command} --minutes 5")
    assert refused.exit_code == 2
    assert "--minutes: not with published=" in refused.stderr
    done = run(command)
    assert done.exit_code == 0, (done.output, done.exception)
    assert "a head of 40 tokens" in done.stdout
    assert "registered eagle3_head.tiny version 1" in done.stderr
    space = Workspace(str(deep_pair))
    taken = Eagle3Head.load(space.folder("eagle3_head"))
    assert taken.layers == (2, 3, 4)
    assert "lm_head.weight" in taken.state
    outputs = {}
    for strategy in ("autoregressive", "eagle3"):
        done = run(
            f"generate --pair {deep_pair} --strategy {strategy} --prompt",
            "the inn",
            "--max-tokens 16",
        )
        assert done.exit_code == 0, (done.output, done.exception)
        outputs[strategy] = done.stdout
    assert outputs["eagle3"] == outputs["autoregressive"]
    refused = run(f"step train --kind verifier --set published={tmp_path} --pair {deep_pair}")
    assert refused.exit_code == 2
    assert "--set published: not for --kind verifier" in refused.stderr


def test_code_of_a_target_is_never_run_for_a_head(
    run: Any, own_stores: Path, deep_pair: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(own_stores)
    shutil.copytree(deep_pair.parent, tmp_path / "own")
    settings = tmp_path / "own" / "target" / "config.json"
    code = {"AutoConfig": "configuration_own.Own"}
    (settings.parent / "configuration_own.py").write_text("raise SystemExit(99)")
    settings.write_text(
        json.dumps(json.loads(settings.read_text()) | {"model_type": "own", "auto_map": code})
    )
    pair = tmp_path / "own" / deep_pair.name
    refused = run(f"step train --kind eagle3_head --pair {pair} --set published={tmp_path}")
    assert refused.exit_code == 2, refused.exception
    assert "which is never run" in refused.stderr


def test_a_head_is_trained_registered_and_drafted_with(
    run: Any,
    own_stores: Path,
    deep_pair: Path,
    prompts_file: Path,
    empty_database: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("DRAFTWELL_MODELS", str(own_stores / "models"))
    replace_everywhere(
        monkeypatch,
        "draftwell.components.distil.eagle3.training.HeadRecipe",
        partial(HeadRecipe, measure_steps=1),
    )
    monkeypatch.chdir(own_stores)
    shutil.copyfile(empty_database, own_stores / "mlflow.db")
    done = run(
        f"step train --kind eagle3_head --pair {deep_pair} --prompts {prompts_file} --set "
        f"tokens=3000",
    )
    assert done.exit_code == 0, (done.output, done.exception)
    assert "acceptance on held-out texts" in done.stdout
    assert "tokens by the target" in done.stderr
    assert "remove it when no further head shall be trained" in done.stderr
    home = own_stores / "draftwell" / "pairs" / "tiny" / "float32"
    head = Eagle3Head.load(home / "artifacts" / "eagle3_head")
    assert head.layers == (2, 3, 4)
    assert head.provenance.training_prompts
    report = json.loads((home / "reports" / "eagle3_head.json").read_text())
    assert report["tokens"] >= 3000
    version = Store().resolve("eagle3_head", "tiny", 1)
    assert version.digest == head.digest
    (final,) = Store().client.get_metric_history(version.run_id, "acceptance_depth_1")
    assert final.value == pytest.approx(report["acceptance"][0])
    curve = [
        (point.step, point.value)
        for point in Store().client.get_metric_history(version.run_id, "sample_acceptance_depth_1")
    ]
    assert len(curve) >= 2, "it is drawn over the steps of training"
    assert min(step for step, _ in curve) > 0
    assert max(curve)[0] == report["steps"]
    losses = {point.step for point in Store().client.get_metric_history(version.run_id, "loss")}
    assert len(losses) >= 2
    assert losses <= {step for step, _ in curve}

    outputs = {}
    for strategy in ("autoregressive", "eagle3", "hybrid"):
        more = ("--set", "hybrid.drafter=head") if strategy == "hybrid" else ()
        done = run(
            f"generate --pair {deep_pair} --strategy {strategy} --prompt",
            "the inn",
            "--max-tokens 16",
            *more,
        )
        assert done.exit_code == 0, (done.output, done.exception)
        outputs[strategy] = done.stdout
    assert outputs["eagle3"] == outputs["hybrid"] == outputs["autoregressive"]
    profile = json.loads(
        (home / "cpu" / "artifacts" / "hardware_profile" / "profile.json").read_text()
    )
    assert profile["t_head"] > 0, "the head's step is measured with the others"

    again = run(
        f"step train --kind eagle3_head --pair {deep_pair} --prompts {prompts_file}", *QUICK
    )
    assert again.exit_code == 0, (again.output, again.exception)
    assert "tokens by the target" not in again.stderr, "the corpus is there already"
    assert Eagle3Head.load(home / "artifacts" / "eagle3_head").digest == head.digest, (
        "and the training is finished"
    )
    space = Workspace(str(deep_pair), "float32", device="cpu")
    assert {
        name: [list(point) for point in points]
        for name, points in curves_of(space, home / "artifacts" / "eagle3_head").items()
    }.keys() >= {"loss", "sample_acceptance_depth_1"}, "what a later release draws"
    more = own_stores / "more.jsonl"
    more.write_text(prompts_file.read_text() + '{"prompt": "the inn"}\n{"prompt": "the inn"}\n')
    for changed in (("--prompts", prompts_file, "--set", "seed=1"), ("--prompts", more)):
        other = run(f"step train --kind eagle3_head --pair {deep_pair}", *changed, *QUICK)
        assert other.exit_code == 0, (other.output, other.exception)
        assert Eagle3Head.load(home / "artifacts" / "eagle3_head").digest != head.digest, (
            "another training, not a finished one"
        )
    made = Eagle3Head.load(home / "artifacts" / "eagle3_head").provenance
    assert made.parameters["conversations"] == len(made.training_prompts or ()), (
        "a repeated prompt is learned once"
    )
    assert curves_of(space, tmp_head(own_stores, head)) == {}, "the report is of another head now"
    settings = (
        "--set",
        f"config={config_file(own_stores)}",
        "--set",
        f"save_head={own_stores / 'for_vllm'}",
    )
    exported = run(f"export --to vllm --pair {deep_pair}", *settings)
    assert exported.exit_code == 0, (exported.output, exported.exception)
    assert json.loads(exported.stdout)["settings"]["model"] == str(own_stores / "for_vllm")
    assert (own_stores / "for_vllm" / "model.safetensors").is_file()


def tmp_head(folder: Path, head: Eagle3Head) -> Path:
    head.save(folder / "first")
    return folder / "first"


def config_file(folder: Path) -> Path:
    file = folder / "config.json"
    file.write_text(json.dumps({"strategy": "eagle3", "parameters": {"num_speculative_tokens": 2}}))
    return file


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--kind", "verifier", "--minutes", 1), "--minutes: not for --kind verifier"),
        (("--kind", "eagle3_head", "--prompts", "x.jsonl"), "has only 2"),
        *(
            (
                ("--kind", "eagle3_head", "--set", f"{key}={value}"),
                f"--set {key}: not for --kind eagle3_head",
            )
            for key, value in (
                ("traces", "traces"),
                ("test", "traces"),
                ("label", "ratio"),
                ("ratio", "1"),
                ("eta_fp", "0.1"),
                ("features", "before"),
            )
        ),
        (("--kind", "eagle3_head", "--device", "cuda"), "--device: not for --kind eagle3_head"),
        (
            ("--kind", "eagle3_head", "--set", "traces=a", "--set", "label=soft"),
            "--set label, --set traces: not for",
        ),
        (
            ("--kind", "medusa_heads", "--set", "ratio=1"),
            "--set ratio: not for --kind medusa_heads",
        ),
        (("--kind", "datastore", "--set", "seed=1"), "--set seed: not for --kind datastore"),
        (("--kind", "datastore", "--set", "test=traces"), "--set test: not for --kind datastore"),
    ],
)
def test_what_is_refused(
    run: Any,
    own_stores: Path,
    pair_file: Path,
    prompts_file: Path,
    options: tuple[Any, ...],
    words: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("DRAFTWELL_MODELS", str(own_stores / "models"))
    monkeypatch.chdir(own_stores)
    shutil.copyfile(prompts_file, own_stores / "x.jsonl")
    refused = run(f"step train --pair {pair_file}", *options, "--set", "publish=false")
    assert refused.exit_code == 2
    assert words in refused.stderr
    assert refused.stderr.splitlines()[-1].startswith("Error: ")


def test_the_recipe_is_given_the_seed(
    run: Any, own_stores: Path, pair_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(
        "draftwell.flows.steps.eagle3.load_target",
        lambda *_: SimpleNamespace(
            modules={"target": SimpleNamespace(config=SimpleNamespace(num_hidden_layers=12))}
        ),
    )
    monkeypatch.setattr("draftwell.flows.steps.eagle3.source_of", lambda *_: None)

    def distil_head(source: Any, recipe: HeadRecipe, *_: Any, **__: Any) -> Any:
        asked.append(recipe.seed)
        raise DraftwellError("enough", code="enough")

    replace_everywhere(
        monkeypatch, "draftwell.components.distil.eagle3.distil.distil_head", distil_head
    )
    monkeypatch.chdir(own_stores)
    for seed in ((), ("--set", "seed=7")):
        run(f"step train --kind eagle3_head --pair {pair_file} --device cpu", *seed)
    assert asked == [0, 7]
