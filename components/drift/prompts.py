"""The prompts of recorded traffic, to calibrate on: request bodies where the spool keeps them, else
what its traces begin with. And the prompts of a trace, to run another strategy on them."""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from draftwell.components.collect.continuations import message_of, template_around
from draftwell.components.prompts.prompt import Prompt, context_of
from draftwell.components.prompts.sources import jsonl_files, readable_requests
from draftwell.components.train.examples import Examples, split_by_prompt
from draftwell.serving.errors import DraftwellError
from draftwell.serving.files import write_atomically
from draftwell.serving.recording.tenants import tenants_of

if TYPE_CHECKING:
    import pyarrow as pa

    from draftwell.serving.recording.trace import TraceSet
    from draftwell.serving.runtime.pair import LoadedPair


def spooled_prompts(
    folder: Path,
    pair: LoadedPair,
    rows: pa.Table,
    *,
    window: int,
    fewest: int,
    shards: Collection[str] | None = None,
    notes: Sequence[str] = (),
) -> list[Prompt]:
    """Different prompts of the newest traffic, in random order, so that any part of them is like
    the whole.

    Args:
        folder: the spool; files of request bodies (`.jsonl`) in it go before what its traces hold.
            Bodies without a prompt are left out.
        rows: of the spool's traces.
        window: newest prompts, at most.
        fewest: less than this is refused.
        shards: names of those that `rows` are of; request bodies that a server wrote with others
            are left out. None takes all.
        notes: what was left out before, reported where too few are left.
    Raises:
        DraftwellError: no texts, or too few prompts; the message says which option the server
            needs.
    """
    files = [path for path in jsonl_files(folder) if shards is None or watched(path, shards)]
    found, wrong = readable_requests(files) if files else (decoded(pair, rows), [])
    if not found and rows.column("prompt_tokens").null_count == rows.num_rows > 0:
        raise DraftwellError(
            f"the traces in {folder} hold numbers and no text: drift shows in them, but "
            "there is nothing to calibrate "
            "on: start the server with --feedback-text",
            code="spool_without_text",
        )
    return in_random_order(
        folder, found, window=window, fewest=fewest, notes=[*unreadable(wrong), *notes]
    )


def recorded_prompts(place: Path, *, window: int, fewest: int) -> list[Prompt]:
    """Different prompts of the newest requests that somebody recorded, in random order, so that any
    part of them is like the whole.

    Args:
        place: a JSONL file of requests' bodies, or a folder of such files, whose names are in the
            order of their time.
        window: newest prompts, at most.
        fewest: less than this is refused.
    Raises:
        DraftwellError: there is no such place (`no_prompts`), or too few prompts in it
            (`too_few_prompts`).
    """
    refuse_missing(place)
    found, wrong = readable_requests(jsonl_files(place) if place.is_dir() else [place])
    return in_random_order(place, found, window=window, fewest=fewest, notes=unreadable(wrong))


def refuse_missing(place: Path) -> None:
    """Refuse a place of recorded requests that is not there.

    Raises:
        DraftwellError: it is not (`no_prompts`).
    """
    if not place.exists():
        raise DraftwellError(
            f"there is no {place}: name the file or folder of recorded requests", code="no_prompts"
        )


def unreadable(wrong: Sequence[DraftwellError]) -> list[str]:
    """A note about requests that hold no prompt that can be read, where there are any."""
    return [f"{len(wrong)} requests cannot: {wrong[0]}"] if wrong else []


