"""Collection: both models read texts of a set of prompts, and what they say at every position is
kept as a trace.

One shard holds the texts of a few prompts and is written when they are done. A run that was killed,
at any moment, resumes with the first missing shard: what a shard holds depends on its own prompts
and on the plan only. Texts also depend on the kind of processor, and where forward passes are not
exact on the number of threads, so a collection should be resumed where it was begun.

Shards do not depend on each other, so others may write them: `collect_traces` hands the missing
ones to `spread`, and each worker calls `collect_shard`. The trace is the same, row by row, as that
of a run that writes all shards itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from draftwell.components.collect.plan import (
    ForeignTrace,
    check_complete,
    claim,
    exclusive_folder,
    forget,
    read_plan,
)
from draftwell.components.collect.settings import CollectionSettings
from draftwell.components.collect.work import Meter, Progress, work_of
from draftwell.components.prompts.prompt import Prompt, ids_of
from draftwell.serving.recording.trace import TraceSet
from draftwell.serving.runtime.pair import LoadedPair
from draftwell.serving.runtime.strategies import Strategy

Spread = Callable[[Sequence[int], Callable[[int], None]], None]
"""Has the shards of these numbers written, and calls back with each that is there."""


def collect_traces(
    pair: LoadedPair,
    prompts: Sequence[Prompt],
    folder: Path,
    settings: CollectionSettings,
    *,
    strategy: Strategy | None = None,
    fresh: bool = False,
    spread: Spread | None = None,
    progress: Progress | None = None,
) -> TraceSet:
    """Write texts for all prompts and record both models along them.

    Args:
        pair: with a draft, and as many slots as requests shall run at once.
        folder: of the trace; a run with the same inputs that was cut short is resumed there.
        strategy: a lossy one, which writes the texts of kind `lossy`: what a server that decodes
            with it would write.
        fresh: replace a trace of other inputs in the folder, once these prompts are known to be
            readable.
        spread: has shards written by others (`collect_shard`, with the same settings); None writes
            them here, one by one.
        progress: called with (prompts done, prompts in all, tokens per second and time left)
            whenever a text has been read.
    Raises:
        DraftwellError: what `work_of` refuses, a folder with another trace or one that another
            collection is writing to, or shards that nobody wrote.
    """
    work = work_of(pair, prompts, settings, strategy)
    plan, traces = work.plan, TraceSet(Path(folder), fingerprint=pair.fingerprint)
    with exclusive_folder(traces.folder):
        if fresh and read_plan(traces.folder) != plan:
            for prompt in prompts:
                ids_of(pair, prompt)
            forget(traces.folder)
        claim(traces, plan)
        missing = [index for index in range(plan.shards) if not traces.shard(index).is_file()]
        meter = Meter(len(prompts), sum(len(work.part(index)) for index in missing), progress)

        def found(index: int) -> None:
            meter.advance(len(work.part(index)), rows_of(traces.shard(index)))

        if spread is None:
            for index in missing:
                work.write_shard(traces, index, meter)
        elif missing:
            spread(missing, found)
            check_complete(traces, plan)
    return traces


def collect_shard(
    pair: LoadedPair,
    prompts: Sequence[Prompt],
    folder: Path,
    index: int,
    settings: CollectionSettings,
) -> Path:
    """Write one shard of a folder that a `collect_traces` of the same inputs holds; a shard that
    exists already is left alone.

    Two processes that write the same shard write the same bytes, and each file appears by a rename.
    So a worker that was believed dead and comes back does no harm.

    Raises:
        ForeignTrace: the folder was not claimed for these prompts, pair and settings.
    """
    work = work_of(pair, prompts, settings)
    traces = TraceSet(Path(folder), fingerprint=pair.fingerprint)
    if read_plan(traces.folder) != work.plan:
        raise ForeignTrace(
            f"{folder} is not claimed here for these prompts, pair and settings: every "
            "worker needs the same version of draftwell, the same models, and the folder under "
            "the same path"
        )
    path = traces.shard(index)
    if not path.is_file():
        work.write_shard(traces, index, Meter(len(prompts), len(work.part(index)), None))
    return path


def cuts(traces: TraceSet) -> tuple[int, int]:
    """How many prompts were too long and were cut, and by how many tokens in all; each turn counts
    as a prompt."""
    rows = traces.read(["prompt_id", "turn", "cut_tokens"]).to_pylist()
    cut = {(row["prompt_id"], row["turn"]): row["cut_tokens"] for row in rows if row["cut_tokens"]}
    return len(cut), sum(cut.values())


def rows_of(path: Path) -> int:
    """Rows of a shard, without reading them."""
    import pyarrow.parquet as pq

    return int(pq.read_metadata(path).num_rows)
