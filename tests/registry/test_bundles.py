"""`make deploy`: a bundle holds what the release pins, twice the same bytes, or nothing at all."""

import os
from pathlib import Path

import pytest

from registry.bundles import build_bundle
from registry.pairs import PairSpec, fetch, model_records
from registry.releases import create_release, promote, record_gate
from registry.store import Store
from serving.runtime.artifacts.base import digest_of
from serving.runtime.bundle import open_bundle
from serving.runtime.pair_files import PairFiles, fingerprint, models_root
from serving.runtime.types import DraftwellError
from tests.registry.making import config, distilled, model_folder, publish, release, verdict


def contents(folder: Path) -> dict[str, tuple[bytes, int]]:
    return {p.relative_to(folder).as_posix(): (p.read_bytes(), p.stat().st_mode)
            for p in folder.rglob("*") if p.is_file()}


@pytest.fixture
def champion(store: Store, spec: PairSpec, files: PairFiles, tmp_path: Path) -> Store:
    made = release(store, spec, files, tmp_path / "release")
    promote(store, "tiny", "cpu", made.version, verdict(made))
    return store


def test_a_bundle_opens_and_finds_its_models(champion: Store, spec: PairSpec, files: PairFiles, tmp_path: Path) -> None:
    built = build_bundle(champion, spec, files, out=tmp_path / "dist")
    assert built == tmp_path / "dist" / "tiny" / "1-cpu"
    assert os.readlink(tmp_path / "dist" / "tiny" / "current") == "1-cpu"
    bundle = open_bundle(tmp_path / "dist" / "tiny" / "current")
    assert bundle.path == built
    manifest = bundle.manifest
    assert (manifest.gated, manifest.ungated_reason, manifest.dtype) == (True, None, "float32")
    assert manifest.versions == {"acceptance_table": 1, "decoding_config": 1}
    assert set(manifest.runs) == {"release", "acceptance_table", "decoding_config"}
    assert sorted(bundle.artifacts()) == ["acceptance_table", "decoding_config"]
    found = bundle.files(models_root())
    assert found.target.resolve() == files.target
    assert fingerprint(found, manifest.dtype) == manifest.fingerprint
    assert set(contents(built)) == {
        "README.md", "manifest.json", "serve.sh", "artifacts/acceptance_table/artifact.json",
        "artifacts/acceptance_table/table.json", "artifacts/decoding_config/artifact.json",
        "artifacts/decoding_config/config.json"}
    assert os.access(built / "serve.sh", os.X_OK)
    assert str(tmp_path) not in "".join(data.decode() for data, _ in contents(built).values())


@pytest.mark.parametrize("with_weights", [False, True])
def test_two_builds_are_byte_identical(
        champion: Store, spec: PairSpec, files: PairFiles, tmp_path: Path, with_weights: bool) -> None:
    one = build_bundle(champion, spec, files, out=tmp_path / "a", with_weights=with_weights)
    two = build_bundle(champion, spec, files, out=tmp_path / "b", with_weights=with_weights)
    assert contents(one) == contents(two)
    again = build_bundle(champion, spec, files, out=tmp_path / "a", with_weights=with_weights)
    assert contents(again) == contents(two)
    assert sorted(p.name for p in (tmp_path / "a" / "tiny").iterdir()) == ["1-cpu", "current"]


def test_with_weights_it_needs_no_models_folder(champion: Store, spec: PairSpec, files: PairFiles, tmp_path: Path) -> None:
    built = build_bundle(champion, spec, files, out=tmp_path / "dist", with_weights=True)
    found = open_bundle(built).files(tmp_path / "nowhere")
    assert found.target == built / "models" / "target"
    assert fingerprint(found, "float32") == fingerprint(files, "float32")
    open_bundle(built)  # the digests that were just kept beside the weights are no foreign file


