"""Online state on disk: whole or not at all, taken up only where it belongs."""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from draftwell.serving.artifacts.acceptance_table import AcceptanceTable
from draftwell.serving.artifacts.correction_memory import CorrectionMemory
from draftwell.serving.server.model.snapshots import (
    LARGEST,
    SnapshotOrigin,
    Snapshots,
    checksum_line,
    name_of,
    read_snapshot,
)
from draftwell.serving.server.model.strategy_pool import EVERYBODY, Learnt, StrategyPool
from tests.support.errors import raises_code
from tests.support.lost_writes import outcomes
from tests.support.server.pools import SNAPSHOT_ORIGIN, decode, learn, pool


def served(
    folder: Path,
    mode: Any = "shared",
    origin: SnapshotOrigin = SNAPSHOT_ORIGIN,
    strategy: str = "spide",
    **parameters: Any,
) -> tuple[StrategyPool, Snapshots, int]:
    """A pool that has just been started over a folder, and how many states it took up."""
    it, snapshots = pool(strategy, mode, parameters=parameters), Snapshots(folder)
    return it, snapshots, snapshots.keep(it, origin)


def state_files(folder: Path) -> list[str]:
    """The files of a state folder, but its lock."""
    return sorted(path.name for path in folder.iterdir() if path.name != ".lock")


def total(it: StrategyPool, tenant: str | None = None) -> int:
    return sum(it.get("spide", tenant).artifact(AcceptanceTable).total)


@pytest.mark.parametrize("mode", ["shared", "tenant"])
def test_what_was_learnt_is_there_after_a_restart(tmp_path: Path, mode: str) -> None:
    before, snapshots, resumed = served(tmp_path, mode, strategy="hf_dynamic", heuristic=True)
    assert resumed == 0
    tenants = ("a", "b") if mode == "tenant" else (None,)
    for tenant in tenants:
        learn(before, tenant)
        decode(before.get(None, tenant))
    snapshots.close()
    after, _, resumed = served(tmp_path, mode, strategy="hf_dynamic", heuristic=True)
    assert resumed == (3 if mode == "tenant" else 1)
    for tenant in tenants:
        assert after.learnt()[tenant or EVERYBODY] == before.learnt()[tenant or EVERYBODY]
        assert total(after, tenant) == total(before, tenant) > 0
        counts = [it.get("csd", tenant).artifact(CorrectionMemory).counts for it in (after, before)]
        assert list(counts[0].items()) == list(counts[1].items()), (
            "its order says who is the oldest"
        )
    if mode == "tenant":
        assert total(after, "c") == 0


def test_a_snapshot_says_what_it_was_learnt_over_and_nothing_of_keys(tmp_path: Path) -> None:
    it, snapshots, _ = served(tmp_path, "tenant")
    learn(it, "digest-of-a-key")
    snapshots.close()
    snapshot = read_snapshot(tmp_path / name_of("digest-of-a-key"))
    assert snapshot.origin == SNAPSHOT_ORIGIN
    assert not [path for path in tmp_path.iterdir() if "digest-of-a-key" in path.name]


def test_only_what_changed_is_written(tmp_path: Path) -> None:
    it, snapshots, _ = served(tmp_path, "tenant")
    for tenant in ("a", "b"):
        learn(it, tenant)
    assert snapshots.save() == 3
    assert snapshots.save() == 0
    learn(it, "b")
    times = {path.name: path.stat().st_mtime_ns for path in tmp_path.iterdir()}
    assert snapshots.save() == 1
    changed = [
        path.name for path in tmp_path.iterdir() if path.stat().st_mtime_ns != times[path.name]
    ]
    assert changed == [name_of("b")]


def test_a_state_that_is_forgotten_goes_from_the_disk_too(tmp_path: Path) -> None:
    it = pool("spide", "tenant", most_tenants=2)
    snapshots = Snapshots(tmp_path)
    snapshots.keep(it, SNAPSHOT_ORIGIN)
    for tenant in ("a", "b", "c"):
        learn(it, tenant)
        snapshots.save()
    assert state_files(tmp_path) == sorted([name_of("b"), name_of("c")])


def changed(path: Path, part: str, **values: Any) -> None:
    """A snapshot with other values in a part of it (empty for the whole), whose sha256 fits: not
    damaged, but wrong."""
    body = json.loads(path.read_bytes().partition(b"\n")[2])
    found = body
    for name in filter(None, part.split(".")):
        found = found[name]
    found |= values
    text = json.dumps(body).encode() + b"\n"
    path.write_bytes(checksum_line(text) + b"\n" + text)


