"""Releases pin exact versions; only a passed verdict about just these lets one become champion."""

import json
from pathlib import Path

import pytest

from registry.gates import GateRecord
from registry.pairs import PairSpec, model_records
from registry.releases import create_release, find_release, gate_record, promote, record_gate
from registry.store import Store
from serving.runtime.pair_files import PairFiles, fingerprint
from serving.runtime.types import DraftwellError
from tests.registry.making import config, distilled, publish, release, table, verdict


def test_a_release_pins_versions_and_names_weights(store: Store, spec: PairSpec, files: PairFiles, tmp_path: Path) -> None:
    made = release(store, spec, files, tmp_path / "one")
    assert made.published.name == "release.tiny.cpu"
    assert made.pins == {"acceptance_table": 1, "decoding_config": 1}
    assert made.fingerprint == fingerprint(files, "float32")
    assert find_release(store, "tiny", "cpu", "candidate") == made
    assert made.contents.models["target"] == model_records(spec, files)["target"]
    assert store.get_aliases("acceptance_table", "tiny") == {"candidate": 1}
    run = store.client.get_run(made.published.run_id)
    assert run.data.metrics == {"speedup": 1.2}
    assert store.client.get_experiment(run.info.experiment_id).name == "draftwell/tiny"
    assert release(store, spec, files, tmp_path / "again") == made  # the same pins are the same release
    kinds = {parent.kind for parent in store.lineage("release", "tiny.cpu", 1).parents}
    assert kinds == {"acceptance_table", "decoding_config"}


def test_aliases_move_from_candidate_to_challenger_to_champion(
        store: Store, spec: PairSpec, files: PairFiles, tmp_path: Path) -> None:
    one = release(store, spec, files, tmp_path / "one", accepted=1)
    record_gate(store, verdict(one))
    assert store.get_aliases("release", "tiny.cpu") == {"candidate": 1, "challenger": 1}
    promote(store, "tiny", "cpu", 1)
    two = release(store, spec, files, tmp_path / "two", accepted=2)
    promote(store, "tiny", "cpu", "candidate", verdict(two))
    assert store.get_aliases("release", "tiny.cpu") == {"candidate": 2, "challenger": 2, "champion": 2}
    assert store.get_aliases("acceptance_table", "tiny") == {"candidate": 2, "challenger": 2, "champion": 2}
    assert find_release(store, "tiny", "cpu", "champion").published.tags["previous"] == "1"
    assert gate_record(find_release(store, "tiny", "cpu", 2)) == verdict(two)
    kept = [file.path for file in store.client.list_artifacts(two.published.run_id, "gates")]
    assert kept == ["gates/2026-11-21T100000Z.json"]
    promote(store, "tiny", "cpu", 2)
    assert find_release(store, "tiny", "cpu", "champion").published.tags["previous"] == "1"


def test_nothing_is_promoted_without_a_verdict_about_just_these_versions(
        store: Store, spec: PairSpec, files: PairFiles, tmp_path: Path) -> None:
    one = release(store, spec, files, tmp_path / "one", accepted=1)
    two = release(store, spec, files, tmp_path / "two", accepted=2)
    good = verdict(two)
    wrong: list[tuple[GateRecord | None, str]] = [
        (None, "it has no gate record"),
        (verdict(one), "names version 1 with other artifacts"),
        (good.model_copy(update={"pins": {**two.pins, "acceptance_table": 1}}), "names version 2 with other artifacts"),
        (verdict(two, value=0.9), r"its gate failed \(min_speedup_lower_bound\)"),
        (verdict(two, value=0.9).model_copy(update={"passed": True}), r"its gate failed \(min_speedup_lower_bound\)"),
        (good.model_copy(update={"passed": False}), r"its gate failed \(as a whole\)"),
        (good.model_copy(update={"device": "cuda"}), "the gate record is for tiny on cuda"),
    ]
    for record, why in wrong:
        message = rf"^release\.tiny\.cpu version 2 is not promoted, .*{why}: run `draftwell gate --pair tiny`$"
        with pytest.raises(DraftwellError, match=message):
            promote(store, "tiny", "cpu", 2, record)
        assert store.get_aliases("release", "tiny.cpu") == {"candidate": 2}
        assert gate_record(find_release(store, "tiny", "cpu", 2)) is None
    record_gate(store, verdict(two, value=0.9))  # a failed verdict is kept, and moves nothing
    assert store.get_aliases("release", "tiny.cpu") == {"candidate": 2}
    assert find_release(store, "tiny", "cpu", 2).published.tags["gate"] == "failed"


def test_a_record_that_cannot_be_read_does_not_stand(
        store: Store, spec: PairSpec, files: PairFiles, tmp_path: Path) -> None:
    one = release(store, spec, files, tmp_path / "one")
    store.set_tag(one.published, "gate_record", json.dumps({"passed": True}))
    with pytest.raises(DraftwellError, match=r"gate record of release\.tiny\.cpu version 1 cannot be read: run"):
        promote(store, "tiny", "cpu", 1)


def test_artifacts_of_different_models_make_no_release(
        store: Store, spec: PairSpec, files: PairFiles, tmp_path: Path) -> None:
    publish(store, table("a" * 64), tmp_path / "table")
    publish(store, config("b" * 64), tmp_path / "config")
    publish(store, distilled(), tmp_path / "draft")
    models = model_records(spec, files)
    with pytest.raises(DraftwellError, match="acceptance_table aaaaaaaaaaaa, decoding_config bbbbbbbbbbbb"):
        create_release(store, "tiny", "cpu", {"acceptance_table": 1, "decoding_config": 1}, models, {})
    with pytest.raises(DraftwellError, match="needs at least one artifact besides the draft"):
        create_release(store, "tiny", "cpu", {"distilled_draft": 1}, models, {})
    with pytest.raises(DraftwellError, match=r"no version 9 of decoding_config\.tiny"):
        create_release(store, "tiny", "cpu", {"decoding_config": 9}, models, {})
    made = create_release(store, "tiny", "cpu", {"distilled_draft": 1, "acceptance_table": 1}, models, {})
    assert made.fingerprint == "a" * 64
