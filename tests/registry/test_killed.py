"""A publish that is killed leaves nothing promoted by half, and two at once leave one whole
champion. Real processes."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from draftwell.registry.pairs import fetch
from draftwell.registry.promotion import promote
from draftwell.registry.releases import find_release, gate_record, objection
from draftwell.registry.store import Store
from draftwell.serving.artifacts.base import digest_of
from tests.registry.killed_publisher import pair_in
from tests.support.loop.publishing import release, verdict

PROCESSES = 900
"""Seconds that the processes may take together on a busy machine."""


@pytest.fixture
def place(empty_database: Path, tmp_path: Path) -> Path:
    """A folder with an empty registry."""
    shutil.copyfile(empty_database, tmp_path / "mlflow.db")
    return tmp_path


def run(folder: Path, *words: object) -> list[list[int]]:
    """Run `tests.registry.killed_publisher`; the numbers of every line that it prints."""
    command = [
        sys.executable,
        "-m",
        "tests.registry.killed_publisher",
        str(folder),
        *map(str, words),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PROCESSES, check=False)
    assert done.returncode == 0, done.stderr
    return [[int(word) for word in line.split()] for line in done.stdout.splitlines()]


def whole(store: Store, folder: Path) -> int:
    """Check that the champion is gated and that every file of every version is there; returns the
    champion's number."""
    champion = find_release(store, "tiny", "cpu", "champion")
    assert objection(champion, gate_record(champion)) is None
    for kind, pair in (
        ("acceptance_table", "tiny"),
        ("decoding_config", "tiny"),
        ("release", "tiny.cpu"),
    ):
        for version in store.versions(kind, pair):
            assert (
                digest_of(store.download(version, folder / "down" / f"{kind}-{version.version}"))
                == version.digest
            )
    return champion.version


def check_killed(folder: Path, calls: list[int]) -> list[int]:
    """Kill at each of the calls, look at what is left, and ship the same release again; returns the
    champions that were left."""
    left = []
    for call, code in run(folder, "kill", *calls):
        assert code == -9, f"killed before call {call}, the process ended with {code}"
        store = Store(f"sqlite:///{folder / str(call) / 'mlflow.db'}")
        left.append(whole(store, folder / str(call)))
        spec = pair_in(folder)
        made = release(store, spec, fetch(spec), folder / str(call) / "again", accepted=2)
        assert made.version == 2, "what was whole before the kill is registered once"
        promote(store, "tiny", "cpu", made.version, verdict(made, beside=1))
        assert whole(store, folder / str(call)) == 2
        assert store.get_aliases("acceptance_table", "tiny")["champion-cpu"] == 2
    return left


@pytest.mark.slow
def test_wherever_it_is_killed_the_champion_is_whole(place: Path) -> None:
    """Before every single write of MLflow's client, from the first run to the last tag."""
    (place / "count").mkdir()
    ((writes,),) = run(place / "count", "count")
    left = check_killed(place, list(range(1, writes + 1)))
    assert set(left) == {1, 2}
    assert left == sorted(left), "once promoted, always promoted"


@pytest.mark.slow
def test_two_that_publish_at_once_leave_one_whole_champion(place: Path) -> None:
    (codes,) = run(place, "together", 2, 3)
    assert sorted(codes) in ([0, 0], [0, 1]), "the one behind the other, or one lost"
    store = Store(f"sqlite:///{place / 'mlflow.db'}")
    assert [version.version for version in store.versions("release", "tiny.cpu")] == [1, 2]
    champion = find_release(store, "tiny", "cpu", whole(store, place))
    for kind, version in champion.pins.items():
        assert store.get_aliases(kind, "tiny")["champion-cpu"] == version, kind


@pytest.mark.slow
def test_of_two_processes_that_promote_beside_one_champion_one_is_refused(place: Path) -> None:
    (codes,) = run(place, "race", 2, 3)
    assert sorted(codes) == [0, 1]
    store = Store(f"sqlite:///{place / 'mlflow.db'}")
    assert whole(store, place) == 2 + codes.index(0)


@pytest.mark.slow
def test_two_that_publish_the_same_at_once_register_it_once(place: Path) -> None:
    assert run(place, "together", 2, 2) == [[0, 0]]
    store = Store(f"sqlite:///{place / 'mlflow.db'}")
    for kind, pair in (
        ("acceptance_table", "tiny"),
        ("decoding_config", "tiny"),
        ("release", "tiny.cpu"),
    ):
        assert len(store.versions(kind, pair)) == 1, kind
    whole(store, place)
