"""What a person may do in MLflow's UI to what is registered: every command works all the same, or
one line says what to restore."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from draftwell.registry.bundles.build import build_bundle
from draftwell.registry.composing import compose
from draftwell.registry.lineage import lineage_of
from draftwell.registry.pairs import PairSpec
from draftwell.registry.promotion import (
    adopt,
    champion_since,
    deployment_objection,
    promote,
    rollback,
    withdrawal,
)
from draftwell.registry.promotion_log import history
from draftwell.registry.releases import (
    aliases_by_device,
    find_release,
    record_gate,
)
from draftwell.registry.store import Published, Store
from draftwell.serving.artifacts.pair_files import PairFiles, fingerprint
from tests.support.errors import raises_code
from tests.support.loop.publishing import (
    Make,
    publish,
    release,
    table,
    verdict,
    verifier,
)

RELEASE, TABLE, RECORD = "release.tiny.cpu", "acceptance_table.tiny", "promotions.tiny.cpu"
EXPERIMENT = "draftwell/tiny"


@dataclass
class World:
    """Releases 1, 2 (the champion; 1 was it before) and 3 (the candidate), each with a table and a
    config of its own."""

    store: Store
    spec: PairSpec
    files: PairFiles
    place: Path

    @property
    def client(self) -> Any:
        return self.store.client

    @property
    def mark(self) -> str:
        return fingerprint(self.files, "float32")

    def release(self, number: int) -> Any:
        return find_release(self.store, "tiny", "cpu", number)

    def experiment(self) -> str:
        return str(self.client.get_experiment_by_name(EXPERIMENT).experiment_id)

    def publish(self, artifact: Any) -> Any:
        return publish(self.store, artifact, self.place / f"new-{artifact.kind}")

    def new_release(self, accepted: int) -> Any:
        folder = self.place / f"release-{accepted}"
        return release(self.store, self.spec, self.files, folder, accepted=accepted)

    def deploy(self) -> Path:
        out = self.place / "dist"
        return build_bundle(self.store, self.spec, self.files, out=out, ungated_reason="a trial")


@pytest.fixture
def world(
    store: Store,
    spec: PairSpec,
    files: PairFiles,
    champions: Make,
    make_release: Make,
    tmp_path: Path,
) -> World:
    champions(2)
    make_release("3", accepted=3)
    return World(store, spec, files, tmp_path)


def foreign(world: World, name: str) -> object:
    """A version that somebody else made of a model of our name."""
    return world.client.create_model_version(name, "/tmp/elsewhere")


def delete_files(world: World, kind: str, pair: str, version: int) -> None:
    shutil.rmtree(world.store.resolve(kind, pair, version).source)


def tag(world: World, name: str, key: str, value: str) -> object:
    return world.client.set_model_version_tag(name, "2", key, value)


Step = Callable[[World], object]
REFUSED: dict[str, tuple[Step, Step, str, tuple[str, ...]]] = {
    "a release's run deleted, the release gated": (
        lambda w: w.client.delete_run(w.release(3).published.run_id),
        lambda w: record_gate(w.store, verdict(w.release(3), beside=2)),
        "deleted_in_registry",
        ("run", "mlflow runs restore --run-id"),
    ),
    "a release renamed": (
        lambda w: w.client.rename_registered_model(RELEASE, "ours"),
        lambda w: find_release(w.store, "tiny", "cpu", "champion"),
        "not_registered",
        ("'ours' was renamed", f"name it {RELEASE} again"),
    ),
    "a pinned model renamed": (
        lambda w: w.client.rename_registered_model(TABLE, "tables"),
        World.deploy,
        "pinned_artifact_changed",
        (f"{TABLE} version 2", "was deleted or renamed"),
    ),
    "a pinned version deleted": (
        lambda w: w.client.delete_model_version(TABLE, "2"),
        World.deploy,
        "pinned_artifact_changed",
        (f"{TABLE} version 2", "draftwell release create"),
    ),
    "a pinned version's files deleted": (
        lambda w: delete_files(w, "acceptance_table", "tiny", 2),
        World.deploy,
        "published_files_missing",
        (f"{TABLE} version 2", "delete that version"),
    ),
    "a release's files deleted": (
        lambda w: delete_files(w, "release", "tiny.cpu", 2),
        lambda w: w.release(2),
        "published_files_missing",
        (f"{RELEASE} version 2",),
    ),
    "the champion deleted": (
        lambda w: w.client.delete_model_version(RELEASE, "2"),
        lambda w: rollback(w.store, "tiny", "cpu", "slow"),
        "champion_deleted",
        ("version 2", "draftwell release promote"),
    ),
    "a change of the record deleted": (
        lambda w: w.client.delete_model_version(RECORD, "1"),
        lambda w: history(w.store, "tiny", "cpu"),
        "promotions_damaged",
        (RECORD, "delete that registered model"),
    ),
    "champion set on somebody else's version": (
        lambda w: (
            foreign(w, RELEASE),
            w.client.set_registered_model_alias(RELEASE, "champion", "4"),
        ),
        lambda w: find_release(w.store, "tiny", "cpu", "champion"),
        "not_ours",
        (f"{RELEASE} version 4", "aliases"),
    ),
    "picked set on somebody else's version": (
        lambda w: (
            w.client.create_registered_model("verifier.tiny"),
            foreign(w, "verifier.tiny"),
            w.client.set_registered_model_alias("verifier.tiny", "picked", "1"),
        ),
        lambda w: compose(w.store, "tiny", "cpu", {}),
        "not_ours",
        ("verifier.tiny version 1",),
    ),
    "a digest edited": (
        lambda w: tag(w, RELEASE, "digest", "abc"),
        lambda w: w.release(2),
        "published_files_changed",
        (f"{RELEASE} version 2", "tag digest"),
    ),
    "a format edited": (
        lambda w: tag(w, RELEASE, "format", "²"),
        lambda w: w.release(2),
        "older_format",
        (f"{RELEASE} version 2", "set it to"),
    ),
    "parents edited": (
        lambda w: tag(w, RELEASE, "parents", "{not json"),
        lambda w: lineage_of(w.store, w.store.resolve("release", "tiny.cpu", 2), "tiny.cpu"),
        "tag_changed",
        (f"{RELEASE} version 2", "parents"),
    ),
    "parents that are a list": (
        lambda w: tag(w, RELEASE, "parents", "[1]"),
        lambda w: lineage_of(w.store, w.store.resolve("release", "tiny.cpu", 2), "tiny.cpu"),
        "tag_changed",
        (f"{RELEASE} version 2",),
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_was_edited_by_hand_is_one_line_that_says_what_to_restore(
    world: World, name: str
) -> None:
    edit, act, code, words = REFUSED[name]
    edit(world)
    with raises_code(code, *words) as caught:
        act(world)
    assert "\n" not in str(caught.value)


def renamed_and_deleted(world: World) -> None:
    """An experiment deleted, and another of its name made."""
    number = world.experiment()
    world.client.rename_experiment(number, "old")
    world.client.delete_experiment(number)
    world.client.create_experiment(EXPERIMENT)


WORKS: dict[str, tuple[Step, Step]] = {
    "an experiment deleted, the same published": (
        lambda w: w.client.delete_experiment(w.experiment()),
        lambda w: w.publish(table(w.mark, 2)),
    ),
    "an experiment of the same name made": (
        renamed_and_deleted,
        lambda w: w.publish(verifier(w.mark)),
    ),
    "an experiment renamed": (
        lambda w: w.client.rename_experiment(w.experiment(), "ours"),
        lambda w: w.new_release(4),
    ),
    "somebody else's version of a pinned model": (
        lambda w: foreign(w, TABLE),
        lambda w: lineage_of(w.store, w.store.resolve("release", "tiny.cpu", 2), "tiny.cpu"),
    ),
    "somebody else's release": (
        lambda w: foreign(w, RELEASE),
        lambda w: (aliases_by_device(w.store, "tiny"), rollback(w.store, "tiny", "cpu", "slow")),
    ),
    "odd tags and descriptions": (
        lambda w: (
            [tag(w, RELEASE, key, "☃\n'\"%;\\ ") for key in ("a b", "ключ", "a.b/c:d-e")],
            w.client.update_model_version(RELEASE, "3", description="☃" * 3000),
        ),
        lambda w: record_gate(w.store, verdict(w.release(3), beside=2), words="good"),
    ),
    "a kind edited": (
        lambda w: tag(w, RELEASE, "kind", "Rélease ☃"),
        lambda w: lineage_of(w.store, w.store.resolve("release", "tiny.cpu", 2), "tiny.cpu"),
    ),
    "a time that is no time": (
        lambda w: w.client.set_model_version_tag(RELEASE, "3", "champion_since", "yesterday"),
        lambda w: champion_since(w.store, w.release(3)),
    ),
    "the record renamed": (
        lambda w: w.client.rename_registered_model(RECORD, "old"),
        lambda w: promote(w.store, "tiny", "cpu", 3, verdict(w.release(3), beside=2)),
    ),
    "all renamed, and named again": (
        lambda w: [
            w.client.rename_registered_model(*names)
            for name in (RELEASE, RECORD, TABLE)
            for names in ((name, "old"), ("old", name))
        ],
        lambda w: (
            promote(w.store, "tiny", "cpu", 3, verdict(w.release(3), beside=2)),
            rollback(w.store, "tiny", "cpu", "slow"),
            w.deploy(),
        ),
    ),
}


@pytest.mark.parametrize("name", WORKS)
def test_what_was_edited_by_hand_and_harms_nothing(world: World, name: str) -> None:
    edit, act = WORKS[name]
    edit(world)
    act(world)


def test_a_deleted_experiment_is_restored_as_the_line_says(world: World) -> None:
    number = world.experiment()
    world.client.delete_experiment(number)
    restore = f"mlflow experiments restore --experiment-id {number}"
    with raises_code("deleted_in_registry", restore, world.store.uri) as caught:
        world.publish(verifier(world.mark))
    assert "\n" not in str(caught.value)
    world.client.restore_experiment(number)  # what `mlflow experiments restore` calls
    assert world.publish(verifier(world.mark)).version == 1


def test_a_pin_that_was_deleted_does_not_keep_the_champion_from_changing(world: World) -> None:
    """Aliases of pins are for people to see: what is half done would block every later change."""
    world.client.delete_model_version(TABLE, "2")
    promote(world.store, "tiny", "cpu", 3, verdict(world.release(3), beside=2))
    assert rollback(world.store, "tiny", "cpu", "slow")[1].version == 2
    assert [entry.done for entry in history(world.store, "tiny", "cpu")] == [True] * 4
    assert world.store.get_aliases("release", "tiny.cpu")["champion"] == 2


def test_a_rollback_passes_over_a_release_that_was_deleted(world: World) -> None:
    promote(world.store, "tiny", "cpu", 3, verdict(world.release(3), beside=2))
    world.client.delete_model_version(RELEASE, "2")
    assert rollback(world.store, "tiny", "cpu", "slow")[1].version == 1


def test_a_change_that_was_cut_off_before_its_release_was_deleted_is_closed(world: World) -> None:
    last = history(world.store, "tiny", "cpu")[-1]
    world.client.delete_model_version_tag(RECORD, str(last.number), "done")
    world.client.delete_model_version(RELEASE, "2")
    promote(world.store, "tiny", "cpu", 3, verdict(world.release(3)))
    assert world.store.get_aliases("release", "tiny.cpu")["champion"] == 3


def delete_record(world: World) -> None:
    world.client.delete_registered_model(RECORD)


def rename_record(world: World) -> None:
    versions = world.store.versions("promotions", "tiny.cpu")
    world.client.rename_registered_model(RECORD, f"old-{versions[0].created}")


@pytest.mark.parametrize("lose_record", [delete_record, rename_record])
def test_a_release_stays_rolled_back_when_the_record_is_gone(
    world: World, lose_record: Step
) -> None:
    """And once it is promoted again, it stays so when the record is lost a second time."""
    rollback(world.store, "tiny", "cpu", "slow")
    lose_record(world)
    again = verdict(world.release(2), beside=1)
    with raises_code("was_rolled_back", "slow"):
        promote(world.store, "tiny", "cpu", 2, again)
    promote(world.store, "tiny", "cpu", 2, again, reason="it is fast now")
    assert withdrawal(world.store, world.release(2)) is None
    lose_record(world)
    assert withdrawal(world.store, world.release(2)) is None


@pytest.mark.parametrize("last_tag", ["rolled_back", "done"])
def test_a_rollback_that_was_cut_off_is_told_from_the_release_when_the_record_is_gone(
    world: World, monkeypatch: pytest.MonkeyPatch, last_tag: str
) -> None:
    set_tag = Store.set_tag

    def cut_off(store: Store, published: Published, key: str, value: str) -> None:
        if key == last_tag:
            raise KeyboardInterrupt
        set_tag(store, published, key, value)

    with monkeypatch.context() as patch:
        patch.setattr(Store, "set_tag", cut_off)
        with pytest.raises(KeyboardInterrupt):
            rollback(world.store, "tiny", "cpu", "slow")
    adopt(world.store, "tiny", "cpu")
    delete_record(world)
    assert "slow" in (withdrawal(world.store, world.release(2)) or "")


@pytest.mark.parametrize("edit", ["delete", "rename"])
def test_the_record_of_releases_that_are_gone_says_nothing_of_new_ones(
    world: World, edit: str
) -> None:
    """Numbers begin again at 1: version 1 was rolled back, and the new one is not."""
    rollback(world.store, "tiny", "cpu", "slow")
    assert withdrawal(world.store, world.release(2))
    if edit == "delete":
        world.client.delete_registered_model(RELEASE)
    else:
        world.client.rename_registered_model(RELEASE, "old")
    world.new_release(4)
    two = world.new_release(5)
    assert (two.version, withdrawal(world.store, two)) == (2, None)
    assert deployment_objection(world.store, two) == "it has no gate record"
    promote(world.store, "tiny", "cpu", 2, verdict(two))
    assert [entry.change.release for entry in history(world.store, "tiny", "cpu")] == [2]
