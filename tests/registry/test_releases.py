"""Releases pin exact versions; only a passed verdict about just these lets one become champion."""

import json
import shutil
import time
from pathlib import Path
from typing import Any

import pytest

from draftwell.registry.gates import GateRecord
from draftwell.registry.lineage import lineage_of
from draftwell.registry.pairs import PairSpec, model_records
from draftwell.registry.promotion import adopt, promote, rollback, withdrawal
from draftwell.registry.promotion_log import history
from draftwell.registry.releases import (
    changed_report,
    create_release,
    find_release,
    gate_record,
    is_champion,
    record_gate,
)
from draftwell.registry.store import Store
from draftwell.serving.artifacts.pair_files import PairFiles, fingerprint
from tests.support.errors import raises_code
from tests.support.loop.publishing import Make, config, distilled, table, verdict


def test_a_release_pins_versions_and_names_weights(
    make_release: Make, store: Store, spec: PairSpec, files: PairFiles
) -> None:
    made = make_release("one")
    assert made.published.name == "release.tiny.cpu"
    assert made.pins == {"acceptance_table": 1, "decoding_config": 1}
    assert made.fingerprint == fingerprint(files, "float32")
    assert find_release(store, "tiny", "cpu", "candidate") == made
    assert made.contents.models["target"] == model_records(spec, files)["target"]
    assert store.get_aliases("acceptance_table", "tiny") == {"candidate-cpu": 1}
    run = store.client.get_run(made.published.run_id)
    assert run.data.metrics["speedup"] == 1.2
    # the figures of what it pins, to compare releases by
    assert run.data.metrics["acceptance_table.brier"] == 0.25
    assert run.data.params == {"acceptance_table": "1", "decoding_config": "1"}
    assert store.client.get_experiment(run.info.experiment_id).name == "draftwell/tiny"
    # the same pins are the same release
    assert make_release("again") == made
    kinds = {
        parent.kind
        for parent in lineage_of(store, store.resolve("release", "tiny.cpu", 1), "tiny.cpu").parents
    }
    assert kinds == {"acceptance_table", "decoding_config"}


def test_aliases_move_from_candidate_to_challenger_to_champion(
    make_release: Make, store: Store
) -> None:
    one = make_release("one", accepted=1)
    record_gate(store, verdict(one))
    assert store.get_aliases("release", "tiny.cpu") == {"candidate": 1, "challenger": 1}
    promote(store, "tiny", "cpu", 1)
    two = make_release("two", accepted=2)
    promote(store, "tiny", "cpu", "candidate", verdict(two, beside=1))
    assert store.get_aliases("release", "tiny.cpu") == {
        "candidate": 2,
        "challenger": 2,
        "champion": 2,
    }
    assert store.get_aliases("acceptance_table", "tiny") == {
        "candidate-cpu": 2,
        "challenger-cpu": 2,
        "champion-cpu": 2,
    }
    assert gate_record(find_release(store, "tiny", "cpu", 2)) == verdict(two, beside=1)
    kept = [file.path for file in store.client.list_artifacts(two.published.run_id, "gates")]
    assert kept == ["gates/2026-11-21T100000Z.json"]
    assert store.metrics(two.published)["gate.min_speedup_lower_bound"] == 1.1
    promote(store, "tiny", "cpu", 2)  # once more changes nothing
    assert rollback(store, "tiny", "cpu", "a trial")[1].version == 1


