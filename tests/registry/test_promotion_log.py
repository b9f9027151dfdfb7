"""The record of champions: the numbers of its entries decide, no clock does, and nobody is lost."""

import datetime
import json
import time
from collections.abc import Callable
from typing import Any

import pytest

from draftwell.registry import promotion
from draftwell.registry.promotion import adopt, champion_since, promote, rollback, withdrawal
from draftwell.registry.promotion_log import history
from draftwell.registry.releases import ReleaseVersion, find_release, record_gate
from draftwell.registry.store import Store
from tests.support.errors import raises_code
from tests.support.loop.publishing import KeptRegistry, Make, verdict


@pytest.fixture
def three(store: Store, make_release: Make, kept: KeptRegistry) -> list[ReleaseVersion]:
    """A champion, and two releases that were judged beside it."""
    made = [make_release(str(n), accepted=n) for n in (1, 2, 3)]

    def judge() -> None:
        promote(store, "tiny", "cpu", 1, verdict(made[0]))
        for each in made[1:]:
            record_gate(store, verdict(each, beside=1))

    kept.after(store, "judged", judge)
    return made


def champions(store: Store) -> tuple[int | None, int | None, int]:
    """What the alias says, the record, and the alias of what is pinned."""
    return (
        store.get_aliases("release", "tiny.cpu").get("champion"),
        history(store, "tiny", "cpu").champion,
        store.get_aliases("acceptance_table", "tiny")["champion-cpu"],
    )


def first(patch: pytest.MonkeyPatch, name: str, work: Callable[[], object], *, late: bool) -> None:
    """Let another do some work once, before (or, `late`, after) promotion's function is called."""
    real, calls = getattr(promotion, name), []

    def called(*given: Any) -> Any:
        calls.append(given)
        if len(calls) > 1:
            return real(*given)
        found = real(*given) if late else None
        work()
        return found if late else real(*given)

    patch.setattr(promotion, name, called)


