"""Results of another machine's card: imported into the registry, judged by the card's own figures,
promoted and deployed, where there is no such card; and what is refused."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from draftwell.components.bench.gpu.card import Card
from draftwell.components.bench.gpu.results import (
    GpuResults,
    PartResult,
    read_results,
    write_results,
)
from draftwell.components.gate.settings import GateSettings
from draftwell.components.prompts.prompt import read_prompts
from draftwell.flows.cli.gpu_kit import fill_kit, unpack_kit
from draftwell.flows.context import StepContext
from draftwell.flows.steps.gate_parts.elsewhere import measure_candidate
from draftwell.flows.workspace import Workspace
from draftwell.registry.releases import find_release, gate_record
from draftwell.registry.store import Store
from draftwell.serving.artifacts.base import Provenance
from draftwell.serving.artifacts.decoding_config import DecodingConfig
from draftwell.serving.artifacts.hardware_profile import HardwareProfile
from draftwell.serving.bundle.bundle import open_bundle
from tests.support.commands import run_command, split_name
from tests.support.loop.thresholds import ANY_SPEED, thresholds_in

CLASS = "cuda-fake-1"
CARD = Card(
    name="Fake 1", device_class=CLASS, gigabytes=80, bandwidth=3000, cuda=None, torch="2.11.0"
)


@pytest.fixture(scope="module")
def place(place: Path) -> Iterator[Path]:
    """The same with thresholds that let any speed pass."""
    with thresholds_in(place / "registry", ANY_SPEED), pytest.MonkeyPatch.context() as patch:
        patch.setenv("DRAFTWELL_COMPILE", "off")
        yield place


@pytest.fixture(scope="module")
def measured(place: Path, pair_file: Path, prompts_file: Path) -> Path:
    """Results as `draftwell reproduce gpu` writes them, of a card that nobody has: a choice that
    was tuned there, and what the gate measured of it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DRAFTWELL_HOME", str(place / "there"))
        space = Workspace(str(pair_file), None, device="cuda")
        pair = space.load()
        made = Provenance(pair="tiny", fingerprint=pair.fingerprint, device_class=CLASS)
        artifacts = [
            DecodingConfig("autoregressive", {}, {}, made),
            HardwareProfile(0.002, {1: 0.01, 8: 0.02}, 0.001, made),
        ]
        folders = {one.kind: space.save(one) for one in artifacts}
        settings = GateSettings(limit=2, max_tokens=6)
        gate = measure_candidate(StepContext(space, pair), read_prompts(prompts_file), settings)
        texts = {
            kind: {file.name: file.read_text() for file in folder.iterdir()}
            for kind, folder in folders.items()
        }
    parts = {
        "greedy-7b": {"bench": {"strategies": {"eagle3(top_k=4)": {"tokens_per_second": 321.5}}}},
        "tuning": {"artifacts": texts},
        "gate": {"gate": gate.model_dump(mode="json")},
    }
    results = GpuResults(
        pair="tiny",
        card=CARD,
        parts={
            name: PartResult(state="measured", code="c", at="2026-11-29", reports=reports)
            for name, reports in parts.items()
        },
    )
    write_results(place / "results.json", results)
    return place / "results.json"


@pytest.fixture(scope="module")
def call(measured: Path, pair_file: Path) -> Callable[[str], Any]:
    """Run a command on the tiny pair for CUDA."""

    def called(command: str) -> Any:
        name, options = split_name(command)
        return run_command(f"{name} --pair {pair_file} {options}")

    return called


@pytest.fixture(scope="module")
def imported(call: Callable[[str], Any], measured: Path) -> str:
    """The first import's line."""
    before = call("deploy --device cuda")
    assert before.exit_code == 2
    assert "draftwell reproduce import" in before.stderr, "what is missing is said"
    done = call(f"reproduce import {measured}")
    assert done.exit_code == 0, (done.output, done.exception)
    return str(done.stdout)