def test_nothing_is_promoted_without_a_verdict_about_just_these_versions(
    make_release: Make, store: Store
) -> None:
    one = make_release("one", accepted=1)
    two = make_release("two", accepted=2)
    good = verdict(two)
    wrong: list[tuple[GateRecord | None, str]] = [
        (None, "it has no gate record"),
        (verdict(one), "names version 1 with other artifacts"),
        (
            good.model_copy(update={"pins": {**two.pins, "acceptance_table": 1}}),
            "names version 2 with other artifacts",
        ),
        (
            good.model_copy(update={"release_digest": "0" * 64}),
            "names version 2 with other artifacts",
        ),
        (verdict(two, value=0.9), "(min_speedup_lower_bound)"),
        (verdict(two, value=0.9).model_copy(update={"passed": True}), "(min_speedup_lower_bound)"),
        (good.model_copy(update={"passed": False}), "gate failed"),
        (good.model_copy(update={"device": "cuda"}), "the gate record is for tiny on cuda"),
    ]
    for record, why in wrong:
        with raises_code(
            "not_gated",
            "release.tiny.cpu version 2",
            why,
            "`draftwell gate --pair tiny --device cpu --release 2`",
        ):
            promote(store, "tiny", "cpu", 2, record)
        assert store.get_aliases("release", "tiny.cpu") == {"candidate": 2}
        assert gate_record(find_release(store, "tiny", "cpu", 2)) is None
    record_gate(store, verdict(two, value=0.9))  # a failed verdict is kept, and moves nothing
    assert store.get_aliases("release", "tiny.cpu") == {"candidate": 2}
    assert find_release(store, "tiny", "cpu", 2).published.tags["gate"] == "failed"


def test_a_record_that_cannot_be_read_does_not_stand(make_release: Make, store: Store) -> None:
    one = make_release("one")
    store.set_tag(one.published, "gate_record", json.dumps({"passed": True}))
    with raises_code("gate_record_unreadable", "release.tiny.cpu version 1", "draftwell gate"):
        promote(store, "tiny", "cpu", 1)


def test_artifacts_of_different_models_make_no_release(
    put: Make, store: Store, spec: PairSpec, files: PairFiles
) -> None:
    put(table("a" * 64))
    put(config("b" * 64))
    put(distilled())
    models = model_records(spec, files)
    with raises_code(
        "mixed_fingerprints",
        "acceptance_table version 1 aaaaaaaaaaaa, decoding_config version 1 bbbbbbbbbbbb",
    ):
        create_release(
            store, "tiny", "cpu", {"acceptance_table": 1, "decoding_config": 1}, models, {}
        )
    with raises_code("nothing_to_release", "draftwell step choose"):
        create_release(store, "tiny", "cpu", {"distilled_draft": 1}, models, {})
    with raises_code("not_registered", "version 9", "decoding_config.tiny"):
        create_release(store, "tiny", "cpu", {"decoding_config": 9}, models, {})
    made = create_release(
        store, "tiny", "cpu", {"distilled_draft": 1, "acceptance_table": 1}, models, {}
    )
    assert made.fingerprint == "a" * 64


def aliases(store: Store) -> tuple[int, int]:
    """The champion, and which table is called so."""
    return store.get_aliases("release", "tiny.cpu")["champion"], store.get_aliases(
        "acceptance_table", "tiny"
    )["champion-cpu"]


def test_rollback_brings_the_champion_before_back_and_keeps_the_reason(
    champions: Make, store: Store
) -> None:
    champions(3)
    bad, good = rollback(store, "tiny", "cpu", "answers in French are cut")
    assert (bad.version, good.version) == (3, 2)
    assert aliases(store) == (2, 2)
    last = history(store, "tiny", "cpu")[-1]
    assert (last.change.reason, last.change.release) == ("answers in French are cut", 2)
    assert "(answers in French are cut)" in str(withdrawal(store, bad))
    rollback(store, "tiny", "cpu", "still")  # one further back, and not to and fro
    assert aliases(store) == (1, 1)
    with raises_code("no_previous_champion", "version 1", "--release"):
        rollback(store, "tiny", "cpu", "once more")
    assert aliases(store) == (1, 1)


@pytest.mark.timed
def test_a_rollback_takes_seconds(champions: Make, store: Store) -> None:
    champions(3)
    begin = time.perf_counter()
    rollback(store, "tiny", "cpu", "answers in French are cut")
    assert time.perf_counter() - begin < 5


def test_what_was_rolled_back_serves_again_only_for_a_reason(champions: Make, store: Store) -> None:
    """A schedule that gates and promotes the same release again must not undo what a person
    decided."""
    _, two = champions(2)
    rollback(store, "tiny", "cpu", "too slow in the evening")
    record_gate(store, verdict(two, beside=1))
    with raises_code("was_rolled_back", "version 2", "(too slow in the evening)", "reason="):
        promote(store, "tiny", "cpu", 2)
    with raises_code("no_way_back", "version 2", "rolled back"):
        rollback(store, "tiny", "cpu", "and this one", to=2)
    assert aliases(store) == (1, 1)
    promote(store, "tiny", "cpu", 2, reason="the evening's load was another's")
    assert aliases(store) == (2, 2)
    assert rollback(store, "tiny", "cpu", "it was not")[1].version == 1


