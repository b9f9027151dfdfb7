"""Feedback: what is recorded of served requests, what is not, and what happens when there is too
much of it."""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from draftwell.components.drift.spool import Shard, read_spool
from draftwell.serving.recording.prompt_ratings import RatedPrompt
from draftwell.serving.recording.recorder import PositionRecorder
from draftwell.serving.recording.shadow import MOST_UNREAD
from draftwell.serving.recording.trace import TraceSet
from draftwell.serving.recording.trace_schema import KINDS, LOSSY
from draftwell.serving.server.feedback import feedback as module, spool as spool_module
from draftwell.serving.server.feedback.persistence import Persistence
from draftwell.serving.server.feedback.record import Record
from draftwell.serving.server.feedback.spool import Spool
from draftwell.serving.server.scheduling.detokenize import TextStream
from draftwell.serving.server.scheduling.draft_limits import PROBE_EVERY
from draftwell.serving.server.scheduling.ticket import Delta, End, Event, Ticket
from draftwell.serving.server.settings import ServerSettings
from tests.support.errors import raises_code
from tests.support.models.resources import table_resources
from tests.support.server.feedback_server import PROMPTS, TOKENS, FeedbackServer, record
from tests.support.server.scheduler_rounds import turn_until
from tests.support.server.served_pair import tiny_pair
from tests.support.server.server_process import wait_until


@pytest.fixture(scope="module")
def pair() -> Any:
    return tiny_pair(4)


def rows(folder: Path) -> pa.Table:
    return TraceSet(folder).read()


def by_prompt(table: pa.Table) -> list[Any]:
    """A data frame for each text, in order."""
    return [text for _, text in table.to_pandas().groupby("prompt_id", sort=False)]


