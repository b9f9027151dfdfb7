"""Steering by hand: a release of picked versions, and deploying what an alias names."""

import shutil
from pathlib import Path
from typing import Any

import pytest

from draftwell.flows.steps import deploy
from draftwell.flows.steps.champion import champion_number, champion_of, serving_release
from draftwell.flows.steps.deploy import Synced, promote_and_deploy, sync_champion
from draftwell.flows.steps.reference_traces import served
from draftwell.flows.workspace import Workspace
from draftwell.registry.promotion import promote, rollback
from draftwell.registry.promotion_log import history
from draftwell.registry.releases import ReleaseVersion, create_release, record_gate
from draftwell.registry.store import Store
from draftwell.serving.artifacts.pair_files import fingerprint
from tests.support.errors import raises_code
from tests.support.loop.publishing import publish, release, table, verdict, verifier

OUT = Path("dist")
CURRENT = OUT / "tiny" / "current"


@pytest.fixture
def space(
    pair_file: Path, own_stores: Path, empty_database: Path, monkeypatch: pytest.MonkeyPatch
) -> Workspace:
    shutil.copyfile(empty_database, own_stores / "mlflow.db")  # making one takes seconds
    monkeypatch.chdir(own_stores)
    return Workspace(str(pair_file))


def two_gated(space: Workspace, folder: Path) -> tuple[Store, list[ReleaseVersion]]:
    """Two releases that passed, of which the first is champion and deployed to `dist`."""
    store = Store()
    made = [
        release(store, space.spec, space.files(), folder / f"made{n}", accepted=n) for n in (1, 2)
    ]
    record_gate(store, verdict(made[0]))
    assert promote_and_deploy(space, "cpu", 1, OUT) is not None
    record_gate(store, verdict(made[1], beside=1))
    return store, made


@pytest.mark.slow
def test_an_alias_moved_by_hand_is_deployed_and_monitored_once_current_has_moved(
    space: Workspace, run: Any, tmp_path: Path
) -> None:
    store, (_, two) = two_gated(space, tmp_path)
    command = ("release sync", "--pair", space.name)
    assert "(unchanged)" in run(*command).stdout
    store.set_alias(two.published, "champion")  # as a person does in MLflow's UI
    serving = serving_release(space, "cpu", OUT)
    assert serving is not None
    assert (champion_number(space, "cpu"), serving.version) == (2, 1)
    assert served(space, "cpu", OUT).name == "release.tiny.cpu version 1", (
        "traffic is that of what serves, not of the alias"
    )
    done = run(*command)
    assert done.exit_code == 0, done.output
    assert "2-cpu  (deployed)" in done.stdout
    assert CURRENT.resolve().name == "2-cpu"
    assert served(space, "cpu", OUT).name == "release.tiny.cpu version 2"
    last = history(store, "tiny", "cpu")[-1]
    assert (last.change.what, last.before, last.done) == ("by hand", 1, True), (
        "a rollback knows that it served"
    )
    assert store.get_aliases("acceptance_table", "tiny")["champion-cpu"] == 2
    assert "(unchanged)" in run(*command).stdout
    assert sorted(path.name for path in CURRENT.parent.iterdir()) == ["1-cpu", "2-cpu", "current"]
    # and back: the bundle stands
    store.set_alias(store.resolve("release", "tiny.cpu", 1), "champion")
    assert "1-cpu  (deployed)" in run(*command).stdout