class CutOff:
    """MLflow's client, which is interrupted just before its n-th change."""

    def __init__(self, client: Any, last: int):
        self.client, self.last, self.changes = client, last, 0

    def __getattr__(self, name: str) -> Any:
        found = getattr(self.client, name)

        def change(*arguments: Any, **options: Any) -> Any:
            self.changes += 1
            if self.changes == self.last:
                raise KeyboardInterrupt
            return found(*arguments, **options)

        return change if name.startswith(("set_", "log_", "create_")) else found


@pytest.mark.slow
def test_wherever_a_rollback_is_cut_off_the_next_one_finishes_it(
    champions: Make, store: Store
) -> None:
    """As its error says: run the same command again. It takes back no more than one."""
    champions(3)
    database = Path(store.uri.removeprefix("sqlite:///"))

    def registry(name: str, last: int) -> Store:
        copy = shutil.copyfile(database, database.with_name(f"{name}.db"))
        found = Store(f"sqlite:///{copy}")
        found.client = CutOff(found.client, last)  # type: ignore[assignment]
        return found

    whole = registry("whole", 0)
    rollback(whole, "tiny", "cpu", "a trial")
    changes = whole.client.changes  # type: ignore[attr-defined]
    assert changes >= 5
    for last in range(1, changes + 1):
        cut = registry(str(last), last)
        with pytest.raises(KeyboardInterrupt):
            rollback(cut, "tiny", "cpu", "a trial")
        bad, good = rollback(cut, "tiny", "cpu", "a trial")
        assert (bad.version, good.version, aliases(cut)) == (3, 2, (2, 2)), (
            f"cut off before change {last}"
        )
        assert rollback(cut, "tiny", "cpu", "and another")[1].version == 1, (
            f"what was whole is not finished twice, change {last}"
        )


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        ({"reason": " "}, "no_reason"),
        ({"reason": "x", "to": 2}, "already_champion"),
        ({"reason": "x", "to": 9}, "not_registered"),
    ],
)
def test_a_rollback_that_cannot_be_changes_nothing(
    champions: Make, store: Store, arguments: dict, code: str
) -> None:
    champions(2)
    with raises_code(code):
        rollback(store, "tiny", "cpu", **arguments)
    assert aliases(store) == (2, 2)
    assert len(history(store, "tiny", "cpu")) == 2


def test_the_way_back_leads_past_a_champion_whose_gate_failed_since(
    champions: Make, store: Store
) -> None:
    _, two, _ = champions(3)
    record_gate(store, verdict(two, value=0.5))
    assert rollback(store, "tiny", "cpu", "x")[1].version == 1
    assert aliases(store) == (1, 1)


def test_a_verdict_beside_an_older_champion_promotes_nothing(
    make_release: Make, champions: Make, store: Store
) -> None:
    """Two candidates that were judged beside the same champion: the second was never held against
    the first."""
    champions(1)
    two, three = (make_release(f"made{n}", accepted=n) for n in (2, 3))
    for each in (two, three):
        record_gate(store, verdict(each, beside=1))
    promote(store, "tiny", "cpu", 2)
    with raises_code(
        "gated_against_another_champion",
        "version 3",
        "version 1",
        "version 2",
        "`draftwell gate --pair tiny --device cpu --release 3`",
        "reason=",
    ):
        promote(store, "tiny", "cpu", 3)
    with raises_code("gated_against_another_champion", "no champion", "version 2"):
        promote(store, "tiny", "cpu", 3, verdict(three))
    assert aliases(store) == (2, 2)
    assert gate_record(find_release(store, "tiny", "cpu", 3)) == verdict(three, beside=1)
    promote(store, "tiny", "cpu", 3, verdict(three, beside=2))
    assert rollback(store, "tiny", "cpu", "a trial")[1].version == 2  # which was judged beside 1
    promote(store, "tiny", "cpu", 2)  # once more changes nothing
    promote(store, "tiny", "cpu", 1, reason="the first was the best")
    assert aliases(store) == (1, 1)