def test_of_two_that_were_judged_beside_one_champion_the_second_is_refused(
    store: Store, three: list[ReleaseVersion], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both have looked before either promotes."""
    monkeypatch.setenv("MLFLOW_TRACKING_USERNAME", "anna")
    other = Store(store.uri)
    first(monkeypatch, "outdated", lambda: promote(other, "tiny", "cpu", 2), late=True)
    with raises_code(
        "promotion_lost",
        "version 3 did not become champion",
        "version 2",
        "by anna@",
        "`draftwell gate --pair tiny --device cpu --release 3`",
    ):
        promote(store, "tiny", "cpu", 3)
    assert champions(store) == (2, 2, 2)
    assert rollback(store, "tiny", "cpu", "a trial")[1].version == 1, "the loser never was champion"


def test_whoever_sets_the_alias_late_gives_way_to_later_changes(
    store: Store, three: list[ReleaseVersion], monkeypatch: pytest.MonkeyPatch
) -> None:
    other = Store(store.uri)
    record_gate(store, verdict(three[2], beside=2))
    first(monkeypatch, "move_alias", lambda: promote(other, "tiny", "cpu", 3), late=False)
    promote(store, "tiny", "cpu", 2)
    assert champions(store) == (3, 3, 3)
    assert [e.change.what for e in history(store, "tiny", "cpu")] == ["promotion"] * 3


@pytest.mark.parametrize("change", ["by hand", "promotion"])
def test_a_person_who_moves_the_alias_while_a_change_is_recorded_has_the_last_word(
    store: Store, three: list[ReleaseVersion], monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    one, two, three_ = three
    person = Store(store.uri)
    first(monkeypatch, "append", lambda: person.set_alias(three_.published, "champion"), late=True)
    if change == "by hand":
        store.set_alias(two.published, "champion")
        adopt(store, "tiny", "cpu")
    else:
        promote(store, "tiny", "cpu", 2)
    assert champions(store) == (3, 3, 3)
    found = [(e.change.what, e.change.release, e.done) for e in history(store, "tiny", "cpu")[1:]]
    assert found == [(change, 2, True), ("by hand", 3, True)]
    # and back to where it was: the way a person tries two releases one after the other
    first(monkeypatch, "append", lambda: person.set_alias(two.published, "champion"), late=True)
    store.set_alias(one.published, "champion")
    adopt(store, "tiny", "cpu")
    assert champions(store) == (2, 2, 2)


def test_a_person_who_moves_the_alias_after_a_promotion_was_killed_has_the_last_word(
    store: Store, three: list[ReleaseVersion], monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(promotion, "move_alias", killed)
        with pytest.raises(KeyboardInterrupt):
            promote(store, "tiny", "cpu", 2)
    assert champions(store) == (1, 2, 1)
    store.set_alias(three[2].published, "champion")
    adopt(store, "tiny", "cpu")
    assert champions(store) == (3, 3, 3)


def test_an_alias_is_not_set_for_a_change_that_another_has_come_after(
    store: Store, three: list[ReleaseVersion], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that was slow to read the release and then died would leave the other's undone."""
    other, mine = Store(store.uri), []
    record_gate(store, verdict(three[2], beside=2))
    read, move, reads = promotion.find_release, promotion.move_alias, []

    def slow(*given: Any) -> ReleaseVersion:
        reads.append(given)
        if len(reads) == 2:  # the first is the release that is promoted
            promote(other, "tiny", "cpu", 3)
        return read(*given)

    def moved(by: Store, release: ReleaseVersion, alias: str) -> None:
        mine.extend([release.version] if by is store else [])
        move(by, release, alias)

    monkeypatch.setattr(promotion, "find_release", slow)
    monkeypatch.setattr(promotion, "move_alias", moved)
    promote(store, "tiny", "cpu", 2)
    assert (mine, champions(store)) == ([], (3, 3, 3))


def test_the_way_back_goes_by_the_registrys_order_and_not_by_clocks(
    store: Store, three: list[ReleaseVersion], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second was promoted by a machine whose clock is an hour behind."""

    class Behind(datetime.datetime):
        @classmethod
        def now(cls, tz: datetime.tzinfo | None = None) -> datetime.datetime:  # type: ignore[override]
            return super().now(tz) - datetime.timedelta(hours=1)

    clock = time.time
    with monkeypatch.context() as patch:
        patch.setattr("datetime.datetime", Behind)
        patch.setattr("time.time", lambda: clock() - 3600)
        promote(store, "tiny", "cpu", 2)
    promote(store, "tiny", "cpu", 3, verdict(three[2], beside=2))
    assert rollback(store, "tiny", "cpu", "a trial")[1].version == 2
    assert rollback(store, "tiny", "cpu", "a trial")[1].version == 1


def test_an_entry_that_was_sent_twice_counts_once(
    store: Store, three: list[ReleaseVersion], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An answer was lost, and MLflow's client sent the request again."""
    real = store.append

    def twice(*given: Any) -> None:
        real(*given)
        real(*given)

    monkeypatch.setattr(store, "append", twice)
    promote(store, "tiny", "cpu", 2)
    assert champions(store) == (2, 2, 2)
    assert [entry.number for entry in history(store, "tiny", "cpu")] == [1, 2]
    assert rollback(store, "tiny", "cpu", "a trial")[1].version == 1


def test_a_hands_move_is_recorded_and_a_registry_without_record_begins_with_its_champion(
    store: Store, make_release: Make
) -> None:
    one, two = (make_release(str(n), accepted=n) for n in (1, 2))
    store.set_alias(one.published, "champion")
    record_gate(store, verdict(one))
    promote(store, "tiny", "cpu", 2, verdict(two, beside=1))
    store.set_alias(one.published, "champion")
    adopt(store, "tiny", "cpu")
    adopt(store, "tiny", "cpu")
    found = [(e.change.what, e.before, e.change.release) for e in history(store, "tiny", "cpu")]
    assert found == [("by hand", None, 1), ("promotion", 1, 2), ("by hand", 2, 1)]
    assert champions(store) == (1, 1, 1)


def test_what_a_registry_kept_in_tags_counts_where_the_record_is_silent(
    store: Store, make_release: Make
) -> None:
    """Champions and a rollback from before the record: the way back goes by them, and what was
    taken back stays so until a person promotes it."""
    one, two, three, _ = (make_release(str(n), accepted=n) for n in (1, 2, 3, 4))
    for made in (one, two, three):
        record_gate(store, verdict(made))
        store.set_tag(made.published, "champion_since", f"2026-11-0{made.version}T10:00:00+00:00")
    note = {"reason": "too slow", "to": 1, "at": "2026-11-04T10:00:00+00:00"}
    store.set_tag(two.published, "rolled_back", json.dumps(note))
    store.set_alias(three.published, "champion")
    with raises_code("was_rolled_back", "too slow"):
        promote(store, "tiny", "cpu", 2, verdict(two, beside=3))
    since = champion_since(store, find_release(store, "tiny", "cpu", 1))
    assert since == datetime.datetime(2026, 11, 1, 10, tzinfo=datetime.UTC)
    assert champion_since(store, find_release(store, "tiny", "cpu", 4)) is None
    assert rollback(store, "tiny", "cpu", "a trial")[1].version == 1
    promote(store, "tiny", "cpu", 2, reason="another's load")
    assert withdrawal(store, find_release(store, "tiny", "cpu", 2)) is None


def test_a_record_with_a_hole_is_not_believed(store: Store, three: list[ReleaseVersion]) -> None:
    promote(store, "tiny", "cpu", 2)
    store.client.delete_model_version("promotions.tiny.cpu", "1")
    with raises_code("promotions_damaged", "version 1 of promotions.tiny.cpu", "delete"):
        rollback(store, "tiny", "cpu", "a trial")
    store.client.delete_registered_model("promotions.tiny.cpu")
    promote(store, "tiny", "cpu", 2)
    assert [e.change.what for e in history(store, "tiny", "cpu")] == ["by hand"]
    store.set_tag(history(store, "tiny", "cpu")[0].kept, "change", "{}")
    with raises_code("promotions_damaged", "version 1"):
        history(store, "tiny", "cpu")
    store.client.delete_registered_model("promotions.tiny.cpu")
    promote(store, "tiny", "cpu", 3, verdict(three[2], beside=2))
    assert rollback(store, "tiny", "cpu", "a trial")[1].version == 2


def test_the_record_says_who_promoted_what_when_and_why(
    store: Store, three: list[ReleaseVersion], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_USERNAME", "anna")
    promote(store, "tiny", "cpu", 2)
    rollback(store, "tiny", "cpu", "answers are cut")
    promote(store, "tiny", "cpu", 2, reason="they are not")
    last = history(store, "tiny", "cpu")[-1]
    assert last.change.judged is not None
    assert abs(last.at.timestamp() - time.time()) < 60
    assert "release 2 instead of 1, promotion by anna@" in last.words
    assert last.words.endswith(": they are not")
    kept = store.client.get_model_version("promotions.tiny.cpu", "4")
    assert kept.source == f"models:/{find_release(store, 'tiny', 'cpu', 2).published.name}/2"
