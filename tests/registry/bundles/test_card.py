"""The card of a release's tuning: kept with its run, carried by its bundle, and no part of what the
gate judged."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from draftwell.components.card.files import write_card
from draftwell.registry.bundles.build import build_to_judge
from draftwell.registry.bundles.judged import deviation, keep_judged
from draftwell.registry.pairs import PairSpec
from draftwell.registry.promotion import promote
from draftwell.registry.release_card import TAG, keep_card, kept_card
from draftwell.registry.releases import ReleaseVersion, find_release
from draftwell.registry.store import Store
from draftwell.serving.artifacts.pair_files import PairFiles
from draftwell.serving.bundle.bundle import BundleError, open_bundle
from draftwell.serving.bundle.card import CARD_FILES, MOST_BYTES, read_card_files
from tests.support.cards import CARD, UNSURE
from tests.support.loop.publishing import Make, verdict


def champion_of(store: Store) -> ReleaseVersion:
    return find_release(store, "tiny", "cpu", "champion")


@pytest.fixture
def card(tmp_path: Path) -> dict[str, Path]:
    """The files of a card."""
    return {file.name: file for file in write_card(CARD, tmp_path / "card")}


def test_a_bundle_has_its_release_card_and_every_byte_is_checked(
    champion: Store, build: Make, card: dict[str, Path]
) -> None:
    without = build()
    assert not set(CARD_FILES) & set(open_bundle(without).manifest.files)
    assert read_card_files(without, open_bundle(without).manifest) == {}

    keep_card(champion, champion_of(champion), list(card.values()))
    for name, file in card.items():  # the pictures too
        found = champion.read_file(champion_of(champion).published, f"card/{name}")
        assert found == file.read_bytes()
    bundle = build()
    assert bundle != without, "an existing bundle is never changed"
    opened = open_bundle(bundle)
    assert read_card_files(bundle, opened.manifest) == {
        name: card[name].read_bytes() for name in CARD_FILES
    }
    assert "card.png" not in opened.manifest.files
    assert {(bundle / name).stat().st_mode & 0o777 for name in CARD_FILES} == {0o644}
    assert build() == bundle, "the same card again is the same bundle"

    page = bundle / "card.html"
    page.write_bytes(page.read_bytes().replace(b"1.84", b"9.84"))
    with pytest.raises(BundleError, match=r"card\.html was changed"):
        open_bundle(bundle)


def test_the_judged_bundle_with_a_card_is_still_the_judged_one(
    store: Store,
    spec: PairSpec,
    files: PairFiles,
    make_release: Make,
    build: Make,
    card: dict[str, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("DRAFTWELL_HOME", str(tmp_path / "home"))
    made = make_release("release")
    (tmp_path / "judge").mkdir()
    judged = build_to_judge(store, made, spec, files, tmp_path / "judge")
    keep_judged(judged, made)
    digest = open_bundle(judged).manifest.digest
    promote(
        store,
        "tiny",
        "cpu",
        made.version,
        verdict(made).model_copy(update={"bundle_digest": digest}),
    )
    keep_card(store, champion_of(store), list(card.values()))
    bundle = build()
    assert (bundle / "card.html").is_file()
    assert deviation(bundle, champion_of(store)) is None
    for file in judged.rglob("*"):
        if file.is_file() and file.name != "manifest.json":
            assert (bundle / file.relative_to(judged)).read_bytes() == file.read_bytes()
    # any other file more, or changed, is a deviation
    other = tmp_path / "other"
    shutil.copytree(bundle, other)
    manifest = open_bundle(other).manifest
    fewer = {name: one for name, one in manifest.files.items() if name != "serve.sh"}
    changed = manifest.model_copy(update={"files": fewer})
    (other / "manifest.json").write_text(
        changed.model_copy(update={"digest": changed.computed_digest()}).to_json()
    )
    assert "is not the bundle that the gate judged" in (deviation(other, champion_of(store)) or "")


def test_a_card_that_was_changed_or_is_too_large_is_left_out(
    champion: Store, build: Make, card: dict[str, Path]
) -> None:
    release = champion_of(champion)
    keep_card(champion, release, list(card.values()))
    assert set(kept_card(champion, champion_of(champion))) == set(CARD_FILES)
    # another's file in MLflow under the first one's tag
    write_card(UNSURE, card["card.json"].parent)
    champion.log_files(release.published, [card["card.html"]], "card")
    assert kept_card(champion, champion_of(champion)) == {}
    assert not (build() / "card.html").exists()
    card["card.html"].write_bytes(b"x" * (MOST_BYTES + 1))
    keep_card(champion, release, list(card.values()))
    assert champion_of(champion).published.tags[TAG]
    assert kept_card(champion, champion_of(champion)) == {}