def test_the_choice_becomes_the_candidate_with_the_cards_figures(imported: str) -> None:
    assert "release.tiny.cuda version 1 is the candidate, from Fake 1" in imported
    store = Store()
    release = find_release(store, "tiny", "cuda", "candidate")
    assert set(release.pins) == {"decoding_config", "hardware_profile"}
    assert store.metrics(release.published)["greedy-7b.eagle3_top_k_4"] == 321.5
    config = store.resolve("decoding_config", "tiny", release.pins["decoding_config"])
    assert config.tags["device_class"] == CLASS


def test_it_is_judged_promoted_and_deployed_without_the_card(
    imported: str, call: Callable[[str], Any], place: Path
) -> None:
    refused = call("gate --device cuda --dry-run")
    assert refused.exit_code == 3, "its bundle has not been started"
    assert "there is no cuda device here" in refused.stdout
    gate = "gate --device cuda --set 'unmeasured=no card here'"
    for command in (gate, "release promote --set device=cuda", "deploy --device cuda"):
        done = call(command)
        assert done.exit_code == 0, (command, done.output, done.exception)
    release = find_release(Store(), "tiny", "cuda", "champion")
    record = gate_record(release)
    assert record is not None
    assert record.passed
    assert {"speedup", "bundle size"} <= {check.name for check in record.checks}
    bundle = open_bundle((place / "dist" / "tiny" / "current").resolve())
    assert (bundle.manifest.device, bundle.manifest.device_class) == ("cuda", CLASS)
    assert bundle.manifest.digest == record.bundle_digest
    described = Store().description(release.published)
    assert f"measured on {CLASS}" in described


def test_a_kit_carries_the_bundle_without_what_the_checkout_has(
    imported: str, call: Callable[[str], Any], place: Path, pair_file: Path
) -> None:
    done = call(
        "deploy --device cuda --set ungated=trial --release 1 --set with_weights=true --out whole"
    )
    assert done.exit_code == 0, (done.output, done.exception)
    bundle, space = place / "whole" / "tiny" / "current", Workspace(str(pair_file), device="cuda")
    (space.artifacts / "verifier").mkdir(parents=True)
    (space.artifacts / "verifier" / "verifier.json").write_text("{}")
    fill_kit(space, place / "kit", bundle)
    there = Workspace(str(pair_file), device="cuda").aside(place / "there-with-kit")
    weights = place / "kit" / "bundle" / "models" / "target" / "model.safetensors"
    assert not weights.exists()
    assert (place / "kit" / "bundle" / "models" / "target" / "config.json").is_file()
    unpack_kit(there, place / "kit")
    assert open_bundle(place / "kit" / "bundle").manifest == open_bundle(bundle).manifest
    assert (there.artifacts / "verifier" / "verifier.json").read_text() == "{}"
    shutil.rmtree(space.artifacts / "verifier")


def test_a_champion_that_the_card_did_not_measure_needs_a_reason(
    imported: str, call: Callable[[str], Any], measured: Path, tmp_path: Path
) -> None:
    if "champion" not in Store().get_aliases("release", "tiny.cuda"):
        assert call("gate --device cuda --set 'unmeasured=no card here'").exit_code == 0
        assert call("release promote --set device=cuda").exit_code == 0
    write_results(tmp_path / "later.json", tuned_again(read_results(measured), tmp_path))
    assert call(f"reproduce import {tmp_path / 'later.json'}").exit_code == 0
    refused = call("gate --device cuda --dry-run")
    assert refused.exit_code == 3
    assert "regression" in refused.stdout
    passed = call("gate --device cuda --dry-run --set 'unmeasured=the same choice'")
    assert passed.exit_code == 0, (passed.output, passed.exception)


