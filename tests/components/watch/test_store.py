"""The watchdog's file: torn lines, its bound, and what it gives back."""

from __future__ import annotations

from pathlib import Path

from draftwell.components.engines.remote.counters import Counters
from draftwell.components.watch.store import Store
from tests.support.watch.probes import probe


def sample(at: int) -> Counters:
    return Counters(at=float(at), new_tokens=at, accepted_at=(3, 2))


def test_what_was_kept_comes_back(tmp_path: Path) -> None:
    store = Store(tmp_path / "new" / "watch.jsonl")
    assert store.read() == ([], [])
    store.add(sample(1), probe(2.0, "code-1", 2.5))
    store.add(sample(3))
    assert Store(store.file).read() == ([sample(1), sample(3)], [probe(2.0, "code-1", 2.5)])


def test_a_line_that_was_cut_short_is_passed_over(tmp_path: Path) -> None:
    file = tmp_path / "watch.jsonl"
    Store(file).add(sample(1), sample(2))
    file.write_bytes(file.read_bytes()[:-20])
    Store(file).add(sample(3))
    assert [found.at for found in Store(file).read().samples] == [1.0, 3.0]


def test_lines_that_are_no_entries_are_passed_over(tmp_path: Path) -> None:
    file = tmp_path / "watch.jsonl"
    Store(file).add(sample(1))
    with file.open("a") as lines:
        lines.write('{"sample": {"at": "never"}}\n[1]\n\xff\n{"other": 1}\n')
    Store(file).add(sample(2))
    assert [found.at for found in Store(file).read().samples] == [1.0, 2.0]


def test_the_file_is_bounded_and_the_newest_stay(tmp_path: Path) -> None:
    store = Store(tmp_path / "watch.jsonl", largest=10)
    for at in range(1, 55):
        store.add(sample(at))
        assert len(store.file.read_bytes().splitlines()) <= 20
    kept = [found.new_tokens for found in store.read().samples]
    assert kept[-1] == 54
    assert kept == list(range(55 - len(kept), 55))
    assert len(kept) >= 10
    assert [path.name for path in tmp_path.iterdir()] == ["watch.jsonl"]
