"""What the gate judged is what is deployed, byte for byte."""

from __future__ import annotations

from pathlib import Path
from tempfile import mkdtemp

import pytest

import draftwell.registry.bundles.build
from draftwell.registry.bundles.build import build_to_judge, relink
from draftwell.registry.bundles.judged import deviation, judged_folder, keep_judged
from draftwell.registry.bundles.wheel import Wheel
from draftwell.registry.pairs import PairSpec
from draftwell.registry.promotion import promote
from draftwell.registry.releases import ReleaseVersion, find_release
from draftwell.registry.store import Store
from draftwell.serving.artifacts.pair_files import PairFiles
from draftwell.serving.bundle.bundle import open_bundle
from tests.support.errors import raises_code
from tests.support.loop.publishing import Make, verdict

pytestmark = pytest.mark.slow


def contents(folder: Path) -> dict[str, bytes]:
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


@pytest.fixture
def build_judged(store: Store, spec: PairSpec, files: PairFiles, tmp_path: Path) -> Make:
    """Builds a release's bundle for a gate."""

    def built(release: ReleaseVersion) -> Path:
        return build_to_judge(store, release, spec, files, Path(mkdtemp(dir=tmp_path)))

    return built


@pytest.fixture
def judged(
    build_judged: Make,
    make_release: Make,
    store: Store,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> dict[str, bytes]:
    """The bytes that were judged, of the release that is champion now; the runtime was upgraded
    since."""
    monkeypatch.setenv("DRAFTWELL_HOME", str(tmp_path / "home"))
    made = make_release("release")
    bundle = build_judged(made)
    found = contents(bundle)
    keep_judged(bundle, made)
    record = verdict(made).model_copy(update={"bundle_digest": open_bundle(bundle).manifest.digest})
    promote(store, "tiny", "cpu", made.version, record)
    newer = Wheel("draftwell_runtime-9-py3-none-any.whl", "9", b"another")
    monkeypatch.setattr(draftwell.registry.bundles.build, "runtime_wheel", lambda: newer)
    return found


def champion_of(store: Store) -> ReleaseVersion:
    return find_release(store, "tiny", "cpu", "champion")


def test_what_was_judged_is_deployed_byte_for_byte(
    build: Make, store: Store, tmp_path: Path, judged: dict[str, bytes]
) -> None:
    deployed = build()
    assert contents(deployed) == judged
    assert deviation(deployed, champion_of(store)) is None
    assert (tmp_path / "dist" / "tiny" / "current").resolve() == deployed
    assert {
        path.stat().st_mode & 0o777 for path in [deployed, *deployed.rglob("*")] if path.is_dir()
    } == {0o755}


def test_a_bundle_that_is_built_again_serves_sampled_requests_as_the_judged_one(
    make_release: Make, build: Make, store: Store, spec: PairSpec, files: PairFiles, tmp_path: Path
) -> None:
    """Else a deployment on another machine than the gate's would decode them plainly, or
    unmeasured."""
    made = make_release("release")
    for number, as_greedy in enumerate((True, False)):
        (tmp_path / f"judge{number}").mkdir()
        bundle = build_to_judge(
            store, made, spec, files, tmp_path / f"judge{number}", sampled_as_greedy=as_greedy
        )
        manifest = open_bundle(bundle).manifest
        record = verdict(made).model_copy(
            update={"bundle_digest": manifest.digest, "sampled_as_greedy": as_greedy}
        )
        promote(store, "tiny", "cpu", made.version, record)
        deployed = build(out=tmp_path / f"dist{number}")
        assert open_bundle(deployed).manifest.sampled_as_greedy is as_greedy
        assert deviation(deployed, champion_of(store)) is None


@pytest.mark.parametrize(
    "name", ["manifest.json", "serve.sh", "artifacts/decoding_config/config.json"]
)
def test_a_changed_byte_is_refused(
    build: Make, store: Store, tmp_path: Path, judged: dict[str, bytes], name: str
) -> None:
    file = judged_folder(champion_of(store)) / name
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    with raises_code(
        "judged_bundle_changed", str(file), "draftwell gate --pair tiny --device cpu --release 1"
    ):
        build()
    assert not (tmp_path / "dist" / "tiny" / "current").exists()


@pytest.mark.usefixtures("judged")
def test_a_bundle_of_another_verdict_is_built_again_and_named(build: Make, store: Store) -> None:
    champion = champion_of(store)
    other = verdict(champion).model_copy(update={"bundle_digest": "0" * 64})
    promote(store, "tiny", "cpu", champion.version, other)
    built = build()
    line = deviation(built, champion_of(store))
    assert line is not None
    for name in (str(built), "0" * 12, "draftwell gate --pair tiny --device cpu --release 1"):
        assert name in line


def test_a_record_of_an_earlier_version_names_no_bundle(
    make_release: Make, build: Make, store: Store
) -> None:
    made = make_release("release")
    promote(store, "tiny", "cpu", made.version, verdict(made))
    built = build()
    assert deviation(built, champion_of(store)) is None


def test_another_release_that_passes_replaces_the_kept_bundle(
    build_judged: Make, make_release: Make, store: Store, judged: dict[str, bytes]
) -> None:
    first = judged_folder(champion_of(store))
    second = make_release("second")
    keep_judged(build_judged(second), second)
    assert [path.name for path in first.parent.iterdir()] == [f"{second.version}-cpu"]


def test_the_champions_bundle_stays_and_what_a_killed_gate_left_goes(
    build_judged: Make, make_release: Make, store: Store, judged: dict[str, bytes]
) -> None:
    champion = champion_of(store)
    (judged_folder(champion).parent / ".build.killed").mkdir()
    second = make_release("second")
    bundle = build_judged(second)
    for _ in range(2):  # a second gate of the same release replaces what the first one kept
        keep_judged(bundle, second, others=[champion.version])
    kept = {path.name for path in judged_folder(champion).parent.iterdir()}
    assert kept == {f"{champion.version}-cpu", f"{second.version}-cpu"}
    assert open_bundle(judged_folder(champion)).manifest.release_version == champion.version


def test_a_rollback_prefers_the_judged_bundle_to_a_newer_one(
    build: Make, store: Store, tmp_path: Path, judged: dict[str, bytes]
) -> None:
    out, champion = tmp_path / "dist", champion_of(store)
    first = build(out=out)
    second = build(out=out, with_weights=True)
    assert first != second
    assert relink(store, champion, out) == first