def test_an_alias_moved_while_a_release_is_deployed_says_what_serves(
    space: Workspace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, (one, _) = two_gated(space, tmp_path)
    real = deploy.linked
    calls: list[Any] = []

    def move_first(*given: Any) -> Path:
        if not calls:
            store.set_alias(one.published, "champion")  # as a person does in MLflow's UI
        calls.append(given)
        return real(*given)

    monkeypatch.setattr(deploy, "linked", move_first)
    assert promote_and_deploy(space, "cpu", 2, OUT) == OUT / "tiny" / "2-cpu", "it was built"
    assert CURRENT.resolve().name == "1-cpu"


def test_an_alias_on_a_release_that_may_not_serve_changes_nothing_and_is_named(
    space: Workspace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, (_, two) = two_gated(space, tmp_path)
    told: list[Any] = []
    monkeypatch.setattr(deploy, "tell_refused", lambda *said, **more: told.append(said))

    def refused() -> None:
        before = len(told)
        with raises_code("champion_not_deployable"):
            sync_champion(space, "cpu", OUT, dry_run=True)
        assert len(told) == before, "only looked at"
        with raises_code(
            "champion_not_deployable", "release.tiny.cpu version 2", "release 1 stays"
        ):
            sync_champion(space, "cpu", OUT)
        assert sorted(path.name for path in CURRENT.parent.iterdir()) == ["1-cpu", "current"]
        assert champion_number(space, "cpu") == 2, "the alias is the person's"

    store.set_alias(two.published, "champion")
    # no gate, a failed one
    for record in ("", verdict(two, value=0.5, beside=1).model_dump_json()):
        store.set_tag(two.published, "gate_record", record)
        refused()
    record_gate(store, verdict(two, beside=1))
    store.set_alias(store.resolve("release", "tiny.cpu", 1), "champion")
    promote(store, "tiny", "cpu", 2)
    rollback(store, "tiny", "cpu", "answers are cut")
    store.set_alias(two.published, "champion")
    refused()


def test_two_devices_do_not_take_one_link_from_each_other_every_hour(
    space: Workspace, tmp_path: Path
) -> None:
    store, (one, _) = two_gated(space, tmp_path)
    pins, models = one.pins, one.contents.models
    cuda = create_release(store, "tiny", "cuda", pins, models, {})
    promote(store, "tiny", "cuda", cuda.version, verdict(cuda))
    with raises_code("current_of_another_device", "cpu", "cuda"):
        sync_champion(space, "cuda", OUT)
    assert CURRENT.resolve().name == "1-cpu"
    assert serving_release(space, "cuda", OUT) == champion_of(space, "cuda"), (
        "a link of another device says nothing of this one"
    )


def test_without_registry_champion_or_readable_bundle(space: Workspace, tmp_path: Path) -> None:
    assert sync_champion(space, "cpu", OUT).state == "unchanged", "no champion"
    (tmp_path / "mlflow.db").rename(tmp_path / "empty.db")
    assert sync_champion(space, "cpu", OUT).state == "unchanged", "no registry"
    assert not (tmp_path / "mlflow.db").exists(), "asking makes none"
    (tmp_path / "empty.db").rename(tmp_path / "mlflow.db")
    two_gated(space, tmp_path)
    (CURRENT / "manifest.json").chmod(0o644)
    (CURRENT / "manifest.json").write_text("{")
    assert sync_champion(space, "cpu", OUT) == Synced("deployed", 1, OUT / "tiny" / "1-cpu.2")


def test_manual_promotion_leaves_the_challenger_to_a_person(
    space: Workspace, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    store, (_, two) = two_gated(space, tmp_path)
    assert promote_and_deploy(space, "cpu", two.version, OUT, "manual") is None
    said = capfd.readouterr().err
    assert "draftwell release promote" in said
    assert "--release 2" in said
    assert store.get_aliases("release", "tiny.cpu") == {
        "candidate": 2,
        "challenger": 2,
        "champion": 1,
    }
    assert CURRENT.resolve().name == "1-cpu"
    space.spec = space.spec.model_copy(update={"promote": "manual"})
    assert promote_and_deploy(space, "cpu", two.version, OUT) is None, "the pair's own"
    assert promote_and_deploy(space, "cpu", two.version, OUT, "auto") is not None, (
        "a setting goes before it"
    )
    assert CURRENT.resolve().name == "2-cpu"


def test_the_command_says_what_it_pinned_and_what_it_will_not_change(
    run: Any, space: Workspace, tmp_path: Path
) -> None:
    store, pair_file = Store(), space.name
    one = release(store, space.spec, space.files(), tmp_path / "one")
    promote(store, "tiny", "cpu", 1, verdict(one))
    mark = fingerprint(space.files(), "float32")
    publish(store, verifier(mark), tmp_path / "verifier")
    publish(store, table(mark, accepted=4), tmp_path / "table")
    done = run(f"release create --pair {pair_file} --pin verifier=1 --pin acceptance_table=2")
    assert done.exit_code == 0, done.output
    assert "release.tiny.cpu version 2" in done.stdout
    assert "does not read verifier" in done.stdout
    assert "tuned with another acceptance_table" in done.stdout
    assert store.get_aliases("release", "tiny.cpu") == {
        "candidate": 2,
        "challenger": 1,
        "champion": 1,
    }
    assert store.get_aliases("verifier", "tiny") == {"candidate-cpu": 1}
    again = run(f"release create --pair {pair_file} --pin verifier=1 --pin acceptance_table=2")
    assert "release.tiny.cpu version 2" in again.stdout  # the same versions are the same release
    refused = run(f"release create --pair {pair_file} --pin verifier=9")
    assert refused.exit_code == 2
    assert len(refused.stderr.splitlines()) == 1
