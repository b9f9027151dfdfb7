"""Reading a spool: the newest prompts, whatever else lies there."""

from __future__ import annotations

import json
import os
import shutil
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from draftwell.components.drift.prompts import recorded_prompts, spooled_prompts, write_prompts
from draftwell.components.drift.spool import Shard, newest, read_spool
from draftwell.components.drift.traffic import shared_kinds
from draftwell.components.prompts.prompt import (
    Prompt,
    context_of,
    ids_of,
    prompt_of,
    read_prompts,
)
from tests.support.collecting import collect_traces
from tests.support.errors import raises_code
from tests.support.loop.drift_traffic import FINGERPRINT, HEADER, rows, spool, traffic
from tests.support.server.served_pair import tiny_pair


def test_the_newest_prompts_come_last(tmp_path: Path) -> None:
    folder = spool(tmp_path, [rows(i, 10, first=10 * i) for i in range(4)])
    found = read_spool(folder, FINGERPRINT, window=15)
    ids = list(dict.fromkeys(found.rows.column("prompt_id").to_pylist()))
    assert ids == [f"p{i}" for i in range(25, 40)]
    assert len(found.headers) == 2  # older shards were not opened
    assert found.notes == ()


SAMPLED = HEADER.model_copy(update={"temperature": 1.0})


def test_sampled_traffic_does_not_crowd_out_what_can_be_compared(tmp_path: Path) -> None:
    """The API's default temperature is 1: of the last prompts most are sampled, and the window was
    filled with them."""
    busy = [rows(10 + i, 30, first=100 * (i + 1), header=SAMPLED) for i in range(6)]
    folder = spool(tmp_path, [rows(0, 20), *busy[:3], rows(1, 20, first=20), *busy[3:]])
    found = read_spool(folder, FINGERPRINT, window=30, temperature=0.0)
    assert list(dict.fromkeys(found.rows.column("prompt_id").to_pylist())) == [
        f"p{i}" for i in range(10, 40)
    ]
    assert {header.temperature for header in found.headers} == {0.0}
    assert found.shards == ("shard-00000.parquet", "shard-00004.parquet")
    assert found.others == 180
    assert found.notes == (
        "180 prompts of the feedback left out: sampled at another temperature than 0",
    )
    everything = read_spool(folder, FINGERPRINT, window=30)
    assert (set(everything.rows.column("temperature").to_pylist()), everything.others) == ({1.0}, 0)


def test_a_spool_without_anything_at_the_temperature_is_no_error(tmp_path: Path) -> None:
    found = read_spool(
        spool(tmp_path, [rows(0, 30, header=SAMPLED)]),
        FINGERPRINT,
        window=30,
        hidden=True,
        temperature=0.0,
    )
    assert (found.rows.num_rows, found.headers, found.others, found.newest) == (0, (), 30, None)
    assert shared_kinds(rows(1, 3), found.rows) == ("target",)
    assert len(traffic(found.rows)) == 0


def test_a_spool_knows_when_its_newest_shard_was_written(tmp_path: Path) -> None:
    """By what the server wrote into its name: a copy has another date."""
    spool(tmp_path, [rows(0, 10)])
    os.utime(tmp_path / "shard-00000.parquet", (1_000_000_000, 1_000_000_000))
    assert read_spool(tmp_path, FINGERPRINT, window=30).newest == datetime.fromtimestamp(
        1_000_000_000, UTC
    )
    shutil.copy(tmp_path / "shard-00000.parquet", tmp_path / "shard-001700000000500-77.parquet")
    assert read_spool(tmp_path, FINGERPRINT, window=30).newest == datetime.fromtimestamp(
        1_700_000_000.5, UTC
    )


def test_a_digest_is_of_what_was_read(tmp_path: Path) -> None:
    one = spool(tmp_path / "a", [rows(i, 10, first=10 * i) for i in range(3)])
    other = spool(tmp_path / "b", [rows(9, 10), *(rows(i, 10, first=10 * i) for i in (1, 2))])
    assert (
        read_spool(one, FINGERPRINT, window=20).digest
        == read_spool(other, FINGERPRINT, window=20).digest
    )
    assert (
        read_spool(one, FINGERPRINT, window=30).digest
        != read_spool(other, FINGERPRINT, window=30).digest
    )