def test_an_ungated_release_needs_a_reason(store: Store, spec: PairSpec, files: PairFiles, tmp_path: Path) -> None:
    made = release(store, spec, files, tmp_path / "release")
    store.set_alias(made.published, "champion")  # by hand, in the UI
    with pytest.raises(DraftwellError, match=r"version 1 is not deployed, it has no gate record: run .*--ungated REASON"):
        build_bundle(store, spec, files, out=tmp_path / "dist")
    assert not (tmp_path / "dist").exists()
    built = build_bundle(store, spec, files, out=tmp_path / "dist", ungated_reason="a trial")
    manifest = open_bundle(built).manifest
    assert (manifest.gated, manifest.ungated_reason) == (False, "a trial")
    assert "deployed because: a trial" in (built / "README.md").read_text()
    record_gate(store, verdict(made))
    built = build_bundle(store, spec, files, out=tmp_path / "dist", ungated_reason="a trial")
    assert open_bundle(built).manifest.gated
    assert sorted(p.name for p in (tmp_path / "dist" / "tiny").iterdir()) == ["1-cpu", "current"]


def test_a_failed_build_leaves_the_old_bundle(champion: Store, spec: PairSpec, files: PairFiles, tmp_path: Path) -> None:
    build_bundle(champion, spec, files, out=tmp_path / "dist")
    made = release(champion, spec, files, tmp_path / "two", accepted=2)
    promote(champion, "tiny", "cpu", 2, verdict(made))
    source = Path(champion.resolve("acceptance_table", "tiny", 2).source)
    (source / "table.json").write_text("{}")
    with pytest.raises(DraftwellError, match=r"table\.json is missing or was changed"):
        build_bundle(champion, spec, files, out=tmp_path / "dist")
    assert open_bundle(tmp_path / "dist" / "tiny" / "current").manifest.release_version == 1
    assert sorted(p.name for p in (tmp_path / "dist" / "tiny").iterdir()) == ["1-cpu", "current"]


def test_other_models_than_the_releases_are_refused(
        champion: Store, spec: PairSpec, files: PairFiles, tmp_path: Path) -> None:
    other = PairFiles("tiny", model_folder(tmp_path / "other", seed=9), files.draft)
    with pytest.raises(DraftwellError, match=r"was made for other models .* than those of pair tiny here"):
        build_bundle(champion, spec, other, out=tmp_path / "dist")
    with pytest.raises(DraftwellError, match=r"no alias challenger2 of release\.tiny\.cpu"):
        build_bundle(champion, spec, files, alias="challenger2", out=tmp_path / "dist")


@pytest.mark.parametrize("pinned", [True, False])
def test_a_distilled_draft_travels_in_the_bundle(store: Store, tmp_path: Path, pinned: bool) -> None:
    target = model_folder(tmp_path / "local" / "target")
    distilled().save(tmp_path / "local" / "draft")
    spec = PairSpec.model_validate({
        "name": "tiny", "description": "d", "licence": "l", "target": {"path": str(target)},
        "draft": {"artifact": str(tmp_path / "local" / "draft")}})
    files = fetch(spec)
    publish(store, config(fingerprint(files, "bfloat16")), tmp_path / "config")
    publish(store, distilled(), tmp_path / "draft")
    pins = {"decoding_config": 1, **({"distilled_draft": 1} if pinned else {})}
    made = create_release(store, "tiny", "cpu", pins, model_records(spec, files), {})
    promote(store, "tiny", "cpu", 1, verdict(made))
    bundle = open_bundle(build_bundle(store, spec, files, out=tmp_path / "dist"))
    found = bundle.files(models_root())
    assert found.draft == bundle.path / ("artifacts/distilled_draft" if pinned else "models/draft")
    assert digest_of(found.draft) == digest_of(tmp_path / "local" / "draft")
    assert bundle.manifest.dtype == "bfloat16"
    assert ("distilled_draft" in bundle.artifacts()) is pinned