def files(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


# what is recorded


def test_requests_become_texts_of_a_trace(tmp_path: Path, pair: Any) -> None:
    server = FeedbackServer(pair, tmp_path, text=True)
    answers = [server.ask([prompt])[0] for prompt in PROMPTS]
    server.close()
    table = rows(tmp_path)
    assert server.counts == {"recorded": 6, "written": 6, "bytes": server.counts["bytes"]}
    names = list(dict.fromkeys(table.column("prompt_id").to_pylist()))
    assert len(names) == 6
    for name, prompt, events in zip(names, PROMPTS, answers, strict=True):
        text = table.filter(pa.compute.equal(table.column("prompt_id"), name)).to_pydict()
        assert text["position"] == list(range(len(text["position"])))
        assert TOKENS - 3 <= len(text["position"]) <= TOKENS
        assert text["prompt_tokens"] == [pair.encode_prompt(prompt)] + [None] * (
            len(text["position"]) - 1
        )
        assert set(text["kind"]) == {"target"}
        shown = "".join(event.text for event in events if isinstance(event, Delta))
        assert shown.startswith(pair.decode(text["token"]).rstrip("\ufffd"))
        assert text["target_token"] == text["token"] == text["correction"]
    (header,) = {path: TraceSet(tmp_path).header for path in TraceSet(tmp_path).shards}.values()
    assert (header.pair, header.fingerprint, header.dtype, header.temperature) == (
        "tiny",
        "none",
        "float32",
        0.0,
    )


def test_a_champion_without_a_draft_is_recorded_like_one_with_it(tmp_path: Path, pair: Any) -> None:
    """The draft only reads along: answers and their statistics know nothing of it."""
    found = {}
    for name in ("vanilla_sd", "autoregressive", "prompt_lookup"):
        server = FeedbackServer(pair, tmp_path / name, text=True, strategy=name)
        answers = [server.ask([prompt], max_tokens=40)[0] for prompt in PROMPTS[:3]]
        server.close()
        found[name] = rows(tmp_path / name)
        assert server.counts["recorded"] == 3
        if name != "vanilla_sd":
            for events in answers:
                end = events[-1]
                assert isinstance(end, End)
                assert (end.stats.draft_calls, end.stats.draft_seconds) == (0, 0.0)
                assert {role for role, _, _ in end.stats.timeline} == {"target"}
    with_draft, *without = map(by_prompt, found.values())
    assert all(len(text) == 40 for texts in without for text in texts), (
        "to the last token, which no strategy with a draft lets it read"
    )
    for mine, theirs in zip([*without[0], *without[1]], with_draft * 2, strict=True):
        same, figures = (
            mine.iloc[: len(theirs)],
            ["confidence", "entropy", "draft_raw_q", "draft_raw_p", "correction_p"],
        )
        exact = [
            "position",
            "kind",
            "token",
            "correction",
            "draft_token",
            "draft_q",
            "draft_p",
            "rank",
        ]
        assert same[exact].to_numpy().tolist() == theirs[exact].to_numpy().tolist()
        assert same[figures].to_numpy() == pytest.approx(theirs[figures].to_numpy(), abs=1e-5)


def test_a_text_that_a_stop_string_ends_is_recorded_as_far_as_the_draft_read(
    tmp_path: Path, pair: Any
) -> None:
    server = FeedbackServer(pair, tmp_path, strategy="autoregressive")
    ids = pair.encode_prompt(PROMPTS[0])
    events: list[Event] = []
    sampling = pair.sampling(max_tokens=80, stop_token_ids=frozenset())
    whole = pair.decode(pair.engine().generate(ids, sampling, server.scheduler.strategy).output)
    stop = next(whole[i : i + 3] for i in range(20, 60) if whole.find(whole[i : i + 3]) == i)
    server.scheduler.submit(
        Ticket(ids, sampling, TextStream(pair.decode, stop=[stop]), events.append)
    )
    turn_until(server.scheduler, lambda: events and not isinstance(events[-1], Delta))
    server.close()
    assert server.counts["recorded"] == 1
    end = events[-1]
    assert isinstance(end, End)
    assert (
        end.completion_tokens - 2 * MOST_UNREAD
        <= rows(tmp_path).num_rows
        <= end.completion_tokens
        < 70
    )


def test_a_lossy_strategys_texts_are_of_a_kind_of_their_own(tmp_path: Path, pair: Any) -> None:
    server = FeedbackServer(pair, tmp_path, text=True, strategy="lossy_sd")
    server.ask(PROMPTS)
    server.close()
    table = rows(tmp_path)
    assert set(table.column("kind").to_pylist()) == {LOSSY}
    assert LOSSY not in KINDS, "none that is collected"
    assert table.column("target_token").null_count == table.num_rows
    assert any(
        a != b
        for a, b in zip(
            table.column("token").to_pylist(), table.column("correction").to_pylist(), strict=True
        )
    )


def test_without_texts_nothing_is_kept_that_a_text_could_be_made_of(
    tmp_path: Path, pair: Any
) -> None:
    """Neither tokens nor corrections nor states; the bodies stay away, and no name says what the
    prompt was."""
    server = FeedbackServer(pair, tmp_path)
    server.ask(PROMPTS)
    server.close()
    table = rows(tmp_path)
    filled = {name for name in table.column_names if table.column(name).null_count < table.num_rows}
    assert filled == {
        "prompt_id",
        "turn",
        "kind",
        "temperature",
        "position",
        "correction_p",
        "draft_q",
        "draft_p",
        "draft_raw_q",
        "draft_raw_p",
        "ratio",
        "rank",
        "confidence",
        "entropy",
    }
    assert all(name.startswith("shard-") for name in files(tmp_path))
    again = FeedbackServer(pair, tmp_path / "again")
    again.ask(PROMPTS)
    again.close()
    assert not set(rows(tmp_path / "again").column("prompt_id").to_pylist()) & set(
        table.column("prompt_id").to_pylist()
    )


def test_bodies_are_what_was_asked_and_answered_and_nothing_else(tmp_path: Path, pair: Any) -> None:
    from draftwell.components.prompts.sources import load_prompts

    server = FeedbackServer(pair, tmp_path, text=True)
    answers = [server.ask([prompt])[0] for prompt in PROMPTS]
    server.close()
    (file,) = tmp_path.glob("requests-*.jsonl")
    found = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    assert [set(row) for row in found] == [{"id", "model", "messages", "output"}] * 6, (
        "who asked is nobody's business"
    )
    assert [row["messages"] for row in found] == [
        [{"role": "user", "content": prompt}] for prompt in PROMPTS
    ]
    for row, events in zip(found, answers, strict=True):
        assert row["output"].startswith(
            "".join(event.text for event in events if isinstance(event, Delta))
        )
    assert [prompt.prompt for prompt in load_prompts(tmp_path)] == list(PROMPTS)


def test_a_verifiers_states_are_part_of_a_text(tmp_path: Path, pair: Any) -> None:
    for text in (True, False):
        folder = tmp_path / str(text)
        server = FeedbackServer(pair, folder, text=text, follow=False)
        server.feedback.follow(pair, table_resources(8).artifacts)
        server.ask(PROMPTS[:2])
        server.close()
        states = rows(folder).column("hidden_before").to_pylist()
        assert ({len(state) for state in states} == {32}) if text else (set(states) == {None})


def test_requests_of_other_settings_are_shards_of_their_own(tmp_path: Path, pair: Any) -> None:
    server = FeedbackServer(pair, tmp_path)
    server.ask(PROMPTS[:2])
    server.ask(PROMPTS[2:4], temperature=0.7, top_p=0.9)
    server.ask(PROMPTS[4:5], temperature=0.7, top_p=0.9, top_k=3)
    server.close()
    spool = read_spool(tmp_path, pair.fingerprint, window=100)
    assert {(header.temperature, header.top_p, header.top_k) for header in spool.headers} == {
        (0.0, 1.0, 0),
        (0.7, 0.9, 0),
        (0.7, 0.9, 3),
    }
    shards = [
        Shard(path, pair.fingerprint).read(["temperature"]) for path in TraceSet(tmp_path).shards
    ]
    assert [{round(t, 3) for t in shard.column("temperature").to_pylist()} for shard in shards] == [
        {0.0},
        {0.7},
        {0.7},
    ]


@pytest.mark.parametrize(
    ("asked", "altered"),
    [
        ({"presence_penalty": 0.5}, 2),
        ({"logit_bias": {5: 1.0}}, 2),
        ({"prediction": (1, 2, 3)}, 2),
        ({"min_p": 0.1, "temperature": 1.0}, 2),
        ({"min_p": 0.1, "temperature": 0.0}, 0),  # it cuts sampled ones only
    ],
)
def test_requests_that_alter_the_distributions_say_nothing(
    tmp_path: Path, pair: Any, asked: dict[str, Any], altered: int
) -> None:
    server = FeedbackServer(pair, tmp_path)
    server.ask(PROMPTS[:2], **asked)
    assert server.counts.get("skipped_altered", 0) == altered
    assert server.counts.get("recorded", 0) == 2 - altered


def test_what_is_not_comparable_or_not_finished_is_left_out(tmp_path: Path, pair: Any) -> None:
    unknown = FeedbackServer(pair, tmp_path / "unknown", follow=False)
    unknown.ask(PROMPTS[:2])
    assert unknown.counts == {"skipped_no_draft": 2}
    rated = FeedbackServer(pair, tmp_path / "rated")
    rated.ask(PROMPTS[:2], strategy=RatedPrompt())
    assert rated.counts == {"skipped_altered": 2}, "prompts that are only rated are no traffic"
    long = FeedbackServer(pair, tmp_path / "long", strategy="autoregressive")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pair.models["draft"], "max_context", 30)
        long.ask(PROMPTS[:2])
    assert long.counts == {"skipped_too_long": 2}, "the draft has no room to read along"
    gone = FeedbackServer(pair, tmp_path / "gone")
    gone.ask(PROMPTS[:2], cancel=True)
    assert gone.counts == {"skipped_unfinished": 2}
    assert gone.feedback._open == {}
    checks = FeedbackServer(pair, tmp_path / "checks")
    checks.ask(PROMPTS[:2], own=True)
    assert checks.counts == {}, "the server's own checks are no traffic"


