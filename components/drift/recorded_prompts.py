"""Which prompts a trace that no plan describes was made of, such as requests that a server
recorded: as hashes.

What was answered in it is known by heart to a datastore, so nothing may be measured on these
prompts. Their texts are the bodies of the requests, else what the tokens decode to. The hashes of
the tokens are recorded too, for prompts that are given as tokens.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow.compute as pc

from draftwell.components.drift.prompts import decoded
from draftwell.components.prompts.overlap import hashes_of
from draftwell.components.prompts.prompt import Prompt
from draftwell.components.prompts.sources import jsonl_files, readable_requests

if TYPE_CHECKING:
    from draftwell.serving.recording.trace import TraceSet
    from draftwell.serving.runtime.pair import LoadedPair

WITHOUT_TEXT = "requests recorded without a text"


def recorded_hashes(
    traces: TraceSet, pair: LoadedPair | None = None
) -> tuple[list[str] | None, tuple[str, ...]]:
    """Hashes of the prompts of a trace without a plan, sorted, and what of it has others.

    Args:
        pair: that decodes the prompts of requests without a body; without it only their tokens are
            hashed.
    Returns:
        None in place of the hashes where no prompt was recorded at all.
    """
    bodies = {path: readable_requests([path])[0] for path in jsonl_files(traces.folder)}
    hashes, complete = (
        set(hashes_of(prompt for prompts in bodies.values() for prompt in prompts)),
        True,
    )
    for path in traces.shards:
        rows = traces.read_shard(path, ("prompt_id", "turn", "kind", "prompt_tokens"))
        first = rows.filter(
            pc.and_(pc.equal(rows.column("turn"), 0), pc.not_equal(rows.column("kind"), "bare"))
        )
        tokens = {
            name: tuple(ids)
            for name, ids in zip(
                *(first.column(c).to_pylist() for c in ("prompt_id", "prompt_tokens")), strict=True
            )
            if ids is not None
        }
        hashes.update(hashes_of(Prompt("", None, [""], tokens=(ids,)) for ids in tokens.values()))
        prompts = len(pc.unique(rows.column("prompt_id")))
        if len(bodies.get(body_of(path), ())) < prompts:
            texts = decoded(pair, first) if pair is not None else []
            hashes.update(hashes_of(texts))
            complete &= len({prompt.id for prompt in texts}) == prompts
    return sorted(hashes) or None, () if complete or not hashes else (WITHOUT_TEXT,)


def body_of(shard: Path) -> Path:
    """The file with the bodies of a shard's requests, as a server names it
    (`serving/server/feedback/spool.py`)."""
    return shard.with_name(f"requests-{shard.stem.removeprefix('shard-')}.jsonl")
