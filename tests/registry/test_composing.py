"""A release of versions that a person picked: what joins them, and what is refused by name."""

import pytest

from draftwell.registry.composing import compose, parse_pins
from draftwell.registry.store import Store
from draftwell.serving.artifacts.pair_files import PairFiles, fingerprint
from tests.support.errors import raises_code
from tests.support.loop.publishing import (
    Make,
    config,
    distilled,
    profile,
    table,
    verifier,
)


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (["verifier"], "bad_pin"),
        (["=3"], "bad_pin"),
        (["verifier=3", "verifier=4"], "bad_pin"),
        (["verfier=3"], "unknown_artifact_kind"),
        (["release=3"], "unknown_artifact_kind"),
    ],
)
def test_a_pin_of_another_form_is_refused(words: list[str], code: str) -> None:
    with raises_code(code):
        parse_pins(words)


def test_what_a_person_marked_in_mlflow_needs_no_pin(
    champions: Make, make_release: Make, store: Store
) -> None:
    """A mark with the device's name goes before one without, and a pin before both."""
    with raises_code("nothing_picked", "picked"):
        compose(store, "tiny", "cpu", {})
    champions(1)
    make_release("two", accepted=2)
    two = store.resolve("acceptance_table", "tiny", 2)
    store.set_alias(two, "picked")
    made = compose(store, "tiny", "cpu", {})
    assert (made.versions["acceptance_table"], made.picked) == (two, ("acceptance_table",))
    store.set_alias(store.resolve("acceptance_table", "tiny", 1), "picked-cpu")
    assert compose(store, "tiny", "cpu", {}).versions["acceptance_table"].version == 1
    pinned = compose(store, "tiny", "cpu", {"acceptance_table": "2"})
    assert pinned.versions["acceptance_table"].version == 2


def test_other_kinds_are_the_champions_although_newer_ones_exist(
    put: Make, champions: Make, make_release: Make, store: Store, files: PairFiles
) -> None:
    (one,) = champions(1)
    # newer versions of both, which nobody promoted
    make_release("two", accepted=2)
    mark = fingerprint(files, "float32")
    picked = put(verifier(mark))
    made = compose(store, "tiny", "cpu", {"verifier": "1"})
    assert {kind: version.version for kind, version in made.versions.items()} == {
        **one.pins,
        "verifier": picked.version,
    }
    assert (made.origin("verifier"), made.origin("acceptance_table")) == (
        "picked",
        f"champion ({one.name})",
    )
    assert (
        compose(store, "tiny", "cpu", {"acceptance_table": "candidate"})
        .versions["acceptance_table"]
        .version
        == 2
    )
    assert (
        compose(store, "tiny", "cpu", {"acceptance_table": "champion"})
        .versions["acceptance_table"]
        .version
        == 1
    )


def test_without_a_champion_the_newest_of_the_same_models_and_device_join(
    put: Make, store: Store
) -> None:
    put(config("a" * 64))
    put(table("a" * 64, accepted=1))
    put(table("a" * 64, accepted=2))
    put(table("b" * 64, accepted=3))  # the newest, of another dtype
    put(profile("a" * 64))  # measured on a CPU
    made = compose(store, "tiny", "cpu", {"decoding_config": "1"})
    assert {kind: version.version for kind, version in made.versions.items()} == {
        "acceptance_table": 2,
        "decoding_config": 1,
        "hardware_profile": 1,
    }
    assert made.origin("acceptance_table") == "the newest"
    assert set(compose(store, "tiny", "cuda", {"decoding_config": "1"}).versions) == {
        "acceptance_table",
        "decoding_config",
    }
    with raises_code(
        "mixed_fingerprints",
        "acceptance_table version 3",
        "bbbbbbbbbbbb",
        "decoding_config version 1",
    ):
        compose(store, "tiny", "cpu", {"decoding_config": "1", "acceptance_table": "3"})
    with raises_code("nothing_to_release", "decoding_config"):
        compose(store, "tiny", "cpu", {"acceptance_table": "3"})  # no config of that dtype


def test_what_is_not_there_or_does_not_fit_is_refused(
    put: Make, champions: Make, store: Store
) -> None:
    champions(1)
    put(verifier("b" * 64))
    put(distilled())
    with raises_code("not_registered", "version 7", "verifier.tiny"):
        compose(store, "tiny", "cpu", {"verifier": "7"})
    with raises_code("mixed_fingerprints", "verifier version 1", "bbbbbbbbbbbb"):
        compose(store, "tiny", "cpu", {"verifier": "1"})
    with raises_code("draft_is_part_of_the_pair", "distilled_draft.tiny version 1"):
        compose(store, "tiny", "cpu", {"distilled_draft": "1"})
    assert [version.version for version in store.versions("release", "tiny.cpu")] == [1]