def test_no_ungated_release_comes_back(make_release: Make, champions: Make, store: Store) -> None:
    champions(1)
    make_release("ungated", accepted=4)
    with raises_code("no_way_back", "version 2", "gate record", "--release"):
        rollback(store, "tiny", "cpu", "x", to=2)
    assert aliases(store) == (1, 1)


def test_a_champion_named_by_hand_is_followed_and_can_be_rolled_back(
    champions: Make, store: Store
) -> None:
    one, _ = champions(2)
    store.set_alias(one.published, "champion")  # as MLflow's UI does
    assert aliases(store) == (1, 2)
    adopt(store, "tiny", "cpu")
    assert aliases(store) == (1, 1)
    assert rollback(store, "tiny", "cpu", "the hand was wrong")[1].version == 2
    assert aliases(store) == (2, 2)


def test_a_promotion_that_was_cut_off_is_whole_and_the_next_one_tidies_up(
    make_release: Make,
    champions: Make,
    store: Store,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    champions(1)
    two = make_release("two", accepted=2)
    record_gate(store, verdict(two, beside=1))
    real, calls = store.set_alias, []

    def cut_off(published, alias) -> None:
        if calls:
            raise KeyboardInterrupt
        calls.append(published.name)
        real(published, alias)

    monkeypatch.setattr(store, "set_alias", cut_off)
    with pytest.raises(KeyboardInterrupt):
        promote(store, "tiny", "cpu", 2)
    monkeypatch.undo()
    assert calls == ["release.tiny.cpu"], "the first change is the whole promotion"
    assert aliases(store) == (2, 1)
    adopt(store, "tiny", "cpu")
    assert aliases(store) == (2, 2)


def test_the_verdict_can_be_read_where_the_release_is_shown(
    make_release: Make, store: Store, tmp_path: Path
) -> None:
    one = make_release("one")
    plot = tmp_path / "speedup.png"
    plot.write_bytes(b"png")
    for words in ("**Gate failed**", "**Gate passed**"):
        record_gate(store, verdict(one), words=words, figures={"mat": 2.5}, files=[plot])
    shown = store.description(one.published)
    assert shown.startswith("Release: the exact versions")
    assert shown.count("## Last gate") == 1
    assert shown.endswith("**Gate passed**")
    assert store.metrics(one.published)["mat"] == 2.5
    kept = {file.path for file in store.client.list_artifacts(one.published.run_id, "gates")}
    assert kept == {
        "gates/2026-11-21T100000Z.json",
        "gates/2026-11-21T100000Z.md",
        "gates/2026-11-21T100000Z",
    }


def test_a_verdict_says_which_prompts_were_named_for_it(make_release: Make, store: Store) -> None:
    release = make_release("one")
    record_gate(store, verdict(release).model_copy(update={"prompts": "easy.jsonl"}))
    promote(store, "tiny", "cpu", release.version)
    assert latest(store, release).prompts == "easy.jsonl"


@pytest.mark.parametrize("deleted", [False, True])
def test_a_report_that_was_changed_after_the_gate_is_named(
    make_release: Make, store: Store, tmp_path: Path, deleted: bool
) -> None:
    release, files = make_release("one"), [tmp_path / "bench.json", tmp_path / "plot.svg"]
    for file in files:
        file.write_text(file.name)
    record_gate(store, verdict(release), files=files)
    assert changed_report(store, release, latest(store, release)) is None
    place = store.client.get_run(release.published.run_id).info.artifact_uri
    (kept,) = Path(place.removeprefix("file://")).glob("gates/*/bench.json")
    kept.unlink() if deleted else kept.write_text("faster")
    with raises_code("gate_report_changed", release.name, "bench.json"):
        promote(store, "tiny", "cpu", release.version, reason="all the same")
    assert not is_champion(store, release)


def latest(store: Store, release: Any) -> GateRecord:
    """The record that is kept with a release now."""
    record = gate_record(find_release(store, release.pair, release.device, release.version))
    assert record is not None
    return record