def test_the_same_prompt_is_recorded_once(
    tmp_path: Path, pair: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "REMEMBERED", 3)
    server = FeedbackServer(pair, tmp_path)
    for _ in range(3):
        server.ask(PROMPTS[:2])
    assert (server.counts["recorded"], server.counts["skipped_repeated"]) == (2, 4)
    server.ask(PROMPTS[2:5])
    server.ask(PROMPTS[:1])
    assert server.counts["recorded"] == 6, (
        "what is remembered is bounded, and the oldest is forgotten"
    )


def test_a_busy_server_that_does_not_draft_records_all_the_same(tmp_path: Path, pair: Any) -> None:
    """The draft reads along from time to time, so that not only quiet hours are recorded; the price
    is one draft in many rounds."""
    server = FeedbackServer(pair, tmp_path, text=True)
    server.scheduler.strategy.draft_length_by_batch = {1: 5, 2: 0}
    longest = 2 * PROBE_EVERY + 8
    answers = server.ask(PROMPTS[:4], max_tokens=longest)
    server.close()
    table = rows(tmp_path)
    for events in answers:
        end = events[-1]
        assert isinstance(end, End)
        assert end.stats.drafted < longest / 8, "it drafts seldom, or the test proves nothing"
        assert end.stats.draft_calls < longest / 8
    assert server.counts["recorded"] == 4
    assert table.num_rows >= 4 * PROBE_EVERY
    assert table.column("confidence").null_count == 0


