"""A crash at any step of publishing, downloading, deploying, keeping what was judged, and pruning
leaves the old or the new one whole, and what was reported as done stays."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest

from draftwell.registry.bundles.judged import keep_judged
from draftwell.registry.bundles.places import standing
from draftwell.registry.bundles.retention import prune
from draftwell.registry.promotion import promote
from draftwell.registry.releases import find_release
from draftwell.registry.store import Store
from draftwell.serving.artifacts.base import digest_of
from draftwell.serving.bundle.bundle import open_bundle
from tests.support.loop.publishing import Make, table, verdict
from tests.support.lost_writes import crashes, outcomes


@pytest.fixture(autouse=True)
def nothing_compiled(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def test_the_files_of_a_version_are_on_disk_before_the_registry_names_it(
    store: Store, tmp_path: Path
) -> None:
    """Its database is synced: else a version without files would stand for ever."""
    saved = tmp_path / "saved"
    digest = table("f" * 64).save(saved)
    (tmp_path / "left").mkdir()
    registry = tmp_path / "registry"
    with crashes(registry, (store.client, "create_model_version")) as left:
        source = Path(store.publish(saved, pair="tiny").source)
    named = [crash for crash in left if crash.when in ("create_model_version", None)]
    assert len(named) == 6
    for number, crash in enumerate(named):
        kept = crash.written(tmp_path / "left" / str(number)) / source.relative_to(registry)
        assert digest_of(kept) == digest, crash.how


def test_a_download_leaves_the_old_or_the_new_artifact(
    store: Store, put: Make, tmp_path: Path
) -> None:
    versions = [put(table("f" * 64, accepted)) for accepted in (1, 2)]
    root = tmp_path / "root"
    root.mkdir()
    known: list[str | None] = [None, *(version.digest for version in versions)]

    def found(left: Path) -> str | None:
        return digest_of(left / "table") if (left / "table").exists() else None

    for number, version in enumerate(versions):
        act = partial(store.download, version, root / "table")
        assert outcomes(root, act, found, tmp_path / str(number)) == (
            {*known[number : number + 2]},
            {version.digest},
        )


def served(dist: Path) -> int | None:
    """The release that `current` leads to, its bundle checked; None before the first."""
    link = dist / "tiny" / "current"
    return open_bundle(link).manifest.release_version if link.is_symlink() else None


def test_a_deployment_leaves_the_old_or_the_new_bundle(
    build: Make, make_release: Make, champion: Store, tmp_path: Path
) -> None:
    root = tmp_path / "dist"
    root.mkdir()
    assert outcomes(root, build, served, tmp_path / "first") == ({None, 1}, {1})
    made = make_release("two", accepted=2)
    promote(champion, "tiny", "cpu", 2, verdict(made, beside=1))
    assert outcomes(root, build, served, tmp_path / "second") == ({1, 2}, {2})


def test_what_was_judged_is_kept_whole_and_pruning_leaves_no_half(
    build: Make, make_release: Make, champion: Store, tmp_path: Path
) -> None:
    bundle, home = build(), tmp_path / "home"
    release = find_release(champion, "tiny", "cpu", 1)
    home.mkdir(exist_ok=True)
    first = keep_judged(bundle, release).relative_to(home)

    def judged(left: Path) -> tuple[str, ...]:
        return tuple(
            open_bundle(one.path).path.name for one in standing(left / first.parent, "cpu")
        )

    made = make_release("two", accepted=2)
    promote(champion, "tiny", "cpu", 2, verdict(made, beside=1))
    newer = build()
    assert outcomes(home, lambda: keep_judged(newer, made), judged, tmp_path / "kept") == (
        {("1-cpu",), ("1-cpu", "2-cpu"), ("2-cpu",)},
        {("2-cpu",)},
    )
    dist = tmp_path / "dist"

    def whole(left: Path) -> tuple[str, ...]:
        found = standing(left / "tiny", "cpu")
        return tuple(open_bundle(one.path).path.name for one in found)

    made = make_release("three", accepted=1)
    promote(champion, "tiny", "cpu", 3, verdict(made, beside=2))
    build()
    three = ("1-cpu", "2-cpu", "3-cpu")
    assert outcomes(dist, lambda: prune(dist / "tiny", 1), whole, tmp_path / "pruned") == (
        {three, three[1:]},
        {three[1:]},
    )
