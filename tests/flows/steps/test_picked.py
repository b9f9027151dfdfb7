"""A version that a person marks in MLflow is what the next tuning, release and bundle use."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from draftwell.components.collect.settings import CollectionSettings
from draftwell.components.train.settings import LabelKind, VerifierSettings
from draftwell.components.tune.settings import Constraints, TuneSettings
from draftwell.flows.context import StepContext
from draftwell.flows.steps import (
    collect as collect_step,
    publish as publish_step,
    train as train_step,
    tune as tune_step,
)
from draftwell.flows.steps.deploy import promote_and_deploy
from draftwell.flows.steps.picked import take_marked
from draftwell.registry.composing import PICKED
from draftwell.registry.releases import record_gate
from draftwell.registry.store import Store
from draftwell.serving.artifacts.base import digest_of
from draftwell.serving.artifacts.decoding_config import DecodingConfig
from draftwell.serving.recording.trace import TraceSet
from tests.support.errors import raises_code
from tests.support.loop import traffic
from tests.support.loop.publishing import (
    config,
    distilled,
    profile,
    publish,
    table,
    verdict,
    verifier,
)

TUNING = TuneSettings(max_tokens=8, trials=1)
ANOTHER = VerifierSettings(label=LabelKind.ARGMAX)


@pytest.fixture
def step(
    pair_file: Path, own_stores: Path, empty_database: Path, monkeypatch: pytest.MonkeyPatch
) -> StepContext:
    shutil.copyfile(empty_database, own_stores / "mlflow.db")  # making one takes seconds
    monkeypatch.chdir(own_stores)
    return traffic.station_of(pair_file)


def collect(step: StepContext) -> TraceSet:
    """Traces of six short answers."""
    asked = traffic.prompts(6, seed=1)
    return collect_step.run_collect(step, asked, CollectionSettings(max_tokens=12))


def told(step: StepContext) -> list[str]:
    lines: list[str] = []
    step.workspace.say = lines.append
    return lines


def test_an_older_verifier_that_a_person_marks_is_tuned_released_and_deployed(
    step: StepContext, own_stores: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of two that were trained; without the mark the newer one of the workspace is."""
    traces, store, space = collect(step), Store(), step.workspace
    train_step.run_train(step, traces)
    folder = space.folder("verifier")
    older = store.publish(folder, pair="tiny")
    train_step.run_train(step, traces, ANOTHER)
    newer = digest_of(folder)
    assert newer != older.digest
    store.set_alias(older, PICKED)  # as a person does in MLflow's UI
    lines = told(step)
    whole = tune_step.inputs_of
    few = {"strategies": ("vanilla_sd",), "explored": 1, "measured": 1}
    monkeypatch.setattr(tune_step, "inputs_of", lambda *given: replace(whole(*given), **few))
    tune_step.run_tune(step, traces, traffic.prompts(2, seed=5), TUNING)
    assert digest_of(folder) == older.digest
    assert [line for line in lines if "verifier.tiny version 1, marked in MLflow" in line]
    lossy = [line for line in lines if "sprinter would read it, which is lossy" in line]
    assert len(lossy) == 1, "or nobody would know why it changes nothing"
    tuned = DecodingConfig.load(space.folder("decoding_config"))
    assert tuned.provenance.parents["verifier"] == older.digest
    kept = {version.digest: version.version for version in store.versions("verifier", "tiny")}
    assert kept == {older.digest: 1, newer: 2}, "what it replaced is registered"

    train_step.run_train(step, traces, ANOTHER)
    release = publish_step.run_publish(step, {})
    assert release.pins["verifier"] == older.version, "a mark outlasts what is trained later"
    record_gate(store, verdict(release))
    bundle = promote_and_deploy(space, "cpu", release.version, own_stores / "dist")
    assert bundle is not None
    assert digest_of(bundle / "artifacts" / "verifier") == older.digest

    store.client.delete_registered_model_alias("verifier.tiny", PICKED)
    train_step.run_train(step, traces, ANOTHER)
    assert publish_step.run_publish(step, {}).pins["verifier"] == 2


@pytest.mark.parametrize("lossless_only", [True, False])
def test_lossy_strategies_that_are_allowed_need_no_remark(
    step: StepContext, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lossless_only: bool
) -> None:
    store, mark = Store(), step.pair.fingerprint
    for artifact in (verifier(mark), table(mark)):
        store.set_alias(publish(store, artifact, tmp_path / artifact.kind), PICKED)

    def stops(*given: object, **more: object) -> None:
        raise InterruptedError

    monkeypatch.setattr(tune_step, "training_prompts", stops)
    lines = told(step)
    limits = Constraints(lossless_only=lossless_only, max_quality_loss=0.1)
    with pytest.raises(InterruptedError):
        tune_step.run_tune(step, TraceSet(tmp_path), [], TuneSettings(constraints=limits))
    assert len([line for line in lines if "marked in MLflow" in line]) == 2
    remarks = [line for line in lines if "which is lossy" in line]
    assert [line.split()[0] for line in remarks] == ["verifier.tiny"] * lossless_only


def test_a_marked_config_is_released_in_place_of_the_workspaces_own(
    step: StepContext, tmp_path: Path
) -> None:
    store, mark = Store(), step.pair.fingerprint
    marked = publish(store, config(mark, strategy="vanilla_sd"), tmp_path / "marked")
    step.workspace.save(config(mark, strategy="autoregressive"))
    store.set_alias(marked, f"{PICKED}-cpu")
    release = publish_step.run_publish(step, {})
    assert release.pins["decoding_config"] == marked.version
    assert len(store.versions("decoding_config", "tiny")) == 2


def test_what_does_not_fit_is_refused_by_name_and_nothing_is_taken(
    step: StepContext, tmp_path: Path
) -> None:
    store, space, mark = Store(), step.workspace, step.pair.fingerprint
    good = publish(store, verifier(mark), tmp_path / "good")
    store.set_alias(good, PICKED)
    wrong = {
        "picked_does_not_fit": publish(store, config("b" * 64), tmp_path / "config"),
        "draft_is_part_of_the_pair": publish(store, distilled(), tmp_path / "draft"),
        "made_on_other_device": publish(store, profile(mark), tmp_path / "profile"),
    }
    for code, version in wrong.items():
        device = "cuda" if code == "made_on_other_device" else "cpu"
        store.set_alias(version, PICKED)
        with raises_code(code, f"{version.name} version 1"):
            take_marked(space, device)
        store.client.delete_registered_model_alias(version.name, PICKED)
    assert not space.folder("verifier").exists()
    assert take_marked(space, "cpu") == {"verifier": good}
    assert digest_of(space.folder("verifier")) == good.digest


def test_without_a_registry_none_is_made_and_one_out_of_reach_is_told(
    step: StepContext, own_stores: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (own_stores / "mlflow.db").unlink()
    assert take_marked(step.workspace, "cpu") == {}
    assert not (own_stores / "mlflow.db").exists()
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    lines = told(step)
    assert take_marked(step.workspace, "cpu") == {}
    assert [line for line in lines if line.startswith("without what is marked in MLflow")]