COUNTS = [[2] * 20, [1] * 20]
HARMS: dict[str, Any] = {
    "cut": lambda path: path.write_bytes(path.read_bytes()[:-20]),
    "empty": lambda path: path.write_bytes(b""),
    "no JSON": lambda path: path.write_bytes(b"\x80\x04K\x01.\n"),
    "a digit": lambda path: path.write_text(
        path.read_text().replace('"table":[[', '"table":[[1', 1)
    ),
    "too long": lambda path: path.write_bytes(path.read_bytes() + b" " * LARGEST),
    "a folder": lambda path: (path.unlink(), path.mkdir()),
    "newer": ("", {"schema_version": 3}),
    "unknown key": ("", {"extra": 1}),
    "another tenant": ("", {"tenant": "b"}),
    "19 bins": ("learnt", {"table": [COUNTS[0][1:], COUNTS[1]]}),
    "more kept than judged": ("learnt", {"table": COUNTS[::-1]}),
    "negative": ("learnt", {"table": [COUNTS[0], [-1] * 20]}),
    "words": ("learnt", {"table": [["9"] * 20, COUNTS[1]]}),
    "no threes": ("learnt", {"memory": [[1, 2]]}),
    "a pair twice": ("learnt", {"memory": [[1, 2, 3], [1, 2, 4]]}),
    "a count of none": ("learnt", {"memory": [[1, 2, 0]]}),
    "a count beyond": ("learnt", {"memory": [[1, 2, 2**40]]}),
    "impossible length": ("learnt.strategies", {"hf_dynamic": {"value": 10**9}}),
    "another bundle": ("origin", {"version": 4}),
    "another artifact": ("origin", {"digest": "e" * 64}),
    "other weights": ("origin", {"fingerprint": "e" * 64}),
}

CAUSES = {
    "a digit": "sha256 differs",
    "too long": "too large",
    "newer": "(schema 3, this server reads 2)",
    "unknown key": "(Extra inputs are not permitted)",
    "a pair twice": "(the memory names a pair twice)",
    "more kept than judged": "(more tokens accepted than verified)",
}


@pytest.mark.parametrize("harm", HARMS)
def test_what_is_damaged_or_foreign_is_said_in_one_line_and_left_out(
    tmp_path: Path, harm: str, caplog: pytest.LogCaptureFixture
) -> None:
    it, snapshots, _ = served(tmp_path)
    learn(it)
    snapshots.close()
    done = HARMS[harm]
    if callable(done):
        done(tmp_path / name_of(EVERYBODY))
    else:
        changed(tmp_path / name_of(EVERYBODY), done[0], **done[1])
    with caplog.at_level(logging.WARNING):
        fresh, snapshots, resumed = served(tmp_path)
    assert resumed == 0
    assert total(fresh) == 0
    (line,) = [one.getMessage() for one in caplog.records if one.name.endswith(".snapshots")]
    assert "\n" not in line
    assert str(tmp_path) not in line
    assert CAUSES.get(harm, "") in line
    learn(fresh)
    if harm != "a folder":
        snapshots.close()
        assert served(tmp_path)[2] == 1, "the next write takes its place"


def test_another_bundle_starts_anew_and_the_same_one_goes_on(tmp_path: Path) -> None:
    """As a switch does: the old pool's state is written, the new one resumed only if it is the same
    bundle, loaded again."""
    it, snapshots, _ = served(tmp_path)
    learn(it)
    again = pool("spide")
    assert snapshots.keep(again, SNAPSHOT_ORIGIN) == 1
    assert total(again) == total(it) > 0
    other = pool("spide")
    assert snapshots.keep(other, replace(SNAPSHOT_ORIGIN, version=4)) == 0
    assert total(other) == 0
    learn(other)
    snapshots.close()
    assert read_snapshot(tmp_path / name_of(EVERYBODY)).origin.version == 4


def test_no_state_is_kept_where_none_is_learnt(tmp_path: Path) -> None:
    it, snapshots, _ = served(tmp_path, "off")
    learn(it)
    snapshots.close()
    assert state_files(tmp_path) == []