@pytest.mark.parametrize("harm", ["half", "foreign", "no parquet"])
def test_a_shard_that_cannot_be_read_is_left_out_and_named(tmp_path: Path, harm: str) -> None:
    folder = spool(tmp_path, [rows(0, 10), rows(1, 10, first=10)])
    bad = folder / "shard-00002.parquet"
    if harm == "half":
        data = (folder / "shard-00000.parquet").read_bytes()
        bad.write_bytes(data[: len(data) // 2])
    elif harm == "foreign":
        header = HEADER.model_copy(update={"fingerprint": "e" * 64})
        pq.write_table(rows(3, 10, header=header), bad)
    else:
        bad.write_text("{}")
    found = read_spool(folder, FINGERPRINT, window=100)
    assert len(set(found.rows.column("prompt_id").to_pylist())) == 20
    assert len(found.notes) == 1
    assert found.notes[0].startswith("1 of 3 shards left out")
    assert "shard-00002" in found.notes[0]


def test_a_spool_without_a_readable_shard_is_an_error(tmp_path: Path) -> None:
    with raises_code("spool_empty", str(tmp_path)):
        read_spool(tmp_path, FINGERPRINT, window=10)
    (tmp_path / "shard-00000.parquet").write_text("{}")
    with raises_code("unreadable_trace", "shard-00000.parquet"):
        read_spool(tmp_path, FINGERPRINT, window=10)


def test_half_written_files_are_never_looked_at(tmp_path: Path) -> None:
    folder = spool(tmp_path, [rows(0, 10)])
    (folder / ".shard-00001.parquet.x1").write_bytes(b"PAR1")
    assert read_spool(folder, FINGERPRINT, window=10).notes == ()


def test_a_shard_alone_is_a_trace_set(tmp_path: Path) -> None:
    folder = spool(tmp_path, [rows(0, 10), rows(1, 10)])
    assert Shard(folder / "shard-00001.parquet", FINGERPRINT).read(["turn"]).num_rows == 480


def test_newest_keeps_order_and_whole_prompts() -> None:
    table = newest(rows(0, 5), 2)
    assert list(dict.fromkeys(table.column("prompt_id").to_pylist())) == ["p3", "p4"]
    assert table.num_rows == 96


def test_prompts_that_are_taken_keep_all_of_their_rows() -> None:
    found = traffic(rows(0, 4))
    taken = found.take([found.names[1], found.names[3]])
    assert taken.names == (found.names[1], found.names[3])
    of_them = np.isin(found.unit, [1, 3])
    assert taken.confidence.tolist() == found.confidence[of_them].tolist()
    assert taken.unit.tolist() == (found.unit[of_them] // 2).tolist()


def test_kinds_that_both_have() -> None:
    mixed, target = rows(0, 3, kind=["mixed"] * 144), rows(0, 3)
    assert shared_kinds(target, target) == ("target",)
    assert shared_kinds(mixed, mixed) == ("mixed",)
    with raises_code("no_shared_kinds", "mixed", "target"):
        shared_kinds(target, mixed)


PROMPTS = [
    Prompt(f"p{i}", None, [f"the {word} in the inn"])
    for i, word in enumerate(("man", "hen", "onion", "hour"))
]


def test_prompts_come_out_of_traces(tmp_path: Path) -> None:
    """Those of one message, word for word; a longer conversation cannot be told from its tokens."""
    pair = tiny_pair(2)
    talk = Prompt(
        "talk",
        None,
        ["and then"],
        messages=({"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}),
    )
    traces = collect_traces(
        pair,
        [*PROMPTS, Prompt("again", None, PROMPTS[0].turns), talk],
        tmp_path,
        max_tokens=4,
        rollout=1,
    )
    found = spooled_prompts(tmp_path, pair, traces.read(), window=10, fewest=3)
    assert sorted(prompt.prompt for prompt in found) == sorted(prompt.prompt for prompt in PROMPTS)
    assert len({prompt.id for prompt in found}) == 4
    assert len(spooled_prompts(tmp_path, pair, traces.read(), window=2, fewest=1)) == 2
    with raises_code("too_few_prompts", "4 different prompts", "5 are needed"):
        spooled_prompts(tmp_path, pair, traces.read(), window=10, fewest=5)


def test_a_prompt_that_is_asked_again_is_as_new_as_it_was_asked_last(tmp_path: Path) -> None:
    file = tmp_path / "requests.jsonl"
    file.write_text(
        "".join(
            json.dumps({"prompt": text}) + "\n"
            for text in ("frequent", "old", "new", "newer", "frequent")
        )
    )
    assert {prompt.prompt for prompt in recorded_prompts(file, window=3, fewest=1)} == {
        "frequent",
        "new",
        "newer",
    }


def test_an_odd_request_does_not_keep_the_others_from_being_used(tmp_path: Path) -> None:
    """All of these a server may be sent; the last line is still being written."""
    pair = tiny_pair(2)
    traces = collect_traces(pair, PROMPTS, tmp_path, max_tokens=4, rollout=1)
    good = [
        {"prompt": "ten men"},
        {"messages": [{"role": "user", "content": "in an hour"}], "id": "same"},
        {"prompt": "a hen", "id": "same"},
    ]
    odd = [
        {"prompt": "  "},
        {"prompt": ["one", "two"]},
        [1],
        {
            "messages": [
                {"role": "user", "content": "go"},
                {"role": "assistant", "content": None},
                {"role": "user", "content": "on"},
            ]
        },
    ]
    bodies = [
        json.dumps(body) for pair_of in zip(odd, [*good, {}], strict=True) for body in pair_of
    ]
    (tmp_path / "requests-0.jsonl").write_text("\n".join(bodies) + "\n{not json\n")
    (tmp_path / "requests-1.jsonl").write_bytes(b'{"prompt": "an onion"}\n\xff\n')
    (tmp_path / "requests-2.jsonl").write_text('{"prompt": "the inn"}\n{"prompt": "the')
    found = spooled_prompts(tmp_path, pair, traces.read(), window=10, fewest=5)
    assert sorted(prompt.prompt for prompt in found) == [
        "a hen",
        "an onion",
        "in an hour",
        "on",
        "one",
        "ten men",
        "the inn",
        "two",
    ]
    with raises_code(
        "too_few_prompts", "8 different prompts", "5 requests", "line 1: its prompt is empty"
    ):
        spooled_prompts(tmp_path, pair, traces.read(), window=10, fewest=9)


def test_request_bodies_are_those_of_the_shards_that_are_looked_at(tmp_path: Path) -> None:
    """What was sampled is not watched: who calibrates on it compares with other traffic than he
    calibrated on."""
    pair = tiny_pair(2)
    for number, (temperature, prompt) in enumerate(
        ((0.0, "ten men"), (1.0, "an onion"), (0.0, "the inn"))
    ):
        collect_traces(
            pair,
            PROMPTS[:1],
            tmp_path / f"made-{number}",
            max_tokens=4,
            rollout=1,
            temperature=temperature,
        )
        (tmp_path / f"made-{number}" / "shard-00000.parquet").rename(
            tmp_path / f"shard-{number:015d}-7.parquet"
        )
        (tmp_path / f"requests-{number:015d}-7.jsonl").write_text(
            json.dumps({"prompt": prompt}) + "\n"
        )
    # its shard went to make room
    (tmp_path / "requests-000000000000009-7.jsonl").write_text('{"prompt": "a hen"}\n')
    (tmp_path / "mine.jsonl").write_text('{"prompt": "one hour"}\n')
    found = read_spool(tmp_path, pair.fingerprint, window=10, temperature=0.0)
    asked: dict[str, Any] = {"window": 10, "shards": found.shards, "notes": found.notes}
    told = spooled_prompts(tmp_path, pair, found.rows, fewest=2, **asked)
    assert sorted(prompt.prompt for prompt in told) == ["a hen", "one hour", "ten men", "the inn"]
    with raises_code(
        "too_few_prompts", "4 different prompts", "(1 prompts of the feedback left out"
    ):
        spooled_prompts(tmp_path, pair, found.rows, fewest=5, **asked)


def test_request_bodies_go_before_traces(tmp_path: Path) -> None:
    pair = tiny_pair(2)
    traces = collect_traces(pair, PROMPTS, tmp_path, max_tokens=4, rollout=1)
    body = {
        "model": "tiny",
        "messages": [
            {"role": "system", "content": "be short"},
            {"role": "user", "content": "in an hour"},
        ],
    }
    (tmp_path / "requests.jsonl").write_text(
        json.dumps(body) + "\n" + json.dumps({"prompt": "ten men"}) + "\n"
    )
    found = spooled_prompts(tmp_path, pair, traces.read(), window=10, fewest=2)
    assert sorted(prompt.prompt for prompt in found) == ["in an hour", "ten men"]
    write_prompts(tmp_path / "kept.jsonl", found)
    again = {prompt.prompt: prompt for prompt in read_prompts(tmp_path / "kept.jsonl")}
    assert again["in an hour"].messages == ({"role": "system", "content": "be short"},)
    assert again["ten men"].messages == ()
    assert (again["ten men"].raw, again["in an hour"].raw) == (True, False), (
        "a completion is not wrapped in a chat template"
    )
    assert ids_of(pair, again["ten men"]) == pair.encode("ten men")
    assert {prompt.id for prompt in again.values()} == {prompt.id for prompt in found}


@pytest.mark.parametrize("before", [[], [("user", "one"), ("assistant", "two")]])
def test_a_prompt_whose_last_message_is_an_assistants_is_read_as_it_was(
    tmp_path: Path, before: list[tuple[str, str]]
) -> None:
    """Read as a recording, its last message would be the answer, and all else other turns."""
    said = [*before, ("user", "go on"), ("assistant", "well,"), ("assistant", "yes")]
    row = {"messages": [{"role": role, "content": text} for role, text in said]}
    asked = prompt_of(row, "p", "here")
    assert [message["content"] for message in asked.after] == ["well,"]
    write_prompts(tmp_path / "kept.jsonl", [asked])
    (again,) = read_prompts(tmp_path / "kept.jsonl")
    assert (context_of(again), again.turns) == (context_of(asked), asked.turns)
    assert again.answers == (), "the written prompt has none"