def test_another_choice_or_other_thresholds_are_not_judged_by_it(
    imported: str, call: Callable[[str], Any], place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = place / "registry" / "gates.yaml"
    kept = file.read_text()
    file.write_text(json.dumps(json.loads(kept) | {"max_bundle_mb": 7}))
    try:
        done = call("gate --device cuda --dry-run")
    finally:
        file.write_text(kept)
    assert done.exit_code == 2
    assert "other thresholds" in done.stderr
    reports = next((place.parent).rglob("cuda/reports/gate_measured.json"))
    text = reports.read_text()
    digest = json.loads(text)["artifacts"]["decoding_config"]
    reports.write_text(text.replace(digest, "0" * 64))
    try:
        done = call("gate --device cuda --dry-run")
    finally:
        reports.write_text(text)
    assert done.exit_code == 2
    assert "another decoding_config" in done.stderr


def tuned_again(results: GpuResults, folder: Path) -> GpuResults:
    """The same choice with other evidence: another artifact, which the gate measured."""
    made = dict(results.parts["tuning"].reports["artifacts"])
    (folder / "first").mkdir()
    for name, text in made["decoding_config"].items():
        (folder / "first" / name).write_text(text)
    first = DecodingConfig.load(folder / "first")
    later = DecodingConfig(first.strategy, {}, {"day": 2}, first.provenance)
    later.save(folder / "later")
    made["decoding_config"] = {file.name: file.read_text() for file in (folder / "later").iterdir()}
    gate = json.loads(
        json.dumps(results.parts["gate"].reports).replace(str(first.digest), str(later.digest))
    )
    for name, reports in (("tuning", {"artifacts": made}), ("gate", gate)):
        part = results.parts[name].model_copy(update={"reports": reports})
        results = results.with_part(name, part)
    return results


def changed(results: GpuResults, **parts: Any) -> GpuResults:
    return results.model_copy(update=parts)


def with_texts(results: GpuResults, change: Callable[[str], str]) -> GpuResults:
    """The same with another text in the tuned config's provenance."""
    part = results.parts["tuning"]
    made = {kind: dict(texts) for kind, texts in part.reports["artifacts"].items()}
    made["decoding_config"]["artifact.json"] = change(made["decoding_config"]["artifact.json"])
    return results.with_part("tuning", part.model_copy(update={"reports": {"artifacts": made}}))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda found: changed(found, pair="large"), "of pair large, not tiny"),
        (
            lambda found: changed(
                found, card=CARD.model_copy(update={"device_class": "cuda-fake-2"})
            ),
            "of cuda-fake-2 and cuda-fake-1, not of one CUDA card",
        ),
        (
            lambda found: with_texts(found, lambda text: text.replace(CLASS, "cpu-x86-2c")),
            "of cuda-fake-1 and cpu-x86-2c",
        ),
        (
            lambda found: with_texts(
                found,
                lambda text: text.replace(json.loads(text)["provenance"]["fingerprint"], "f" * 64),
            ),
            "fingerprint ffffffffffff",
        ),
        (lambda found: changed(found, parts={}), "nothing was tuned on Fake 1"),
    ],
)
def test_foreign_results_are_one_line_and_change_nothing(
    change: Callable[[GpuResults], GpuResults],
    words: str,
    call: Callable[[str], Any],
    imported: str,
    measured: Path,
    tmp_path: Path,
) -> None:
    write_results(tmp_path / "other.json", change(read_results(measured)))
    before = len(Store().versions("release", "tiny.cuda"))
    done = call(f"reproduce import {tmp_path / 'other.json'}")
    assert done.exit_code == 2
    [line] = done.stderr.strip().splitlines()
    assert words in line
    assert len(Store().versions("release", "tiny.cuda")) == before


def test_a_file_that_was_changed_is_refused(
    call: Callable[[str], Any], measured: Path, tmp_path: Path
) -> None:
    (tmp_path / "changed.json").write_text(measured.read_text().replace("321.5", "921.5"))
    done = call(f"reproduce import {tmp_path / 'changed.json'}")
    assert done.exit_code == 2
    assert "digest differs" in done.stderr