def test_copies_are_written_while_requests_go_on(tmp_path: Path) -> None:
    """All that is counted was kept, so that every file must have two equal rows of counts."""
    it, ended = pool("spide"), threading.Event()
    table = it.get().artifact(AcceptanceTable)

    def decode_on() -> None:
        while not ended.is_set():
            for confidence in (0.2, 0.5, 0.95):
                table.update(confidence, kept=True)

    thread = threading.Thread(target=decode_on)
    snapshots = Snapshots(tmp_path, every=0.01)
    snapshots.keep(it, SNAPSHOT_ORIGIN)
    thread.start()
    snapshots.start()
    seen = set()
    until = time.monotonic() + 60  # a busy machine writes few in a second
    while len(seen) <= 3 and time.monotonic() < until:
        if (path := tmp_path / name_of(EVERYBODY)).exists():
            bins = read_snapshot(path).learnt.table
            assert bins is not None
            assert bins[0] == bins[1]
            seen.add(sum(bins[0]))
    ended.set()
    thread.join()
    snapshots.close()
    assert len(seen) > 3
    assert total(served(tmp_path)[0]) == sum(table.total), "the last word is written at the end"


def test_a_second_server_on_a_folder_is_refused_and_deletes_nothing(tmp_path: Path) -> None:
    """It would delete the states of tenants that it does not know."""
    it, snapshots, _ = served(tmp_path, "tenant")
    learn(it, "a")
    snapshots.save()
    with raises_code("state_folder_in_use", str(tmp_path), "--state-dir"):
        served(tmp_path, "tenant")
    assert state_files(tmp_path) == [name_of(EVERYBODY), name_of("a")]
    snapshots.close()
    assert served(tmp_path, "tenant")[2] == 2, "the folder is free when its server has ended"


def test_a_loss_of_power_leaves_the_last_states_or_those_before(tmp_path: Path) -> None:
    root = tmp_path / "root"
    root.mkdir()
    it, snapshots = pool("spide"), Snapshots(root / "state")
    snapshots.keep(it, SNAPSHOT_ORIGIN)

    def save() -> None:
        learn(it)
        snapshots.save()

    def resumed(left: Path) -> int:
        again, snapshots, _ = served(left / "state")
        snapshots.close()
        return total(again)

    before = total(it)
    once = outcomes(root, save, resumed, tmp_path / "once")
    assert once == ({before, total(it)}, {total(it)})
    known = total(it)
    assert outcomes(root, save, resumed, tmp_path / "twice") == ({known, total(it)}, {total(it)})


def test_a_folder_that_cannot_be_written_to_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with raises_code("state_folder_not_writable", "--state-dir"):
        Snapshots(tmp_path / "file" / "state")


def test_a_disk_that_fills_up_later_stops_nobody(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    from draftwell.serving.server.model import snapshots as module

    it, snapshots, _ = served(tmp_path)
    learn(it)

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(module, "write_atomically", full)
    assert snapshots.save() == 0
    assert "No space left on device" in caplog.text


WRITER = """
import sys, os
from pathlib import Path
from draftwell.serving import files
from draftwell.serving.server.model.snapshots import Snapshots
from tests.support.server.pools import SNAPSHOT_ORIGIN, learn, pool

it, snapshots = pool("spide"), Snapshots(Path(sys.argv[1]))
snapshots.keep(it, SNAPSHOT_ORIGIN)
learn(it)
snapshots.save()
print(sum(it.learnt()[""].table[0]), flush=True)
def pause(*arguments):
    print("writing", flush=True)
    sys.stdin.read()
os.replace = pause
learn(it)
snapshots.save()
"""


@pytest.mark.slow
def test_a_kill_in_the_middle_of_a_write_leaves_the_last_whole_one(tmp_path: Path) -> None:
    child = subprocess.Popen(
        [sys.executable, "-c", WRITER, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert child.stdout is not None
    kept = int(child.stdout.readline())
    assert child.stdout.readline() == "writing\n"
    assert len(state_files(tmp_path)) == 2, "the last whole one, and one that is being written"
    os.kill(child.pid, signal.SIGKILL)
    child.communicate()
    it, _, resumed = served(tmp_path)
    assert (resumed, total(it)) == (1, kept)
    assert state_files(tmp_path) == [name_of(EVERYBODY)], "what was half written is gone"


def test_counts_for_sampled_requests_come_back(tmp_path: Path) -> None:
    both = Learnt(([4] * 20, [2] * 20), sampled_table=([9] * 20, [8] * 20))
    before, snapshots, _ = served(tmp_path)
    before.learnt = lambda: {EVERYBODY: both}  # type: ignore[method-assign]
    snapshots.close()
    assert read_snapshot(tmp_path / name_of(EVERYBODY)).learnt == both