# how much


def test_a_share_of_the_requests(
    tmp_path: Path, pair: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that are not drawn cost nothing: no recorder, and no row that nobody asked for."""
    made = []
    monkeypatch.setattr(
        module, "PositionRecorder", lambda *a, **k: made.append(a) or PositionRecorder(*a, **k)
    )
    none = FeedbackServer(pair, tmp_path / "none", rate=0.0)
    none.ask(PROMPTS)
    assert (made, none.counts) == ([], {})
    half = FeedbackServer(pair, tmp_path / "half", rate=0.5)
    half.ask([f"{i} {prompt}" for i in range(10) for prompt in PROMPTS], max_tokens=4)
    assert 18 <= len(made) <= 42


def test_the_flags_are_either_complete_or_refused(tmp_path: Path) -> None:
    assert Persistence(ServerSettings(bundle=tmp_path)).observers == ()
    given = ServerSettings(
        bundle=tmp_path, feedback_dir=tmp_path / "spool", feedback_rate=0.1, feedback_days=2
    )
    made = Persistence(given).feedback
    assert made is not None
    assert (made.rate, made.text, made.per_minute) == (0.1, False, 60)
    spool = made.spool
    assert (spool.folder, spool.days, spool.private) == (tmp_path / "spool", 2, False)
    assert spool.max_bytes == 256 << 20
    told = Persistence(given.model_copy(update={"feedback_text": True})).feedback
    assert told is not None
    assert told.text
    assert told.spool.private
    for code, option, flags in (
        ("feedback_rate_missing", "rate", {"feedback_dir": tmp_path}),
        ("feedback_folder_missing", "dir", {"feedback_rate": 0.1}),
        *(
            ("invalid_option", "rate", {"feedback_dir": tmp_path, "feedback_rate": rate})
            for rate in (-0.1, 1.1, float("nan"))
        ),
    ):
        with raises_code(code, f"--feedback-{option}"):
            ServerSettings.from_options(bundle=tmp_path, **flags)


def test_requests_a_minute_are_bounded(
    tmp_path: Path, pair: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [1000.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    server = FeedbackServer(pair, tmp_path, per_minute=3)
    for i in range(10):
        now[0] += 1
        server.ask([f"{i} then"], max_tokens=4)
    assert (server.counts["recorded"], server.counts["dropped_too_many"]) == (3, 7)
    now[0] += 61
    server.ask([f"{i} man" for i in range(5)], max_tokens=4)
    assert server.counts["recorded"] == 6


class Stuck(Spool):
    """A spool whose disk never answers."""

    def __init__(self, folder: Path, queued: int):
        super().__init__(folder, flush_seconds=0.01, queued=queued)
        self.entered, self.release = threading.Event(), threading.Event()

    def write(self, records: Sequence[Record]) -> None:
        self.entered.set()
        self.release.wait(120)
        super().write(records)


def test_a_disk_that_hangs_never_stops_decoding(tmp_path: Path, pair: Any) -> None:
    spool = Stuck(tmp_path, queued=2)
    server = FeedbackServer(pair, tmp_path, spool=spool)
    spool.start()
    server.ask(PROMPTS[:1])
    assert spool.entered.wait(60)
    answers = server.ask(PROMPTS[1:])
    assert all(isinstance(events[-1], End) for events in answers)
    counts = server.counts
    assert counts["dropped_queue_full"] >= 2
    spool.release.set()
    spool.close()
    assert server.counts["written"] + server.counts["dropped_queue_full"] == 6


def test_a_spool_is_bounded_and_the_oldest_goes(tmp_path: Path) -> None:
    sizes = []
    (tmp_path / "notes.txt").write_text("mine" * 10_000)
    spool = Spool(tmp_path, max_bytes=40_000)
    for i in range(30):
        spool.write([record(i, body={"prompt": f"p{i}" * 200})])
        sizes.append(
            sum(path.stat().st_size for path in tmp_path.iterdir() if path.name != "notes.txt")
        )
    assert max(sizes) <= 40_000
    assert sizes[-1] > 20_000
    kept = list(dict.fromkeys(rows(tmp_path).column("prompt_id").to_pylist()))
    assert kept == [f"r{i}" for i in range(30 - len(kept), 30)], "the newest, in order"
    assert (tmp_path / "notes.txt").exists()
    assert spool.counts["removed_files"] > 0


@pytest.mark.parametrize("moment", ["at start", "after a write", "while idle"])
def test_files_of_the_spool_do_not_get_older_than_the_days_that_they_may(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    moment: str,
) -> None:
    caplog.set_level("INFO")
    monkeypatch.setattr(spool_module, "IDLE_SECONDS", 0.01)
    now, day = time.time(), 86_400
    for age in (3, 1):
        monkeypatch.setattr(time, "time", lambda age=age: now - age * day)
        spool = Spool(tmp_path)
        spool.write([record(age, body={"prompt": "a"})])
    (tmp_path / "notes.txt").write_text("mine")
    assert len(files(tmp_path)) == 5
    if moment == "at start":
        monkeypatch.setattr(time, "time", lambda: now)
        spool = Spool(tmp_path, days=2)
    else:
        spool = Spool(tmp_path, days=2.5)
        monkeypatch.setattr(time, "time", lambda: now)
    if moment == "after a write":
        spool.write([record(2)])
    elif moment == "while idle":
        spool.start()
        wait_until(lambda: len(files(tmp_path)) == 3, "the old files are deleted")
        spool.close()
    wanted, number = (["r1", "r2"], 4) if moment == "after a write" else (["r1"], 3)
    assert sorted(rows(tmp_path).column("prompt_id").unique().to_pylist()) == wanted
    assert len(files(tmp_path)) == number
    said = [record.getMessage() for record in caplog.records]
    assert [line for line in said if "older than" in line] == [
        f"2 files of feedback are older than {spool.days:g} days: deleted"
    ]


@pytest.mark.parametrize("text", [True, False])
def test_files_with_texts_are_for_the_servers_own_user_alone(tmp_path: Path, text: bool) -> None:
    """Also in a folder that was there already and that others may look into."""
    (tmp_path / "shared").mkdir(mode=0o755)
    for folder in (tmp_path / "shared", tmp_path / "new"):
        spool = Spool(folder, private=text)
        spool.write([record(1, body={"prompt": "a secret"} if text else None)])
        modes = {path.stat().st_mode & 0o777 for path in folder.iterdir()}
        assert modes == {0o600 if text else 0o644}
    assert (tmp_path / "shared").stat().st_mode & 0o777 == 0o755
    assert not text or (tmp_path / "new").stat().st_mode & 0o777 == 0o700


def test_shards_sort_by_time_whatever_the_clock_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    TraceSet(tmp_path).write_shard(7, pq.read_table(_shard(tmp_path / "other")))
    spool = Spool(tmp_path)
    spool.write([record(1)])
    monkeypatch.setattr(time, "time", lambda: 1000.0)
    spool.write([record(2)])
    Spool(tmp_path).write([record(3)])
    names = list(dict.fromkeys(rows(tmp_path).column("prompt_id").to_pylist()))
    assert names == ["other", "r1", "r2", "r3"]


def test_two_servers_of_containers_never_write_the_same_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each is process 1 there, and they may write in the same millisecond."""
    monkeypatch.setattr(os, "getpid", lambda: 1)
    monkeypatch.setattr(time, "time", lambda: 1e9)
    for number, spool in enumerate([Spool(tmp_path), Spool(tmp_path)]):
        spool.write([record(number, body={"prompt": "a"})])
    assert len(files(tmp_path)) == 4
    assert sorted(rows(tmp_path).column("prompt_id").unique().to_pylist()) == ["r0", "r1"]


def _shard(folder: Path) -> Path:
    spool = Spool(folder)
    spool.write([record(id="other")])
    return next(folder.glob("shard-*"))


def test_records_wait_for_each_other_but_not_long(tmp_path: Path) -> None:
    spool = Spool(tmp_path, flush_seconds=2.0)
    spool.start()
    for i in range(5):
        assert spool.offer(record(i))
    wait_until(lambda: spool.counts["written"], "the records are written")
    assert spool.counts["written"] == 5
    assert len(files(tmp_path)) == 1
    spool.offer(record(9))
    spool.close()
    assert spool.counts["written"] == 6, "what is queued is written at the end"


def test_a_write_that_fails_is_counted_and_said_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    spool = Spool(tmp_path)
    monkeypatch.setattr(spool_module, "write_atomically", full)
    for i in range(3):
        spool.write([record(i)])
    assert spool.counts["failed"] == 3
    assert [line for line in caplog.messages if "No space" in line] == [
        "feedback could not be written: No space left on device"
    ]


def test_a_folder_that_cannot_be_written_to_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with raises_code("feedback_folder_not_writable", "--feedback-dir"):
        Spool(tmp_path / "file" / "spool")


WRITER = """
import os, sys
from pathlib import Path
from draftwell.serving.server.feedback.spool import Spool
from tests.support.server.feedback_server import record

spool = Spool(Path(sys.argv[1]))
spool.write([record(1, body={"prompt": "a"})])
def pause(*arguments):
    print("writing", flush=True)
    sys.stdin.read()
os.replace = pause
spool.write([record(2, body={"prompt": "b"})])
"""


@pytest.mark.slow
def test_a_kill_in_the_middle_of_a_write_leaves_nothing_half_read(tmp_path: Path) -> None:
    child = subprocess.Popen(
        [sys.executable, "-c", WRITER, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert child.stdout is not None
    assert child.stdout.readline() == "writing\n"
    half = [name for name in files(tmp_path) if name.startswith(".shard-")]
    assert len(half) == 1
    Spool(tmp_path)
    assert half[0] in files(tmp_path), "another server may still be writing it"
    os.kill(child.pid, signal.SIGKILL)
    child.communicate()
    assert set(rows(tmp_path).column("prompt_id").to_pylist()) == {"r1"}
    os.utime(tmp_path / half[0], (0, 0))
    Spool(tmp_path)
    assert [name for name in files(tmp_path) if name.startswith(".")] == []
    assert len(files(tmp_path)) == 2


def test_a_queue_that_is_full_at_the_end_is_still_written(tmp_path: Path) -> None:
    spool = Spool(tmp_path, queued=3)
    while spool.offer(record(spool._queue.qsize())):
        pass
    assert spool.full
    spool.start()
    spool.close()
    assert spool.counts["written"] == 3
    with pytest.raises(queue.Empty):
        spool._queue.get_nowait()