def in_random_order(
    place: Path, found: Sequence[Prompt], *, window: int, fewest: int, notes: Sequence[str]
) -> list[Prompt]:
    """The newest different ones, in an order that is the same for the same prompts; their ids are
    new, with the tenant of before.

    A prompt that was asked again is as new as it was asked last.

    Raises:
        DraftwellError: too few (`too_few_prompts`).
    """
    newest: dict[str, Prompt] = {}
    for p in reversed(found):
        newest.setdefault(json.dumps([p.turns, context_of(p), p.tokens]), p)
    different = list(newest.values())[:window][::-1]
    if len(different) < fewest:
        odd = f" ({'; '.join(notes)})" if notes else ""
        raise DraftwellError(
            f"{place} holds {len(different)} different prompts that can be read{odd}, "
            f"{fewest} are needed to "
            "recalibrate: wait for more traffic, or let the server record requests with their text",
            code="too_few_prompts",
        )
    order = np.random.default_rng(len(different)).permutation(len(different))
    return [
        replace(
            different[i], id="/".join(["spool", *tenants_of([different[i].id]), f"{number:04d}"])
        )
        for number, i in enumerate(order)
    ]


def watched(file: Path, shards: Collection[str]) -> bool:
    """Whether a file of request bodies counts: a server's `requests-X.jsonl` if its
    `shard-X.parquet` does, any other one always."""
    name, *_ = file.name.split(".")
    shard = file.with_name(f"shard-{name.removeprefix('requests-')}.parquet")
    return not name.startswith("requests-") or shard.name in shards or not shard.exists()


def decoded(pair: LoadedPair, rows: pa.Table) -> list[Prompt]:
    """Prompts of a trace's token ids: those of one message, which its tokens can be made of again.
    Others are left out."""
    around = template_around(pair)
    found = []
    columns = rows.select(["prompt_id", "turn", "prompt_tokens"]).to_pydict()
    for name, turn, ids in zip(*columns.values(), strict=True):
        if ids is None or turn:
            continue
        if (text := message_of(pair, ids, around)) is not None:
            found.append(Prompt(name, None, [text]))
    return found


def prompts_of_trace(traces: TraceSet) -> list[Prompt]:
    """The prompts that the target's texts of a trace continue, token by token: conversations and
    cut ones too."""
    rows = traces.read(["prompt_id", "task", "turn", "kind", "prompt_tokens"]).to_pylist()
    begun = sorted(
        (row for row in rows if row["kind"] == "target" and row["prompt_tokens"] is not None),
        key=lambda row: row["turn"],
    )
    found: dict[str, list[tuple[int, ...]]] = {}
    tasks = {row["prompt_id"]: row["task"] for row in begun}
    for row in begun:
        found.setdefault(row["prompt_id"], []).append(tuple(row["prompt_tokens"]))
    return [
        Prompt(
            name,
            tasks[name],
            [""] * len(turns),
            answers=("",) * (len(turns) - 1),
            tokens=tuple(turns),
        )
        for name, turns in found.items()
    ]


def write_prompts(path: Path, prompts: Sequence[Prompt]) -> None:
    """Prompts as JSONL that `read_prompts` reads; a conversation keeps what stands before its first
    turn, a raw text stays raw."""
    rows = []
    for p in prompts:
        asked = [*p.messages, {"role": "user", "content": p.turns[0]}, *p.after]
        if p.after and p.after[-1]["role"] == "assistant":
            asked.append({"role": "assistant", "content": ""})  # else the last one is its answer
        body: dict[str, Any] = {"messages": asked} if len(asked) > 1 else {"turns": p.turns}
        if p.tokens:
            body = {"prompt": p.tokens[0]}
        further = {"raw": p.raw, "tools": p.tools}
        row = {"id": p.id, "task": p.task, **body, **{k: v for k, v in further.items() if v}}
        rows.append(row)
    write_atomically(
        path, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode()
    )


def untouched_prompts(ids: Sequence[str], seed: int) -> list[str]:
    """The prompts of a trace that a verifier trained on it was tested on: neither its weights nor
    its choices have seen them.

    Args:
        ids: of different prompts; of several that say the same, the first one's.
    """
    nothing = np.zeros(len(ids), dtype=np.float32)
    _, tested = split_by_prompt(Examples({}, nothing, nothing, np.array(ids)), seed)
    return sorted(set(tested.prompt.tolist()))
